"""``nsysk3 open``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nsysk3.cli.progress import status
from nsysk3.cli.report import PAGE_NAME, Language

if TYPE_CHECKING:
    from nsysk3.result import Result


def open_run(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="A run directory, its results, traces, a sweep's folder, or a page itself."),
    ],
    lang: Annotated[Language | None, typer.Option(help="Language of the page; makes it anew.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Open the report of a run in the browser, and print its path.

    The page is made first where there is none or it is older than the results. A directory of traces is analysed first,
    as by `nsysk3 analyze`; the page of a single trace is written here. Where no browser can be opened (over ssh), the
    path is all.
    """
    from nsysk3.cli.browser import show
    from nsysk3.cli.results import tell_problems
    from nsysk3.errors import InputError

    if not run.exists():
        raise InputError(f"{run}: no such file or directory")
    with status(quiet) as progress:
        page, result = _page(run, lang, progress)
    typer.echo(page)
    if not show(page) and not quiet:
        typer.echo("no browser can be opened here: copy the file, it needs nothing else", err=True)
    if result:
        tell_problems(result)


def _page(run: Path, lang: Language | None, progress: Callable[[str], None] | None) -> tuple[Path, Result | None]:
    """The page, and the result where it was made just now."""
    from nsysk3.cli.outdated import tell_outdated
    from nsysk3.cli.results import saved_results
    from nsysk3.result.store import RESULT_NAME
    from nsysk3.sweep.folder import SUMMARY

    if run.suffix == ".html":
        return run, None
    if (run / SUMMARY).is_file():
        return _sweep_page(run, run / SUMMARY), None
    saved = saved_results(run)
    if saved:
        page, source = saved / PAGE_NAME, saved / RESULT_NAME
    elif run.is_dir() and not run.name.endswith(("_pqtdir", "_arwdir")):
        return _make(run, run / "analysis" / PAGE_NAME, lang, progress, save=True)
    else:
        page, source = Path(f"{run.name}.html"), run
    if lang is not None or not _is_newer(page, source):
        return _make(run, page, lang, progress)
    tell_outdated(run)
    return page, None


def _is_newer(page: Path, source: Path) -> bool:
    return page.is_file() and page.stat().st_mtime_ns >= source.stat().st_mtime_ns


def _sweep_page(folder: Path, summary: Path) -> Path:
    from nsysk3.cli.sweep import PAGE_NAME, Format, report

    page = folder / PAGE_NAME
    if not _is_newer(page, summary):
        report(folder, form=Format.html)
    return page


def _make(
    run: Path, page: Path, lang: Language | None, progress: Callable[[str], None] | None, save: bool = False
) -> tuple[Path, Result]:
    from nsysk3.cli.results import open_result, page_language
    from nsysk3.report.html import render_report
    from nsysk3.run.files import write_text

    result = open_result(run, None, progress)
    if save:
        result.save(page.parent)
    write_text(page, render_report(result, lang=page_language(lang)), [run])
    return page, result
