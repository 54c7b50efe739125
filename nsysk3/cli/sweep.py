"""``nsysk3 sweep``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nsysk3.cli.profile import Engine

if TYPE_CHECKING:
    from nsysk3.sweep.merge import Sweep

PAGE_NAME = "report.html"

sweep_app = typer.Typer(rich_markup_mode=None, invoke_without_command=True)


class Format(StrEnum):
    """What to write."""

    text = "text"
    md = "md"
    html = "html"
    json = "json"


@sweep_app.callback()
def sweep(
    context: typer.Context,
    pp: Annotated[
        str | None, typer.Option(help="Pipeline depths, such as 2,4,8,16. With --resume: those of before.")
    ] = None,
    tp: Annotated[
        str | None, typer.Option(help="Ranks of a stage: one number, or one a depth. Default: all GPUs over PP.")
    ] = None,
    ep: Annotated[
        int | None, typer.Option(min=1, help="Expert parallelism, at most TP. Default: 4, at most TP.")
    ] = None,
    concurrency: Annotated[str | None, typer.Option(help="Requests at once. Default: 8,16.")] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Repeats of each point. Default: 3.")] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Requests of a repeat. Default: load.requests, or 40.")
    ] = None,
    layout_args: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PPn=ARGS", help="What the server of one depth gets besides: PP16='--option 1'. Repeatable."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the results. Default: a new sweep-DATE-TIME-ID; with --resume the newest."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the sweep in --out: only what is missing.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and every command; start nothing.")
    ] = False,
    baseline: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="An earlier sweep to stand in the same tables, once checked item by item."),
    ] = None,
    accept: Annotated[
        list[str] | None,
        typer.Option(metavar="ITEM", help="Merge a baseline although this item differs; reports say so. Repeatable."),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Settings. Default: $NSYSK3_CONFIG, else ./nsysk3.toml.")] = None,
    hosts: Annotated[str | None, typer.Option(help="Hosts with commas between, in place of cluster.hosts.")] = None,
    model: Annotated[str | None, typer.Option(help="Folder of the model, in place of model.path.")] = None,
    engine: Annotated[Engine | None, typer.Option(help="In place of server.engine.")] = None,
    input_len: Annotated[int | None, typer.Option(help="Tokens of a prompt, in place of load.input_len.")] = None,
    chunk: Annotated[int | None, typer.Option(help="Tokens of a prefill chunk, in place of load.chunk.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Measure pipeline depths against each other on the hosts of the settings.

    For each layout the service is started, checked against /server_info, loaded with C x repeats, and stopped; every
    repeat is kept as soon as it is over. A layout that fails is written down with its cause and the next one is run;
    the exit code is 4 then. The radix cache and markers are off. docs/sweep.md describes the folder.
    """
    if context.invoked_subcommand:
        return
    from nsysk3.cli.progress import teller
    from nsysk3.errors import RunFailedError
    from nsysk3.launch.request import read_hosts, with_allocation
    from nsysk3.run.config import load_settings
    from nsysk3.sweep.dry import dry_run as describe
    from nsysk3.sweep.prepare import only_one, prepare
    from nsysk3.sweep.request import Words, request_of, sweep_to_resume
    from nsysk3.sweep.runner import run_sweep

    overrides = {
        "cluster.hosts": read_hosts(hosts), "model.path": model, "server.engine": engine, "load.input_len": input_len,
        "load.chunk": chunk,
    }  # fmt: skip
    settings = with_allocation(load_settings(config, overrides=overrides))
    folder, before = sweep_to_resume(out) if resume else (out, None)
    words = Words(pp, tp, ep, concurrency, repeats, requests, layout_args or (), baseline or (), accept or ())
    wanted = request_of(words, settings, before)
    job = prepare(settings, wanted, folder, resume=resume, say=teller(quiet), write=not dry_run)
    if dry_run:
        typer.echo(describe(job), nl=False)
        return
    with only_one(job.folder):
        failed = run_sweep(job)
    _print(job.folder.path)
    if failed:
        count = f"{len(failed)} of {len(job.matrix.layouts)} layouts failed"
        raise RunFailedError(
            f"{count}: {'; '.join(failed).rstrip('.')}. Go on: nsysk3 sweep --resume --out {job.folder.path}"
        )
    typer.echo(f"results in {job.folder.path}; nsysk3 sweep report {job.folder.path} shows them again", err=True)


@sweep_app.command()
def report(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a sweep.")],
    baseline: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="Another sweep to stand in the same tables, once checked item by item."),
    ] = None,
    accept: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ITEM", help="Merge a baseline although this item differs; the report says so. Repeatable."
        ),
    ] = None,
    form: Annotated[
        Format, typer.Option("--format", help="text, md, html (one page that loads nothing) or json.")
    ] = Format.text,
    out: Annotated[
        Path | None, typer.Option(help="File to write. Default: stdout; report.html in DIR for html.")
    ] = None,
) -> None:
    """Show what a sweep found: ladders against the baseline, steps, memory, saturation, the knee, what to run.

    DIR is what sweep wrote, or any folder with a summary.csv.
    """
    from nsysk3.run.files import write_text
    from nsysk3.sweep.merge import inputs_of

    found = _merged(directory, baseline or [], accept or [])
    text = _rendered(found, form)
    target = out or (directory / PAGE_NAME if form is Format.html else None)
    if target is None:
        typer.echo(text, nl=False)
        return
    write_text(target, text, inputs_of(found.folder))
    typer.echo(f"report written to {target}", err=True)


def _merged(directory: Path, baselines: list[Path], accept: list[str]) -> Sweep:
    from nsysk3.sweep.merge import check_asked, kept_baselines, merged, read_sweep

    own = read_sweep(directory)
    others = [*kept_baselines(own.folder), *(read_sweep(path) for path in baselines)]
    check_asked(accept, own.folder, own.record, others)
    return merged(own, others, [*own.record.accepted, *accept])


def _rendered(found: Sweep, form: Format) -> str:
    from io import StringIO

    from nsysk3.sweep.report import find_in, to_json

    if form is Format.json:
        return to_json(found)
    findings, more = find_in(found)
    if form is Format.html:
        from nsysk3.sweep.page import render_page

        return render_page(findings, found.record, more)
    if form is Format.md:
        from nsysk3.sweep.markdown import render_markdown

        return render_markdown(findings, found.record, more)
    from nsysk3.sweep.terminal import console, print_report

    text = StringIO()
    print_report(findings, found.record, console(text), more)
    return text.getvalue()


def _print(directory: Path) -> None:
    """The report of a sweep that has just ended, as far as there is one."""
    from nsysk3.errors import NsysK3Error

    try:
        typer.echo(_rendered(_merged(directory, [], []), Format.text), nl=False)
    except NsysK3Error as error:
        typer.echo(f"no report: {error}", err=True)
