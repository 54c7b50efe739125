"""From a loaded run to a result: the order in which the analyses are applied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import polars as pl

from nsysk3 import __version__
from nsysk3.analysis.bandwidth import bandwidth_table
from nsysk3.analysis.budget import BUCKETS, Budget
from nsysk3.analysis.clocks import Clocks, clock_document
from nsysk3.analysis.cross import CrossRank, cross_rank, findings, matched_counts
from nsysk3.analysis.metrics import (
    NEEDS_KERNELS,
    SPLITS,
    WAIT_SUMS,
    budgets,
    category_table,
    in_window,
    kernel_table,
    rank_table,
    role_table,
)
from nsysk3.analysis.nccl_tests import read_nccl_tests
from nsysk3.analysis.pipeline import infer_stages, pipeline_table, stage_gaps
from nsysk3.analysis.roles import assign_roles
from nsysk3.analysis.sentences import sentences
from nsysk3.analysis.stability import stability
from nsysk3.analysis.stragglers import straggler_table
from nsysk3.analysis.summaries import budget_summary, summary, top_kernels
from nsysk3.analysis.windows import capture_windows, explicit_windows, parse_window, within
from nsysk3.classify import RuleSet
from nsysk3.result.model import (
    ClockInfo,
    MatchedInfo,
    ProblemInfo,
    RankMetrics,
    ReportInfo,
    ResultDocument,
    WindowInfo,
)
from nsysk3.result.store import IN_DOCUMENT, Result, rows
from nsysk3.trace.load import Run, load
from nsysk3.trace.report import Report

UNCLASSIFIED_WARNING = 0.05
_UNCLASSIFIED_SHOWN = 30


def analyze(
    run: Run | str | Path | Sequence[str | Path],
    *,
    window: str = "capture",
    rules: RuleSet | str | Path | None = None,
    nccl_tests: Sequence[str | Path] = (),
    progress: Callable[[str], None] | None = None,
) -> Result:
    """Analyse one run.

    ``run``: what ``load`` gave, or paths to load.  ``window``: ``capture``, ``prefill``, ``steady`` or ``START:END``
    counted from the run's first kernel (``0.5s:2s``).  ``rules``: a rules file whose rules go before the shipped ones.
    ``nccl_tests``: logs of nccl-tests on the same machines, to hold the measured bandwidth against.
    Raises InputError for unusable input or arguments.
    """
    spec = parse_window(window)
    ruleset = rules if isinstance(rules, RuleSet) else RuleSet.load(Path(rules) if rules else None)
    loaded = run if isinstance(run, Run) else load(run, progress=progress)
    if progress:
        progress("analysing")
    named = assign_roles(loaded.events, loaded.names, loaded.nccl_calls, ruleset)
    found = cross_rank(named, loaded.ranks, len(loaded.reports))
    events = found.events
    captures = capture_windows(events)
    windows = captures if spec.start_ns is None else explicit_windows(captures, spec)
    counted = in_window(events, windows)
    gaps = stage_gaps(events, found.pairs.select(pl.col("recv_event").alias("event"), "kind"))
    by_rank = budgets(events, windows, gaps)
    steady = stability(loaded.ranks, captures, _recordings(loaded.reports, found.clocks), counted)
    collectives = within(found.collectives, windows, "rank", "start_utc_ns")
    pairs = within(found.pairs, windows, "dst_rank", "recv_start_utc_ns")
    stages = infer_stages(loaded.ranks, found.pairs)
    ranks = rank_table(loaded.ranks, windows, counted, by_rank, steady)
    kernels = kernel_table(counted, loaded.names)
    reference = read_nccl_tests([Path(path) for path in nccl_tests])
    budget = budget_table(by_rank)
    tables = {
        "rank_metrics": ranks.select(*RankMetrics.model_fields),
        "nsys_device_metrics": device_table(ranks),
        "budget": budget,
        "budget_summary": budget_summary(budget, ranks, stages),
        "top_kernels": top_kernels(kernels, ranks.height).with_columns(pl.col("role").cast(pl.String)),
        "roles": role_table(counted).with_columns(pl.col("role").cast(pl.String)),
        "categories": category_table(counted).with_columns(pl.col("role").cast(pl.String)),
        "kernels": kernels.with_columns(pl.col("role").cast(pl.String)),
        "unclassified": unclassified_table(kernels),
        "collectives": collectives.rename({"role": "op"}).drop("event"),
        "p2p": pairs.drop("send_event", "recv_event"),
        "p2p_unmatched": found.lonely,
        "pipeline": pipeline_table(events, stages, windows, by_rank, pairs, None),
        "bandwidth": bandwidth_table(collectives, pairs, reference),
        "stragglers": straggler_table(collectives),
    }
    document = _document(loaded, tables, found, WindowInfo(asked=window, used=window), ruleset)
    return Result(document, tables)


def budget_table(by_rank: dict[int, Budget]) -> pl.DataFrame:
    """Long form of the time budgets: ``rank``, ``bucket``, ``ns``, ``share``; a rank's ns sum to its window."""
    cells = [
        (rank, bucket, budget.buckets[bucket], budget.buckets[bucket] / budget.window_ns if budget.window_ns else None)
        for rank, budget in by_rank.items()
        for bucket in BUCKETS
    ]
    schema = {"rank": pl.Int32, "bucket": pl.String, "ns": pl.Int64, "share": pl.Float64}
    return pl.DataFrame(cells, schema=schema, orient="row")


