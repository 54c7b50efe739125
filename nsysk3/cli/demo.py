"""``nsysk3 demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nsysk3.cli.browser import show
from nsysk3.cli.progress import status

_SHOWN = ("kimi-k3-6000d-pp1", "kimi-k3-6000d-pp8")


def demo(
    out: Annotated[Path, typer.Option(help="Directory for the two runs and the page.")] = Path("nsysk3-demo"),
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Show the comparison in the browser.")] = True,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """See what nsysk3 does without a GPU: Kimi-K3 prefill, PP1/TP32 against PP8/TP4 on 32 GPUs.

    Simulates both runs (calibrated on published figures), analyses them, prints both summaries and the comparison, and
    writes the page of the comparison.
    """
    from nsysk3.analysis.analyze import analyze
    from nsysk3.compare import compare
    from nsysk3.report.compare_terminal import print_comparison
    from nsysk3.report.html import render_comparison
    from nsysk3.report.terminal import console, print_result
    from nsysk3.simulate.presets import preset
    from nsysk3.simulate.run import simulate

    results = []
    with status(quiet) as progress:
        for name in _SHOWN:
            made = simulate(preset(name), out / name, force=True, progress=progress)
            results.append(analyze(made.directory, progress=progress))
            results[-1].save(made.directory / "analysis")
        comparison = compare(results[0], results[1])
    for name, result in zip(_SHOWN, results, strict=True):
        typer.echo(f"{out / name}")
        print_result(result, console())
    print_comparison(comparison, console())
    page = out / "compare.html"
    page.write_text(render_comparison(comparison, results), "utf-8")
    typer.echo(f"runs, results and {page.name} written to {out}/", err=True)
    if open_page:
        show(page)
