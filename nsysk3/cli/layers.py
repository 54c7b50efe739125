"""``nsysk3 layers``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nsysk3.cli.progress import status


def layers(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A result or run directory, or traces.")],
    window: Annotated[
        str | None,
        typer.Option(help="capture, prefill, steady or START:END; default: what was analysed, else as for analyze."),
    ] = None,
    csv: Annotated[bool, typer.Option("--csv", help="Print the layer_rows table as CSV.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Show what each layer costs a forward, and which layers stand out.

    One row a layer, medians over its ranks and forwards; the tables layers.parquet and layer_summary.parquet of
    `nsysk3 analyze --out` have every forward and rank.
    """
    from nsysk3.cli.results import open_result, tell_problems
    from nsysk3.report.layers_terminal import print_layers
    from nsysk3.report.terminal import console

    with status(quiet) as progress:
        result = open_result(run, window, progress)
    if csv:
        typer.echo(result.tables["layer_rows"].write_csv(), nl=False)
    else:
        print_layers(result, console())
    tell_problems(result)
