"""Recipes: nsysk3's numbers where Nsight Systems looks for them.

``shims/`` holds what ``nsys recipe`` runs; ``write_recipe`` writes the same directory without it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from nsysk3.errors import InputError

# What NSYS_RECIPE_PATH must name.
SHIMS = Path(__file__).parent / "shims"
DEFAULT_RECIPE = "nsysk3_overlap"


@dataclass(frozen=True)
class Recipe:
    """One recipe, as its metadata.json names it."""

    name: str
    display_name: str
    description: str


def recipes() -> list[Recipe]:
    """The recipes that nsysk3 brings, by name."""
    found = []
    for path in sorted(SHIMS.glob("*/metadata.json")):
        raw = json.loads(path.read_text("utf-8"))
        found.append(Recipe(path.parent.name, raw["display_name"], raw["description"]))
    return found


def find_recipe(name: str) -> Recipe:
    """The recipe of that name; InputError names those there are."""
    every = recipes()
    for recipe in every:
        if recipe.name == name:
            return recipe
    raise InputError(f"no recipe {name!r}: there are {', '.join(recipe.name for recipe in every)}")
