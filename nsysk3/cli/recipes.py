"""``nsysk3 recipes``: what ``nsys recipe`` can run."""

from __future__ import annotations

import typer

recipes_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Recipes for NVIDIA's `nsys recipe`.")


@recipes_app.command()
def path() -> None:
    """Print the folder of the recipes, for NSYS_RECIPE_PATH.

    NSYS_RECIPE_PATH=$(nsysk3 recipes path) nsys recipe nsysk3_overlap --input DIR
    """
    from nsysk3.recipes import SHIMS

    typer.echo(SHIMS)


@recipes_app.command("list")
def list_recipes() -> None:
    """Print the recipes by name, with what each tells."""
    from nsysk3.recipes import recipes

    for recipe in recipes():
        typer.echo(f"{recipe.name}\n  {recipe.description}")
