"""``nsysk3 profile``."""

from __future__ import annotations

import os
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nsysk3.cli.progress import teller

if TYPE_CHECKING:
    from nsysk3.launch.preflight import Preflight


class Engine(StrEnum):
    """Servers that can be started."""

    sglang = "sglang"
    torch = "torch"


class SP(StrEnum):
    """Who makes the sequence-parallel collectives."""

    off = "off"
    sglang = "sglang"
    nsysk3 = "nsysk3"


class Launcher(StrEnum):
    """How commands get to a host."""

    auto = "auto"
    local = "local"
    ssh = "ssh"
    srun = "srun"


class ContainerCli(StrEnum):
    """Programs that run containers."""

    docker = "docker"
    podman = "podman"


class Overhead(StrEnum):
    """How the cost of the profiler is measured."""

    load = "load"
    server = "server"
    off = "off"


def profile(
    pp: Annotated[int, typer.Option(help="Pipeline stages.")],
    server_args: Annotated[
        list[str] | None, typer.Argument(metavar="SERVER_ARGS", help="After --: more arguments of the server.")
    ] = None,
    tp: Annotated[int | None, typer.Option(help="Ranks of a stage; default: GPUs / PP.")] = None,
    ep: Annotated[int | None, typer.Option(help="Expert-parallel groups; default: min(4, TP).")] = None,
    hosts: Annotated[
        str | None, typer.Option(help="Hosts with commas between, or a file with one a line; the first serves.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="Settings, or a shipped example; default: $NSYSK3_CONFIG, else nsysk3.toml here."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Folder of the model on every host.")] = None,
    input_len: Annotated[int | None, typer.Option(help="Tokens of a prompt.")] = None,
    output_len: Annotated[int | None, typer.Option(help="Tokens generated.")] = None,
    concurrency: Annotated[int | None, typer.Option("--concurrency", "-c", help="Requests under way at once.")] = None,
    chunk: Annotated[int | None, typer.Option(help="Tokens of a prefill chunk.")] = None,
    requests: Annotated[int | None, typer.Option(help="Requests of a load.")] = None,
    forwards: Annotated[int | None, typer.Option(help="Forwards to have whole in the window.")] = None,
    engine: Annotated[Engine | None, typer.Option(help="SGLang, or nsysk3's own K3-shaped prefill in torch.")] = None,
    sp: Annotated[SP | None, typer.Option(help="Sequence-parallel collectives: none, SGLang's, nsysk3's.")] = None,
    launcher: Annotated[Launcher | None, typer.Option(help="How commands get to the hosts.")] = None,
    container_cli: Annotated[ContainerCli | None, typer.Option(help="Run the server in a container.")] = None,
    image: Annotated[str | None, typer.Option(help="Image of the container.")] = None,
    overhead: Annotated[
        Overhead | None,
        typer.Option(help="Measure the profiler: the load also without capture; also on a server without nsys; no."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Run directory to make; default: runs/RUN-ID.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what every host would run; start nothing.")] = False,
    analyze: Annotated[bool, typer.Option("--analyze/--no-analyze", help="Analyse the run when it is done.")] = True,
    report: Annotated[bool, typer.Option("--report/--no-report", help="Write report.html too.")] = True,
    skip_preflight: Annotated[bool, typer.Option("--skip-preflight", help="Do not look at the hosts first.")] = False,
    force: Annotated[bool, typer.Option("--force", "-f", help="Go on in spite of what preflight finds.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the run directory and what went wrong.")] = False,
) -> None:
    """Start a server on GPUs, capture a prefill window with Nsight Systems, clean up, and analyse it.

    Checks plan and hosts before anything starts; whatever happens, nothing of the run is left running. Prints the run
    directory. Settings that have no option are in nsysk3.toml (docs/launching.md).
    """
    from nsysk3.launch.plan import make_plan
    from nsysk3.launch.request import (
        check_server_words,
        new_run_id,
        other_nsys,
        read_hosts,
        run_folder,
        with_allocation,
    )
    from nsysk3.launch.shell import dry_run_text
    from nsysk3.run.config import load_settings

    words = check_server_words(server_args or ())
    overrides: dict[str, object] = {
        "cluster.hosts": read_hosts(hosts), "cluster.launcher": launcher, "container.cli": container_cli,
        "container.image": image, "model.path": model, "server.engine": engine, "server.sp": sp,
        "load.input_len": input_len, "load.output_len": output_len, "load.concurrency": concurrency,
        "load.chunk": chunk, "load.requests": requests, "window.forwards": forwards, "window.overhead": overhead,
    }  # fmt: skip
    settings = with_allocation(load_settings(config, overrides=overrides))
    plan = make_plan(settings, pp=pp, tp=tp, ep=ep, run_id=new_run_id(pp), extra_args=words)
    plan = replace(plan, warnings=(*other_nsys(settings, config, overrides, os.environ), *plan.warnings))
    if dry_run:
        typer.echo(dry_run_text(plan), nl=False)
        return
    folder = run_folder(out, plan.run_id)
    from nsysk3.launch.profile import run_profile

    for warning in plan.warnings:
        typer.secho(f"WARNING: {warning}", fg="yellow", bold=True, err=True)
    if not quiet:
        for note in plan.notes:
            typer.echo(f"note: {note}", err=True)
    made = run_profile(
        plan,
        folder,
        say=say_what_went_wrong if quiet else teller(),
        analyze=analyze,
        report=report,
        summary=not quiet,
        preflight="skip" if skip_preflight else "go on" if force else "stop",
        show=None if quiet else show_preflight,
    )
    typer.echo(made)


def say_what_went_wrong(text: str) -> None:
    """Of the lines of a run, print to stderr those that nobody may miss."""
    if text.startswith(("WARNING: ", "not analysed: ")):
        typer.echo(text, err=True)


def show_preflight(found: Preflight) -> None:
    """Print what the hosts have to stderr."""
    from rich.console import Console

    from nsysk3.launch.preflight_table import print_preflight

    print_preflight(found, Console(stderr=True))
