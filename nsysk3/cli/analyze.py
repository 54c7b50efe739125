"""``nsysk3 analyze``."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from nsysk3.cli.progress import status

# Some inputs gave no rank; what could be analysed was.
PARTIAL = 2


class OutputFormat(StrEnum):
    """What is written."""

    result = "result"
    recipe = "recipe"


def _recipes() -> list[str]:
    from nsysk3.recipes import recipes

    return [each.name for each in recipes()]


def analyze(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH...",
            help="A run directory, a directory of reports or exports, or files: .nsys-rep, .sqlite, _pqtdir, _arwdir; "
            "or a URL of one, such as s3://bucket/run or ssh://host/run.",
        ),
    ],
    window: Annotated[
        str | None,
        typer.Option(
            help="capture, prefill, steady, or START:END after the run's first kernel, such as 0.5s:2s. Default: "
            "analyze.window in nsysk3.toml, else capture.",
            autocompletion=lambda: ["capture", "prefill", "steady"],
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Where to write the results. A directory given as PATH gets them in its analysis/ folder."),
    ] = None,
    written: Annotated[
        OutputFormat,
        typer.Option(
            "--format",
            help="result: result.json, CSV and parquet. recipe: a directory as `nsys recipe` writes it, for `nsys "
            "recipe diff` and the Nsight Systems window; without --out the first free RECIPE-N here.",
        ),
    ] = OutputFormat.result,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="Which recipe --format recipe writes (see `nsysk3 recipes list`); default: nsysk3_overlap.",
            autocompletion=_recipes,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print result.json to stdout instead of tables.")] = False,
    rules: Annotated[
        Path | None, typer.Option(help="Kernel rules to try before the shipped ones (TOML or gputrc2graph JSON).")
    ] = None,
    layer_regex: Annotated[
        str | None, typer.Option(help="Finds layers in NVTX range names; must have a group (?P<layer>...).")
    ] = None,
    ranks: Annotated[Path | None, typer.Option(help="TOML map that says which GPU is which rank.")] = None,
    nccl_tests: Annotated[
        list[Path] | None,
        typer.Option(
            help="Log of an nccl-tests run on the same machines; repeatable. Measured busbw is held against it."
        ),
    ] = None,
    nsys: Annotated[
        Path | None, typer.Option(help="The nsys that exports .nsys-rep files; else $NSYSK3_NSYS, else PATH.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(metavar="N", help="Processes that share the reports out. Default: analyze.workers, else 1."),
    ] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(
            metavar="tcp://HOST:PORT",
            help="Let the workers of this Dask cluster do it; they read the paths themselves.",
        ),
    ] = None,
    cache: Annotated[
        bool | None,
        typer.Option(
            "--cache/--no-cache",
            help="Keep what is read of each report in $NSYSK3_CACHE, so that the next analysis of the same files need "
            "not read them. Default: analyze.cache, else no.",
            show_default=False,
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no tables.")] = False,
) -> None:
    """Say where each rank's time went.

    Reads Nsight Systems reports or exports, prints one row a rank and the time budget, and writes result.json, CSV and
    parquet files. Exit code 2 when an input could not be used; the others are analysed all the same.
    """
    from nsysk3.analysis.analyze import analyze as run_analysis
    from nsysk3.cli.results import blamed_on_settings
    from nsysk3.errors import InputError, MissingToolError
    from nsysk3.recipes import DEFAULT_RECIPE, find_recipe
    from nsysk3.report.terminal import console, print_problems, print_result
    from nsysk3.run.config import load_settings
    from nsysk3.run.remote import RemotePath, to_path
    from nsysk3.scale.choose import crew_of
    from nsysk3.trace.load import directory_of

    started = datetime.now()
    if recipe and written is not OutputFormat.recipe:
        raise InputError("--recipe chooses what --format recipe writes: pass both")
    if workers is not None and scheduler is not None:
        raise InputError("--workers and --scheduler: one or the other")
    as_recipe = find_recipe(recipe or DEFAULT_RECIPE) if written is OutputFormat.recipe else None
    defaults = load_settings(overrides={"analyze.workers": workers, "analyze.scheduler": scheduler}).analyze
    chosen = None if workers is not None else defaults.scheduler
    crew = crew_of(defaults.workers, chosen, patience_s=defaults.patience_s)
    typed = [name for name, given in (("window", window), ("layer_regex", layer_regex)) if given is not None]
    with status(quiet) as progress, blamed_on_settings(*typed), crew:
        result = run_analysis(
            paths,
            window=defaults.window if window is None else window,
            rules=rules or defaults.rules,
            nccl_tests=nccl_tests or defaults.nccl_tests,
            layer_regex=defaults.layer_regex if layer_regex is None else layer_regex,
            nsys=nsys,
            ranks=ranks,
            crew=crew,
            cache=defaults.cache if cache is None else cache,
            progress=progress,
        )
    if crew.account.sent and not quiet:
        typer.echo(str(crew.account), err=True)
    folder = directory_of(paths)
    # Files first: whoever reads the tables may stop reading (head, less) and end the command.
    if as_recipe:
        from nsysk3.recipes.write import write_recipe

        typer.echo(f"recipe written to {write_recipe(result, as_recipe, out, started)}/", err=True)
    elif out:
        typer.echo(f"results written to {result.save(out)}/", err=True)
    elif folder:
        try:
            typer.echo(f"results written to {result.save(folder / 'analysis')}/", err=True)
        except MissingToolError as error:  # nobody asked for them there
            typer.echo(f"nsysk3: {error}; pass --out DIR to keep them", err=True)
    elif any(isinstance(to_path(path), RemotePath) for path in paths):
        typer.echo("nsysk3: results of a URL are not kept; pass --out DIR to keep them", err=True)
    if json:
        typer.echo(result.to_json(), nl=False)
    elif not quiet:
        print_result(result, console())
    print_problems((problem.message for problem in result.document.problems), console(typer.get_text_stream("stderr")))
    if result.document.problems:
        raise typer.Exit(PARTIAL)
