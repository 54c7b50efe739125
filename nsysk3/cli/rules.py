"""``nsysk3 rules``: how kernels are classified."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

rules_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="How kernel names become roles and categories."
)

RulesOption = Annotated[Path | None, typer.Option(help="Kernel rules to try before the shipped ones.")]


@rules_app.command()
def explain(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A kernel name, best the demangled one.")],
    rules: RulesOption = None,
) -> None:
    """Say which rule decides a kernel's class, and which others would match it."""
    from nsysk3.classify import RuleSet

    typer.echo(str(RuleSet.load(rules).explain(name)))


@rules_app.command("list")
def list_rules(rules: RulesOption = None) -> None:
    """Print the rules in the order they are tried."""
    from nsysk3.classify import RuleSet

    for number, rule in enumerate(RuleSet.load(rules).rules, 1):
        typer.echo(f"{number:3}  {rule.role:15} {rule.category:22} {rule.pattern}")
