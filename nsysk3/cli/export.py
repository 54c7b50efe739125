"""``nsysk3 export``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from nsysk3.cli.progress import status


class ExportType(StrEnum):
    """Kinds of export."""

    sqlite = "sqlite"
    parquetdir = "parquetdir"


def export(
    reports: Annotated[list[Path], typer.Argument(metavar="REP...", help="Nsight Systems reports (.nsys-rep).")],
    kind: Annotated[ExportType, typer.Option("--type", help="What to write.")] = ExportType.sqlite,
    out: Annotated[
        Path | None, typer.Option(help="File or directory to write, for a single report; default: beside the report.")
    ] = None,
    nsys: Annotated[Path | None, typer.Option(help="The nsys to use; else $NSYSK3_NSYS, else PATH.")] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Export again, and replace an existing --out.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Export reports with NCCL payloads where the nsys can.

    Prints the path of each export. A report that was exported before and has not changed is not exported again.
    """
    from nsysk3.errors import InputError, NsysK3Error
    from nsysk3.trace.nsys import export_report, find_nsys

    if out and len(reports) > 1:
        raise InputError("--out takes a single report; without it each export lies beside its report")
    tool = find_nsys(nsys)
    failures: list[NsysK3Error] = []
    with status(quiet) as progress:
        for report in reports:
            try:
                made = export_report(report, tool, kind=kind.value, out=out, progress=progress, force=force)
                typer.echo(made)
            except NsysK3Error as error:
                failures.append(error)
                typer.echo(f"nsysk3: {error}", err=True)
    if failures:
        raise typer.Exit(failures[0].exit_code)
