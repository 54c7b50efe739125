"""Medians over the ranks that may enter one: what a reader sees before any single rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

from nsysk3.analysis.pipeline import PHASES, phase_bounds

# With more stages than this, one column a stage no longer fits a line: all stages share one.
MAX_STAGE_COLUMNS = 4
_TOP = 20


def budget_summary(budget: pl.DataFrame, ranks: pl.DataFrame, stages: pl.DataFrame) -> pl.DataFrame:
    """Medians of the time budget over stable ranks: ``group``, ``bucket``, ``ns``, ``share``, ``low_ns``, ``high_ns``.

    One ``group`` a pipeline stage where there are two to four (stages do different work, and a median across them is
    nobody's), else one group of all ranks.  Buckets that no rank has are left out.  Empty without a stable rank.
    """
    labels = ranks.filter("stable").select("rank").join(stages.select("rank", "stage"), on="rank", how="left")
    few = labels["stage"].null_count() == 0 and 2 <= labels["stage"].n_unique() <= MAX_STAGE_COLUMNS
    group = pl.format("stage {}", "stage") if few else pl.lit("all ranks")
    joined = budget.join(labels.with_columns(group.alias("group")), on="rank")
    order = pl.DataFrame({"bucket": budget["bucket"].unique(maintain_order=True)}).with_row_index("order")
    seen = joined.filter(pl.col("ns") > 0).select("bucket").unique()
    return (
        joined.join(seen, on="bucket", how="semi")
        .group_by("group", "bucket")
        .agg(
            pl.col("ns").median(), pl.col("share").median(), pl.col("ns").min().alias("low_ns"),
            pl.col("ns").max().alias("high_ns"),
        )
        .join(order, on="bucket")
        .sort("group", "order")
        .drop("order")
    )  # fmt: skip


def top_kernels(kernels: pl.DataFrame, ranks: int) -> pl.DataFrame:
    """Kernels with most time: per-rank means of ``count`` and ``total_ns``, ``share`` of kernel time, ``p50_ns``."""
    every = max(int(kernels["total_ns"].sum()), 1)
    return (
        kernels.group_by("name", "short_name", "role", "category")
        .agg(pl.col("count").sum(), pl.col("total_ns").sum(), pl.col("p50_ns").median())
        .with_columns((pl.col("total_ns") / every).alias("share"))
        .sort("total_ns", "name", descending=[True, False])
        .head(_TOP)
        .with_columns(pl.col("count") / max(ranks, 1), pl.col("total_ns") / max(ranks, 1))
    )


def summary(ranks: pl.DataFrame) -> dict[str, Any]:
    """``ranks`` and ``stable_ranks`` as counts; ``median``, ``lowest`` and ``highest`` over the stable ranks.

    A value is null where no stable rank has it.
    """
    stable = ranks.filter(pl.col("stable"))
    ends = ("_ns", "_share", "_ratio", "_count")
    numeric = [name for name, kind in ranks.schema.items() if kind.is_numeric() and name.endswith(ends)]
    names = [name for name in numeric if "utc" not in name]
    found: dict[str, Any] = {"ranks": ranks.height, "stable_ranks": stable.height}
    for word, over in (("median", pl.Expr.median), ("lowest", pl.Expr.min), ("highest", pl.Expr.max)):
        values = stable.select(over(pl.col(name).cast(pl.Float64)) for name in names)
        found[word] = values.row(0, named=True) if values.height else {}
    return found


def report_tables(tables: Mapping[str, pl.DataFrame]) -> dict[str, pl.DataFrame]:
    """The tables that only a reader needs, made from the others: what a page shows it must not compute."""
    return {
        "collective_summary": collective_summary(tables["collectives"]),
        "p2p_summary": p2p_summary(tables["p2p"]),
        "category_summary": category_summary(tables["categories"], tables["rank_metrics"].height),
        "phases": phase_table(tables["p2p"], tables["rank_metrics"]),
    }


def collective_summary(collectives: pl.DataFrame) -> pl.DataFrame:
    """One row an operation, communicator and, where kinds are known, ``kind``; most time first.

    ``ranks``, ``instances``, ``count`` (kernels), ``total_ns`` over all ranks, duration percentiles; ``wait_ns``,
    ``transfer_ns`` and ``wait_share`` of the kernels whose partners were found, null where none was.
    """
    kinds = ["kind"] if "kind" in collectives.columns else []
    met = pl.col("wait_ns").is_not_null()
    waited, all_of_it = pl.col("wait_ns").sum(), pl.col("duration_ns").filter(met).sum()
    return (
        collectives.group_by("op", "communicator", *kinds)
        .agg(
            pl.col("rank").n_unique().cast(pl.Int64).alias("ranks"),
            pl.col("seq").n_unique().cast(pl.Int64).alias("instances"),
            pl.len().cast(pl.Int64).alias("count"),
            pl.col("duration_ns").sum().alias("total_ns"),
            pl.col("duration_ns").median().alias("duration_p50_ns"),
            pl.col("duration_ns").quantile(0.95, "linear").alias("duration_p95_ns"),
            pl.col("duration_ns").max().alias("duration_max_ns"),
            pl.when(met.any()).then(waited).alias("wait_ns"),
            pl.when(met.any()).then(pl.col("transfer_ns").sum()).alias("transfer_ns"),
            pl.when(all_of_it > 0).then(waited / all_of_it).alias("wait_share"),
            pl.col("transfer_ns").median().alias("transfer_p50_ns"),
        )
        .sort("total_ns", "op", "communicator", *kinds, descending=[True, *[False] * (2 + len(kinds))])
    )


def p2p_summary(pairs: pl.DataFrame) -> pl.DataFrame:
    """One row a channel and kind of message: sums of waiting and transfer on both sides, ``gbs`` (median of each).

    The rate is bytes over the receiver's transfer, whose clock stops when the bytes are there; null without bytes.
    """
    moved = (pl.col("bytes") > 0) & (pl.col("recv_transfer_ns") > 0)
    sums = ("send_wait_ns", "send_transfer_ns", "recv_wait_ns", "recv_wait_hidden_ns", "recv_transfer_ns")
    return (
        pairs.group_by("src_rank", "dst_rank", "kind")
        .agg(
            pl.len().cast(pl.Int64).alias("count"),
            pl.col("bytes").median(),
            *[pl.col(name).sum() for name in sums],
            (pl.col("bytes") / pl.col("recv_transfer_ns")).filter(moved).median().alias("gbs"),
            pl.col("uncertainty_ns").max(),
        )
        .sort("kind", "src_rank", "dst_rank")
    )


def category_summary(categories: pl.DataFrame, ranks: int) -> pl.DataFrame:
    """Per-rank means of ``count`` and ``total_ns`` by role and category, ``share`` of all of it; most time first."""
    every = max(int(categories["total_ns"].sum()), 1)
    return (
        categories.group_by("role", "category")
        .agg(pl.col("count").sum(), pl.col("total_ns").sum())
        .with_columns((pl.col("total_ns") / every).alias("share"))
        .sort("total_ns", "role", "category", descending=[True, False, False])
        .with_columns(pl.col("count") / max(ranks, 1), pl.col("total_ns") / max(ranks, 1))
    )


def phase_table(pairs: pl.DataFrame, windows: pl.DataFrame) -> pl.DataFrame:
    """``phase`` and the ``start_utc_ns`` it begins at (null: at the window's start); empty without activations."""
    bounds = phase_bounds(pairs, windows)
    starts = [] if bounds is None else [None, *bounds]
    schema = {"phase": pl.String, "start_utc_ns": pl.Int64}
    return pl.DataFrame({"phase": PHASES[: len(starts)], "start_utc_ns": starts}, schema=schema)
