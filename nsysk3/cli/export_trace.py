"""``nsysk3 export-trace``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nsysk3.cli.analyze import PARTIAL
from nsysk3.cli.progress import status


def export_trace(
    paths: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="A run directory, or traces of one run, as for analyze.")
    ],
    out: Annotated[Path, typer.Option(help="File to write; gzipped where it ends in .gz.")] = Path("trace.json.gz"),
    rules: Annotated[Path | None, typer.Option(help="Kernel rules to try before the shipped ones.")] = None,
    ranks: Annotated[Path | None, typer.Option(help="TOML map that says which GPU is which rank.")] = None,
    nsys: Annotated[
        Path | None, typer.Option(help="The nsys that exports .nsys-rep files; else $NSYSK3_NSYS, else PATH.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Write a run as one trace for the Perfetto UI or chrome://tracing.

    All ranks on one clock, a process a rank, a track a stream; waiting is a slice inside its kernel, and arrows go from
    each Send to its Recv.
    """
    from nsysk3.analysis.cross import cross_rank
    from nsysk3.analysis.members import Membership
    from nsysk3.analysis.roles import assign_roles
    from nsysk3.classify import RuleSet
    from nsysk3.report.perfetto import write_trace
    from nsysk3.run.config import load_settings
    from nsysk3.run.files import keep_inputs
    from nsysk3.trace.load import load

    keep_inputs(out, paths)
    if rules is None and (own := load_settings().analyze.rules):
        rules = Path(own)
    with status(quiet) as progress:
        run = load(paths, nsys=nsys, ranks=ranks, progress=progress)
        named = assign_roles(run.events, run.names, run.nccl_calls, RuleSet.load(rules))
        found = cross_rank(named, run.ranks, len(run.reports), Membership.of(run))
        count = write_trace(out, found.events, run.ranks, run.names, found.pairs)
    typer.echo(f"{count:,} events written to {out}", err=True)
    for problem in run.problems:
        typer.echo(f"nsysk3: {problem}", err=True)
    if run.problems:
        raise typer.Exit(PARTIAL)