def device_table(ranks: pl.DataFrame) -> pl.DataFrame:
    """One row a GPU (host and uuid, else report and ordinal): the window's unions summed over the processes on it.

    A GPU shared by several processes counts time of each; ``processes`` says how many there were.  A sum is null where
    it is of one of them.
    """
    sums = (
        "window_ns",
        "compute_ns",
        "comm_ns",
        "fused_ns",
        "copy_ns",
        "graph_ns",
        "overlap_ns",
        "exposed_comm_ns",
        "idle_ns",
    )
    counts = ("allreduce_count", "allreduce_total_ns", "p2p_count", "p2p_total_ns", "kernel_count", "kernel_total_ns")
    device = pl.coalesce("gpu_uuid", pl.format("ordinal {}", "device_id")).alias("gpu")
    # Hosts can all have one name: without a uuid, the GPUs of two reports are not known to be one.
    place = pl.when(pl.col("gpu_uuid").is_null()).then("report").alias("_report")
    return (
        ranks.with_columns(device, place)
        .group_by("host", "gpu", "_report", maintain_order=True)
        .agg(
            pl.col("gpu_name", "device_id").first(),
            pl.col("world_rank").sort().cast(pl.String).str.join(" ").alias("world_ranks"),
            pl.len().cast(pl.Int64).alias("processes"),
            *[pl.when(pl.col(name).null_count() == 0).then(pl.col(name).sum()) for name in (*sums, *counts)],
        )
        .drop("_report")
        .with_columns(
            pl.when(pl.col("window_ns") > 0)
            .then(pl.col("exposed_comm_ns") / pl.col("window_ns"))
            .alias("exposed_comm_share")
        )
    )


def unclassified_table(kernels: pl.DataFrame) -> pl.DataFrame:
    """Kernels that no rule names, over all ranks, most time first: ``name``, ``count``, ``total_ns``, ``share``."""
    every = max(int(kernels["total_ns"].sum()), 1)
    return (
        kernels.filter(pl.col("category") == "UNCLASSIFIED")
        .group_by("name")
        .agg(pl.col("count").sum(), pl.col("total_ns").sum())
        .with_columns((pl.col("total_ns") / every).alias("share"))
        .sort("total_ns", "name", descending=[True, False])
        .head(_UNCLASSIFIED_SHOWN)
    )


def _recordings(reports: Sequence[Report], clocks: Clocks) -> pl.DataFrame:
    """When each report was recording: ``report``, ``start``, ``end`` (UTC ns, null if it does not say), ``clocked``."""
    cells = [
        (
            index,
            report.time_shift_ns + report.to_utc_ns - round(clocks.offset_ns[index])
            if report.end_ns is not None
            else None,
            report.end_ns + report.to_utc_ns - round(clocks.offset_ns[index]) if report.end_ns is not None else None,
            report.clock != "none" or len(reports) == 1,
        )
        for index, report in enumerate(reports)
    ]
    schema = {"report": pl.Int64, "start": pl.Int64, "end": pl.Int64, "clocked": pl.Boolean}
    return pl.DataFrame(cells, schema=schema, orient="row")


def _document(
    run: Run, tables: dict[str, pl.DataFrame], found: CrossRank, window: WindowInfo, rules: RuleSet
) -> ResultDocument:
    metrics = [RankMetrics.model_validate(row) for row in tables["rank_metrics"].iter_rows(named=True)]
    return ResultDocument(
        nsysk3_version=__version__,
        simulated=run.manifest.simulated if run.manifest else None,
        manifest=run.manifest.model_dump(mode="json") if run.manifest else None,
        window=window,
        reports=[_report_info(report, run.run_dir) for report in run.reports],
        problems=[ProblemInfo(path=problem.path, message=str(problem)) for problem in run.problems],
        notes=[*run.notes, *rules.notes, *_notes(tables), *findings(found), *_clock_notes(found, run)],
        not_measured=_not_measured(tables["rank_metrics"]),
        clock=ClockInfo.model_validate(clock_document(found.clocks, [report.name for report in run.reports])),
        matched=[MatchedInfo.model_validate(row) for row in matched_counts(found).iter_rows(named=True)],
        sentences=sentences(tables, run.ranks),
        summary=summary(tables["rank_metrics"]),
        ranks=metrics,
        tables={name: rows(table) for name, table in tables.items() if name in IN_DOCUMENT},
    )


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
        **dict.fromkeys((*WAIT_SUMS, *SPLITS), "no partner of the rank's communication is in this run"),
    }
    return {name: reason for name, reason in reasons.items() if ranks[name].null_count()}


def _notes(tables: dict[str, pl.DataFrame]) -> list[str]:
    found = []
    ranks = tables["rank_metrics"]
    inferred = ranks.filter(pl.col("rank_source") == "inferred").height
    if inferred:
        found.append(
            f"{inferred} of {ranks.height} ranks are numbered by host and GPU order, a guess: name them with --ranks"
        )
    worst = ranks["unclassified_share"].max()
    if isinstance(worst, float) and worst > UNCLASSIFIED_WARNING:
        shown = ", ".join(tables["unclassified"]["name"].head(3).to_list())
        found.append(f"up to {worst:.0%} of kernel time is of kernels no rule names ({shown}); add rules with --rules")
    return found


def _clock_notes(found: CrossRank, run: Run) -> list[str]:
    notes = []
    for entry in clock_document(found.clocks, [report.name for report in run.reports])["reports"]:
        if entry["reason"]:
            notes.append(f"{entry['report']}: {entry['reason']}; no wait across it can be told")
    return notes


def _report_info(report: Report, run_dir: Path | None) -> ReportInfo:
    path = report.path
    if run_dir and path.is_relative_to(run_dir):
        path = path.relative_to(run_dir)
    return ReportInfo(
        name=report.name,
        path=str(path),
        host=report.host,
        kind=report.source.kind,
        exporter=report.exporter,
        schema_version=report.schema_version,
        clock=report.clock,
        diagnostics=[diagnostic.text for diagnostic in report.diagnostics if diagnostic.matters],
    )
