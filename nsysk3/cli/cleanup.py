"""``nsysk3 cleanup``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nsysk3.cli.progress import teller


def cleanup(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="A run directory, or a run's id (--hosts or --config tell where)."),
    ],
    hosts: Annotated[
        str | None, typer.Option(help="Hosts with commas between, or a file with one a line; default: the run's own.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Settings; default: $NSYSK3_CONFIG, else nsysk3.toml here.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only what is left.")] = False,
) -> None:
    """End what a run left behind on its hosts, after a power loss or a kill -9: processes, containers, folders.

    Touches nothing that is not marked as the run's; captures that could not be brought and were kept there are removed.
    A run that is still going on is ended too. Exit code 4 when something is left that could not be ended.
    """
    from nsysk3.errors import RunFailedError
    from nsysk3.launch.cleanup import clean_up
    from nsysk3.launch.request import read_hosts, with_allocation
    from nsysk3.run.config import load_settings

    settings = with_allocation(load_settings(config, overrides={"cluster.hosts": read_hosts(hosts)}))
    left = clean_up(run, settings, say=teller(quiet))
    for line in left:
        typer.echo(line)
    if left:
        raise RunFailedError(f"{run}: {len(left)} of its things could not be ended (above)")
