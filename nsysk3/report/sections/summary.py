"""The first table: what the user's own document compares, then every rank."""

from __future__ import annotations

from typing import Any

from nsysk3.report.blocks import Column, Section, Table, make_table, place
from nsysk3.report.view import View

# Metric, how it is shown, the definition it opens.
METRICS = (
    ("allreduce_count", "count", "allreduce"),
    ("allreduce_total_ns", "ms", "allreduce"),
    ("allreduce_p50_ns", "ms3", "allreduce"),
    ("overlap_ratio", "share", "overlap"),
    ("exposed_comm_share", "share", "exposed"),
    ("exposed_wait_ns", "ms", "exposed"),
    ("exposed_transfer_ns", "ms", "exposed"),
    ("stage_idle_ns", "ms", "stage_wait"),
    ("compute_ns", "ms", "compute"),
    ("comm_ns", "ms", "communication"),
    ("fused_ns", "ms", "fused"),
    ("moe_share", "share", "moe"),
    ("attributed_share", "share", "attributed"),
    ("p2p_count", "count", "p2p"),
    ("p2p_total_ns", "ms", "p2p"),
    ("idle_ns", "ms", "idle"),
    ("window_ns", "ms", "window"),
)
_RANK = (
    Column("world_rank", "count", "identity"), Column("stage", "optional", "identity"), Column("place", "text"),
    Column("window_ns", "ms", "window"), Column("compute_ns", "ms", "compute"), Column("overlap_ns", "ms", "overlap"),
    Column("exposed_wait_ns", "ms", "exposed"), Column("exposed_transfer_ns", "ms", "exposed"),
    Column("exposed_share", "share", "exposed"), Column("idle_ns", "ms", "idle"),
    Column("allreduce_count", "count", "allreduce"), Column("allreduce_total_ns", "ms", "allreduce"),
    Column("allreduce_p50_ns", "ms3", "allreduce"), Column("p2p_count", "count", "p2p"),
    Column("p2p_total_ns", "ms", "p2p"), Column("stable", "flag", "stable"),
)  # fmt: skip


def summary(view: View) -> Section:
    """Medians, then one row a rank."""
    return view.section("summary", view.no_medians or median_table(view), rank_table(view))


def median_table(view: View) -> Table:
    """One row a metric: median, lowest and highest over stable ranks."""
    found = view.document.summary
    words = [("median", "median"), ("lowest", "low"), ("highest", "high")]
    rows: list[dict[str, Any]] = []
    for metric, kind, term in METRICS:
        reason = view.document.not_measured.get(metric, view.texts("ui.no_reason"))
        row: dict[str, Any] = {"metric": metric, "kind_of": kind, "term_of": term}
        for word, column in words:
            if word in found:
                row[column] = found[word].get(metric)
                row.setdefault("reason_of", {})[column] = reason
        rows.append(row)
    columns = (Column("metric", "metric"), *(Column(column, "any") for _, column in words))
    return make_table(view.texts, "summary", rows, columns)


def rank_table(view: View) -> Table:
    """Every rank; those outside the medians are muted."""
    rows = [
        {
            **rank.model_dump(),
            "place": f"{rank.host or '?'}:{rank.device_id}",
            "stage": view.stages.get(row),
            "exposed_share": rank.exposed_comm_share,
            "muted": not rank.stable,
        }
        for row, rank in enumerate(view.document.ranks)
    ]
    return make_table(
        view.texts, "ranks", rows, _RANK, reasons=view.document.not_measured, file="rank_metrics.csv",
        goto=lambda row: place(rank=row['world_rank']),
    )  # fmt: skip
