"""Medians over the ranks that may enter one: what a reader sees before any single rank."""

from __future__ import annotations

from typing import Any

import polars as pl

# With more stages than this, one column a stage no longer fits a line: all stages share one.
MAX_STAGE_COLUMNS = 4
_TOP = 20


def budget_summary(budget: pl.DataFrame, ranks: pl.DataFrame, stages: pl.DataFrame) -> pl.DataFrame:
    """Medians of the time budget over stable ranks: ``group``, ``bucket``, ``ns``, ``share``, ``low_ns``, ``high_ns``.

    One ``group`` a pipeline stage where there are two to four (stages do different work, and a median across them is
    nobody's), else one group of all ranks.  Buckets that no rank has are left out.  Without a stable rank all count.
    """
    used = ranks.filter(pl.col("stable")) if ranks["stable"].any() else ranks
    labels = used.select("rank").join(stages.select("rank", "stage"), on="rank", how="left")
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
    """``ranks`` and ``stable_ranks`` as counts, and ``median`` over the stable ranks, null where no rank has it."""
    stable = ranks.filter(pl.col("stable"))
    ends = ("_ns", "_share", "_ratio", "_count")
    numeric = [name for name, kind in ranks.schema.items() if kind.is_numeric() and name.endswith(ends)]
    medians = stable.select(pl.col(name).cast(pl.Float64).median() for name in numeric if "utc" not in name)
    values = medians.row(0, named=True) if medians.height else {}
    return {"ranks": ranks.height, "stable_ranks": stable.height, "median": values}
