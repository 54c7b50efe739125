"""Find the result that a path on a command line means."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from nsysk3.cli.analyze import PARTIAL
from nsysk3.errors import InputError

if TYPE_CHECKING:
    from nsysk3.result import Result


def saved_results(path: Path) -> Path | None:
    """The folder with the saved results that a path means: itself, or its analysis/ folder."""
    from nsysk3.result.store import RESULT_NAME

    return next((folder for folder in (path, path / "analysis") if (folder / RESULT_NAME).is_file()), None)


def analyzed(paths: Path | list[Path], window: str | None, progress: Callable[[str], None] | None) -> Result:
    """The traces analysed as the settings say; ``window`` None: theirs."""
    from nsysk3.analysis.analyze import analyze
    from nsysk3.run.config import load_settings
    from nsysk3.scale.choose import crew_of

    asked = {} if window is None else {"window": window}
    settings = load_settings().analyze.model_dump()
    workers, scheduler, patience = (settings.pop(name) for name in ("workers", "scheduler", "patience_s"))
    with blamed_on_settings(*asked), crew_of(workers, scheduler, patience_s=patience) as crew:
        return analyze(paths, progress=progress, crew=crew, **{**settings, **asked})


@contextmanager
def blamed_on_settings(*typed: str) -> Iterator[None]:
    """What is wrong with an option that is not among those ``typed`` is wrong with the setting."""
    try:
        yield
    except InputError as error:
        option = re.match(r"--(window|layer-regex)\b", str(error))
        if option is None or (name := option[1].replace("-", "_")) in typed:
            raise
        raise InputError(f"analyze.{name}{str(error)[option.end() :]}") from error


def only_pages_have(lang: str | None, *, page: bool) -> None:
    """Refuse a language for what is no page.  Raises InputError."""
    if lang is not None and not page:
        raise InputError(f"--lang {lang} is for --format html: everything else is in English")


def page_language(asked: str | None) -> str:
    """The language of a page: the one asked for, else that of the settings."""
    from nsysk3.run.config import load_settings

    return asked or load_settings().report.lang


def open_result(path: Path, window: str | None, progress: Callable[[str], None] | None) -> Result:
    """The result of a result directory, of a run directory's analysis/ folder, else of the traces themselves.

    Saved results are taken only when they are of the window asked for (None: of any); one line on stderr says so where
    they are not of the reports that lie there now.  Raises InputError.
    """
    from nsysk3.cli.outdated import tell_outdated
    from nsysk3.result import Result

    folder = saved_results(path)
    if folder:
        saved = Result.load(folder)
        if window in (None, saved.document.window.asked):
            return _as_of_then(saved) if tell_outdated(path) else saved
        if folder == path:
            asked = saved.document.window.asked
            raise InputError(f"{path}: these results are of window {asked}; analyze the traces with {window}")
    return analyzed(path, window, progress)


def _as_of_then(saved: Result) -> Result:
    """A result whose problems are said as those of the time of the analysis: they may have been solved since."""
    then = [
        problem.model_copy(update={"message": f"when analysed: {problem.message}"})
        for problem in saved.document.problems
    ]
    return replace(saved, document=saved.document.model_copy(update={"problems": then}))


def tell_problems(*results: Result, code: int = PARTIAL) -> None:
    """Name the inputs that gave no rank on stderr, and end with exit code ``code``: what was shown lacks them."""
    problems = [problem.message for result in results for problem in result.document.problems]
    for message in problems:
        typer.echo(f"nsysk3: {message}", err=True)
    if problems:
        raise typer.Exit(code)
