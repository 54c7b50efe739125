"""The analysis of a run that was just made, where what it needs is installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path, PurePath

from nsysk3.errors import NsysK3Error, RunFailedError
from nsysk3.launch.journal import Journal
from nsysk3.run.manifest import MANIFEST_NAME


def analyze_run(
    folder: Path, journal: Journal, say: Callable[[str], None], *, report: bool, expect_kernels: bool, summary: bool
) -> None:
    """Analyse a run directory as ``nsysk3 analyze`` does, print the ``summary``, and write report.html (``report``).

    Without the libraries of the analysis, or for a run without GPUs, the run is whole all the same: a note says so.
    Raises RunFailedError where traces that should hold GPU work cannot be analysed.
    """
    try:
        from nsysk3.analysis.analyze import analyze
        from nsysk3.report.terminal import console, print_result
        from nsysk3.trace.load import load
    except ImportError as error:
        _skip(journal, say, f"{error.name or error} is not installed; where it is: nsysk3 analyze {folder}")
        return
    say("analysing")
    try:
        result = analyze(load(folder))
    except NsysK3Error as error:
        if not expect_kernels:
            _skip(journal, say, str(error))
            return
        raise RunFailedError(f"the reports are whole but were not analysed: {error}") from error
    result.save(folder / "analysis")
    if report:
        from nsysk3.report.html import render_report
        from nsysk3.run.files import write_text

        write_text(folder / "analysis" / "report.html", render_report(result))
        say(f"report: {folder / 'analysis' / 'report.html'}")
    if summary:
        print_result(result, console())
    for problem in result.document.problems:
        if PurePath(problem.path).name != MANIFEST_NAME:  # whose ranks are missing, and why, was said when they came
            say(f"WARNING: {problem.message}")
    journal.step("analysed")


def _skip(journal: Journal, say: Callable[[str], None], why: str) -> None:
    say(f"not analysed: {why}")
    journal.update(notes=[f"not analysed: {why}"])
