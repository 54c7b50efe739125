"""One number a rank of its window, where rank_metrics does not have it."""

from __future__ import annotations

from collections.abc import Iterable

import polars as pl

from nsysk3.compare.calls import with_counts
from nsysk3.compare.model import Layout
from nsysk3.compare.windowed import in_window, whole_forwards
from nsysk3.result import Result

FROM_PIPELINE = ("stage_wait_ns", "bubble_ns", "bubble_share")
NOT_MEASURED = "not measured"
NO_PARTNER = "some AllReduce kernels found no partner"
# Columns of rank_metrics without which a metric cannot be told either.
_RESTS_ON = {
    "allreduce_wait_ns": "wait_collective_ns", "allreduce_transfer_ns": "transfer_ns", "p2p_transfer_ns": "transfer_ns",
    "comm_share": "comm_ns", "forward_p95_ns": "forward_p50_ns",
}  # fmt: skip


def with_derived(result: Result, layout: Layout, table: pl.DataFrame) -> pl.DataFrame:
    """``table`` with the metrics that are not in rank_metrics."""
    share = pl.when(pl.col("window_ns") > 0)
    table = table.with_columns(share.then(pl.col("comm_ns") / pl.col("window_ns")).alias("comm_share"))
    pipeline = result.tables.get("pipeline")
    if pipeline is not None and pipeline.height:
        table = table.join(pipeline.select("rank", *FROM_PIPELINE), on="rank", how="left", maintain_order="left")
    elif layout.pp == 1:
        # One stage waits for no other; what is left of the bubble is idle time.
        idle = pl.col("idle_ns")
        table = table.with_columns(
            pl.lit(0).alias("stage_wait_ns"), idle.alias("bubble_ns"),
            share.then(idle / pl.col("window_ns")).alias("bubble_share"),
        )  # fmt: skip
    for part in (_allreduce_split(result, table), _p2p_transfer(result, table)):
        table = table.join(part, on="rank", how="left", maintain_order="left")
    table = with_counts(result, table)
    own = table["p2p_count"] == 0
    table = table.with_columns(pl.when(own).then(0).otherwise("p2p_transfer_ns").alias("p2p_transfer_ns"))
    none = pl.col("allreduce_count") == 0
    parts = ("allreduce_wait_ns", "allreduce_transfer_ns")
    table = table.with_columns(pl.when(none).then(0).otherwise(name).alias(name) for name in parts)
    spent = pl.col("end_utc_ns") - pl.col("start_utc_ns")
    forwards = whole_forwards(result, table)
    times = forwards.group_by("rank").agg(spent.quantile(0.95, "linear").alias("forward_p95_ns"))
    return table.join(times, on="rank", how="left", maintain_order="left")


def _allreduce_split(result: Result, ranks: pl.DataFrame) -> pl.DataFrame:
    """Wait and transfer of AllReduce kernels of the window, null where some found no partner."""
    found = in_window(result.tables.get("collectives"), ranks, "start_utc_ns")
    if found is None:
        return ranks.select("rank", *_nulls("allreduce_wait_ns", "allreduce_transfer_ns"))
    found = found.filter(pl.col("op") == "allreduce")
    return found.group_by("rank").agg(whole_sum("wait_ns", "allreduce"), whole_sum("transfer_ns", "allreduce"))


def _p2p_transfer(result: Result, ranks: pl.DataFrame) -> pl.DataFrame:
    """Transfer of pipeline sends and receives of the window that found their partner."""
    pairs = result.tables.get("p2p")
    if pairs is None or pairs.is_empty():
        return ranks.select("rank", *_nulls("p2p_transfer_ns"))
    sides = []
    for rank, side in (("src_rank", "send"), ("dst_rank", "recv")):
        names = {rank: "rank", f"{side}_start_utc_ns": "start_utc_ns", f"{side}_transfer_ns": "p2p_transfer_ns"}
        sides.append(pairs.select(*names).rename(names))
    found = in_window(pl.concat(sides), ranks, "start_utc_ns")
    assert found is not None
    return found.group_by("rank").agg(pl.col("p2p_transfer_ns").sum())


def not_measured(result: Result, metric: str) -> str:
    """Why no rank has a metric, as far as the result tells: of its own column, or of the one that it rests on."""
    reasons = result.document.not_measured
    why = reasons.get(metric) or reasons.get(_RESTS_ON.get(metric, metric))
    if why is None and metric in ("allreduce_wait_ns", "allreduce_transfer_ns"):
        calls = result.tables.get("collectives")
        if calls is not None and not calls.is_empty():
            return NO_PARTNER
    return why or NOT_MEASURED


def whole_sum(name: str, prefix: str) -> pl.Expr:
    """A sum that is null when one of its terms is."""
    return pl.when(pl.col(name).null_count() == 0).then(pl.col(name).sum()).alias(f"{prefix}_{name}")


def _nulls(*names: str) -> Iterable[pl.Expr]:
    return [pl.lit(None, pl.Int64).alias(name) for name in names]
