"""``nsysk3 doctor``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nsysk3.cli.progress import status

# Analysing, or what was asked for by name, cannot work.
CANNOT = 3


def doctor(
    config: Annotated[
        Path | None,
        typer.Option(help="Settings, or a shipped example; default: $NSYSK3_CONFIG, else nsysk3.toml here."),
    ] = None,
    hosts: Annotated[
        str | None, typer.Option(help="Hosts with commas between, or a file with one a line; default: cluster.hosts.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Say what works here, what does not, and how to fix it: this machine and the hosts of the settings.

    Looks at Python packages, nsys, GPUs, permissions, SGLang and the plugin's hooks, NCCL, containers, model, network,
    disk and clocks. Changes nothing. Exit code 3 when traces cannot be analysed here, or when --config or --hosts was
    given and no profile can be run there.
    """
    from nsysk3.doctor.examine import examine

    with status(quiet) as progress:
        found = examine(config, hosts, progress or (lambda _: None))
    if json:
        from json import dumps

        typer.echo(dumps(found.to_document(), indent=2))
    else:
        from rich.console import Console

        from nsysk3.doctor.terminal import print_diagnosis

        print_diagnosis(found, Console(highlight=False))
    for each in found.failed:
        typer.echo(f"nsysk3: cannot: {each}", err=True)
    if found.failed or not found.works("analyze"):
        raise typer.Exit(CANNOT)
