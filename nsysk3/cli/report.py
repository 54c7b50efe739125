"""``nsysk3 report``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nsysk3.cli.browser import show
from nsysk3.cli.progress import status
from nsysk3.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from nsysk3.result import Result

PAGE_NAME = "report.html"


class Language(StrEnum):
    """Languages of the page."""

    en = "en"
    zh = "zh"


class Format(StrEnum):
    """What to write."""

    html = "html"
    md = "md"


def report(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="A run directory, a directory of results, or traces of one run."),
    ],
    out: Annotated[
        Path | None, typer.Option(help="File to write. Default: report.html beside the results, else here.")
    ] = None,
    lang: Annotated[
        Language | None, typer.Option(help="Language of the page. Default: report.lang in nsysk3.toml, else en.")
    ] = None,
    form: Annotated[Format, typer.Option("--format", help="html, or md: a summary for pull requests.")] = Format.html,
    window: Annotated[str | None, typer.Option(help="Window of traces that are analysed here, as for analyze.")] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Write the page of one run: one file that opens from disk and loads nothing.

    Results that analyze saved are used as they are; traces are analysed first, and nothing but the page is written.
    """
    from nsysk3.cli.results import only_pages_have, tell_problems
    from nsysk3.run.files import write_text

    only_pages_have(lang, page=form is Format.html)
    if form is Format.md and out is None and open_page:
        raise InputError("--open: --format md without --out writes no file to show")
    with status(quiet) as progress:
        result, folder = _result(paths, window, progress)
        text = _rendered(result, form, lang)
    if form is Format.md and out is None:
        typer.echo(text, nl=False)
        tell_problems(result)
        return
    target = out or (folder or Path()) / PAGE_NAME
    write_text(target, text, paths)
    typer.echo(f"report written to {target}", err=True)
    if open_page and not show(target):
        typer.echo("no browser can be opened here", err=True)
    tell_problems(result)


def _result(
    paths: list[Path], window: str | None, progress: Callable[[str], None] | None
) -> tuple[Result, Path | None]:
    """The result, and where it lies when it was saved before."""
    from nsysk3.cli.results import analyzed, open_result, saved_results

    if len(paths) > 1:
        if all(saved_results(path) == path for path in paths):
            raise InputError(
                f"{', '.join(map(str, paths))}: each is the results of a run, and a report is of one run; to hold "
                f"them against each other use nsysk3 compare {' '.join(map(str, paths))}"
            )
        return analyzed(paths, window, progress), None
    return open_result(paths[0], window, progress), saved_results(paths[0])


def _rendered(result: Result, form: Format, lang: Language | None) -> str:
    if form is Format.md:
        from nsysk3.report.markdown import render_result

        return render_result(result)
    from nsysk3.cli.results import page_language
    from nsysk3.report.html import render_report

    return render_report(result, lang=page_language(lang))
