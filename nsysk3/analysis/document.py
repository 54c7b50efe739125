"""result.json of an analysis: the tables' facts in one document, with what a reader must know."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

import polars as pl

from nsysk3 import __version__
from nsysk3.analysis.clocks import clock_document
from nsysk3.analysis.cross import Matched, findings, matched_counts
from nsysk3.analysis.metrics import NEEDS_KERNELS, SPLITS, WAIT_SUMS
from nsysk3.analysis.sentences import sentences
from nsysk3.analysis.sp_collectives import sp_sentences
from nsysk3.analysis.summaries import summary
from nsysk3.result.model import (
    ClockInfo,
    LayerInfo,
    MatchedInfo,
    ProblemInfo,
    RankMetrics,
    ReportInfo,
    ResultDocument,
    SpInfo,
    WindowInfo,
)
from nsysk3.result.store import IN_DOCUMENT, rows
from nsysk3.run.remote import AnyPath
from nsysk3.run.words import counted, first_of
from nsysk3.trace.facts import ReportFacts
from nsysk3.trace.load import Roster

UNCLASSIFIED_WARNING = 0.05
# Characters of a kernel's name in a note; a template's can have thousands.
_NAME_SHOWN = 80
# Reports named in a sentence.
_REPORTS_SHOWN = 4


def document(
    run: Roster,
    tables: dict[str, pl.DataFrame],
    found: Matched,
    window: WindowInfo,
    layers: LayerInfo,
    notes: Sequence[str],
    sent: pl.DataFrame,
    sp: list[SpInfo],
) -> ResultDocument:
    """The document of a result.

    ``notes``: what the analyses themselves want said, after the run's own notes.
    ``sent``: P2P pairs whose send lies in the window.  ``sp``: see sp_collectives.
    """
    clock = clock_document(found.clocks, [report.name for report in run.facts])
    ranks = tables["rank_metrics"]
    return ResultDocument(
        nsysk3_version=__version__,
        simulated=_simulated(run),
        manifest=run.manifest.model_dump(mode="json") if run.manifest else None,
        window=window,
        reports=[_report_info(report, run.run_dir) for report in run.facts],
        problems=[ProblemInfo(path=problem.path, message=str(problem)) for problem in run.problems],
        notes=[*run.notes, *_identity_notes(tables), *notes, *findings(found), *_clock_notes(clock)],
        not_measured=_not_measured(ranks),
        clock=ClockInfo.model_validate(clock),
        matched=[MatchedInfo.model_validate(row) for row in matched_counts(found).iter_rows(named=True)],
        layers=layers,
        sp=sp,
        sentences=[*sentences(tables, run.ranks, sent), *sp_sentences(sp)],
        summary=summary(ranks),
        ranks=[RankMetrics.model_validate(row) for row in ranks.iter_rows(named=True)],
        tables={name: rows(table) for name, table in tables.items() if name in IN_DOCUMENT},
    )


def _simulated(run: Roster) -> str | None:
    """What made the traces where no GPU did, and which of them; the manifest is asked where they do not say."""
    said = run.manifest.simulated if run.manifest else None
    made = [report.name for report in run.facts if report.simulated]
    if made and len(made) < len(run.facts):
        which = first_of(made, _REPORTS_SHOWN)
        return f"simulated: only {len(made)} of {counted(len(run.facts), 'report')} ({which})"
    return said or "simulated" if made else said


def _not_measured(ranks: pl.DataFrame) -> dict[str, str]:
    """Why a metric is null, for every metric that is null on some rank."""
    reasons = dict.fromkeys(NEEDS_KERNELS, "CUDA graphs were traced as a whole: their kernels are unknown")
    reasons |= {
        "overlap_ratio": "no communication in the window",
        "exposed_comm_share": reasons["exposed_comm_ns"],
        "unclassified_share": "no kernel in the window",
        "coverage": "a report has no clock, so its recording cannot be placed beside the others",
        "gpu_uuid": "the report does not name the GPU",
        "gpu_name": "the report does not name the GPU",
        "pid": "the export has no process ids",
        **dict.fromkeys(("pp_rank", "tp_rank", "ep_rank"), "no source names it; give --ranks"),
        **{f"allreduce_p{q}_ns": "no AllReduce in the window" for q in (50, 95, 99)},
        **dict.fromkeys((*WAIT_SUMS, *SPLITS), "a rank has such communication, and no partner of it is in this run"),
        **dict.fromkeys(("attributed_share", "moe_share"), "no layer, or no AllReduce, could be told"),
    }
    return {name: reason for name, reason in reasons.items() if ranks[name].null_count()}


def _identity_notes(tables: dict[str, pl.DataFrame]) -> list[str]:
    found = []
    ranks = tables["rank_metrics"]
    inferred = ranks.filter(pl.col("rank_source") == "inferred").height
    if inferred:
        found.append(
            f"{inferred} of {counted(ranks.height, 'rank')} {'is' if inferred == 1 else 'are'} numbered by host and "
            "GPU order, a guess: name them with --ranks"
        )
    worst = ranks["unclassified_share"].max()
    if isinstance(worst, float) and worst > UNCLASSIFIED_WARNING:
        names = tables["unclassified"]["name"].head(3).to_list()
        shown = ", ".join(name if len(name) <= _NAME_SHOWN else f"{name[: _NAME_SHOWN - 1]}…" for name in names)
        found.append(f"up to {worst:.0%} of kernel time is of kernels no rule names ({shown}); add rules with --rules")
    return found


def _clock_notes(clock: dict[str, list[dict[str, object]]]) -> list[str]:
    return [
        f"{entry['report']}: {entry['reason']}; no wait across it can be told"
        for entry in clock["reports"]
        if entry["reason"]
    ]


def _report_info(report: ReportFacts, run_dir: AnyPath | None) -> ReportInfo:
    path, inside = PurePath(report.path), str(run_dir)
    relative = run_dir is not None and path.is_relative_to(inside)
    start, end = report.recorded_utc_ns or (None, None)
    return ReportInfo(
        name=report.name,
        path=str(path.relative_to(inside)) if relative else report.path,
        host=report.host,
        kind=report.kind,
        exporter=report.exporter,
        schema_version=report.schema_version,
        clock=report.clock,
        diagnostics=list(report.diagnostics),
        size_bytes=report.size_bytes,
        start_utc_ns=start,
        end_utc_ns=end,
    )
