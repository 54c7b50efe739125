"""Are saved results of the reports that lie there now?

What is recorded of each report is held against what is found; a time alone says little, for a copy or a checkout gives
files any.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import typer

from nsysk3.errors import NsysK3Error
from nsysk3.result.store import RESULT_NAME
from nsysk3.run.inputs import REPORT_SUFFIX
from nsysk3.run.words import first_of
from nsysk3.trace.facts import size_of

if TYPE_CHECKING:
    from nsysk3.result.model import ReportInfo
    from nsysk3.run.inputs import TraceInput
    from nsysk3.run.remote import AnyPath

_SHOWN = 3
# Where nothing but times tells: files of one copy or checkout have such that lie so near.
_SETTLED_S = 60


def tell_outdated(path: Path) -> bool:
    """Say on stderr what is newer than, or gone from, the results that ``path`` means; gives whether anything is.

    ``path``: a directory of reports, or the analysis/ folder of a run directory; other results may be of anything.
    """
    from nsysk3.run.inputs import find_inputs
    from nsysk3.run.manifest import MANIFEST_NAME, read_manifest

    folder = path.parent if path.name == "analysis" and (path.parent / MANIFEST_NAME).is_file() else path
    results = folder / "analysis" / RESULT_NAME
    if (folder / RESULT_NAME).is_file() or not results.is_file():
        return False
    try:
        document = json.loads(results.read_text("utf-8"))  # the tables are not read for this
        reports, useless = _recorded_in(document)
        found = find_inputs([folder]).traces
        news = [str(path.relative_to(folder)) for path in _news(found, reports, useless, results.stat().st_mtime)]
        manifest = read_manifest(folder)
        if manifest and manifest.run_id != (document["manifest"] or {}).get("run_id"):
            news.append(MANIFEST_NAME)
    except (NsysK3Error, OSError, ValueError, LookupError, TypeError):  # whoever uses the results says what is wrong
        return False
    gone = [] if news else _gone(found, reports)
    if not news and not gone:
        return False
    why = f"are older than {first_of(news, _SHOWN)}" if news else f"hold {first_of(gone, _SHOWN)}, gone since"
    typer.echo(f"nsysk3: {folder}: its results {why}: analyze it again", err=True)
    return True


def _recorded_in(document: dict[str, Any]) -> tuple[list[ReportInfo], set[str]]:
    """Of result.json the reports, and the names of files that gave no rank."""
    from nsysk3.result.model import ReportInfo

    useless = {PurePath(problem["path"]).name for problem in document["problems"]}
    return [ReportInfo.model_validate(report) for report in document["reports"]], useless


def _news(
    found: Sequence[TraceInput], reports: Sequence[ReportInfo], useless: set[str], made: float
) -> Iterator[AnyPath]:
    """Files that the results, which were written at ``made``, do not come from."""
    known = {report.name: report for report in reports}
    names = {trace.name for trace in found}
    renamed = {_capture(report) for report in reports if report.name not in names} - {None}
    for trace in found:
        report = known.get(trace.name)
        if report is None:
            new = trace.path.name not in useless and _recorded(trace) not in renamed and not _has_size(trace, reports)
        else:
            new = _replaced(trace, report, made)
        if new:
            yield trace.path


def _has_size(trace: TraceInput, reports: Sequence[ReportInfo]) -> bool:
    """Whether an .nsys-rep, which nobody opens for this, is as large as one in the results: renamed, then."""
    path = Path(str(trace.path))
    return path.suffix == REPORT_SUFFIX and size_of(path) in {report.size_bytes for report in reports}


def _replaced(trace: TraceInput, report: ReportInfo, made: float) -> bool:
    path = Path(str(trace.path))
    sized = report.size_bytes is not None and PurePath(report.path).name == path.name
    changed = path.stat().st_mtime
    if sized and size_of(path) != report.size_bytes:
        return True
    if sized and changed <= made:  # to open each of many takes seconds
        return False
    now, then = _recorded(trace), _capture(report)
    # Another export of the same report is no news.
    if now is not None and then is not None:
        return now != then
    return not sized and changed > made + _SETTLED_S


def _gone(found: Sequence[TraceInput], reports: Sequence[ReportInfo]) -> list[str]:
    """Reports in the results that are there no longer, where others are: all of them are removed to save room."""
    if not 0 < len(found) < len(reports):
        return []
    names = {trace.name for trace in found}
    return [report.name for report in reports if report.name not in names]


def _capture(report: ReportInfo) -> tuple[int, int] | None:
    if report.start_utc_ns is None or report.end_utc_ns is None:
        return None
    return report.start_utc_ns, report.end_utc_ns


def _recorded(trace: TraceInput) -> tuple[int, int] | None:
    """When a report was recorded; None for what no export says yet, or cannot be read."""
    from nsysk3.trace.report import open_report

    path = Path(str(trace.path))
    if path.name.lower().endswith(REPORT_SUFFIX):
        return None
    try:
        return open_report(path, trace.name, trace.host).recorded_utc_ns
    except (NsysK3Error, OSError):
        return None
