"""The few facts of a report that outlive its rows: what it is, its clock, and what it knows of ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from nsysk3.trace.report import Report, pid_of

RANK_MARKER = r"^nsysk3\.rank "
_TITLE = re.compile(r"sglang::scheduler(?:_\w+?\d+)*")

# What a source knows of a rank: some of world, pp, tp, ep, and of their sizes (world_size, ...).
Known = dict[str, int]


@dataclass(frozen=True)
class ReportFacts:
    """What the analysis of a whole run needs of one report; it can travel, as an open export cannot.

    ``path``: as given; ``size_bytes``: of that file, None of a folder.
    ``to_utc_ns``, ``time_shift_ns``, ``end_ns``, ``recorded_utc_ns``: see Report.  ``diagnostics``: those that matter.
    By process: ``marks`` (nsysk3's own markers), ``mpi`` (world rank), ``titles`` (of SGLang's schedulers);
    ``environment``: rank variables of the launched process.  ``simulated``: see Report.
    """

    name: str
    path: str
    host: str
    kind: str
    exporter: str | None
    schema_version: str | None
    clock: str
    to_utc_ns: int
    time_shift_ns: int
    end_ns: int | None
    recorded_utc_ns: tuple[int, int] | None
    size_bytes: int | None
    diagnostics: tuple[str, ...]
    marks: Mapping[int, Known]
    mpi: Mapping[int, int]
    titles: Mapping[int, Known]
    environment: Mapping[str, str]
    simulated: bool | None


def facts_of(report: Report, path: str | None = None) -> ReportFacts:
    """Read the facts of a report; ``path``: how it is to be called, where it was copied from elsewhere."""
    return ReportFacts(
        name=report.name,
        path=path or str(report.path),
        host=report.host,
        kind=report.source.kind,
        exporter=report.exporter,
        schema_version=report.schema_version,
        clock=report.clock,
        to_utc_ns=report.to_utc_ns,
        time_shift_ns=report.time_shift_ns,
        end_ns=report.end_ns,
        recorded_utc_ns=report.recorded_utc_ns,
        size_bytes=size_of(report.path),
        diagnostics=tuple(diagnostic.text for diagnostic in report.diagnostics if diagnostic.matters),
        marks=_marks(report),
        mpi=_mpi(report),
        titles=_titles(report),
        environment=dict(report.rank_environment),
        simulated=report.simulated,
    )


def size_of(path: Path) -> int | None:
    """Bytes of a file; None of a folder."""
    return path.stat().st_size if path.is_file() else None


def _marks(report: Report) -> dict[int, Known]:
    """``nsysk3.rank world=3/8 pp=1/2 tp=1/4 ep=1/1``, a mark or range of nsysk3's plugin or workload."""
    ids = report.strings_like(RANK_MARKER)
    rows = report.source.read("NVTX_EVENTS", ("globalTid", "textId"), only={"textId": ids}) if ids else None
    texts = dict(report.strings.filter(pl.col("id").is_in(ids)).iter_rows())
    marks: dict[int, Known] = {}
    if rows is not None:
        named = rows.drop_nulls().select(pid_of(pl.col("globalTid")), "textId")
        marks = {pid: _pairs(texts[text]) for pid, text in named.iter_rows()}
    plain = _plain_marks(report).select(pid_of(pl.col("globalTid")), "text")
    return marks | {pid: _pairs(text) for pid, text in plain.iter_rows()}


def _plain_marks(report: Report) -> pl.DataFrame:
    """Marks (eventType 34) whose text is not registered; the plugin marks, so ranges need not be searched."""
    rows = report.source.read("NVTX_EVENTS", ("globalTid",), texts=("text",), only={"eventType": [34]})
    rows = rows.drop_nulls("globalTid")
    return rows.filter(pl.col("text").str.contains(RANK_MARKER))


def _pairs(text: str) -> Known:
    found = re.findall(r"\b(world|pp|tp|ep)=(\d+)(?:/(\d+))?", text)
    sizes = {f"{key}_size": int(size) for key, _, size in found if size}
    return {key: int(value) for key, value, _ in found} | sizes


def _mpi(report: Report) -> dict[int, int]:
    rows = report.source.read("MPI_RANKS", ("globalTid", "rank")).drop_nulls()
    return dict(rows.select(pid_of(pl.col("globalTid")), "rank").iter_rows())


def _titles(report: Report) -> dict[int, Known]:
    known = {}
    for pid, title in report.processes.iter_rows():
        if _TITLE.match(title) and (labels := re.findall(r"_(PP|TP|EP)(\d+)", title)):
            known[pid] = {key.lower(): int(value) for key, value in labels}
    return known
