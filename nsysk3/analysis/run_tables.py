"""Tables over a whole run that are made from other tables."""

from __future__ import annotations

import polars as pl

from nsysk3.analysis.budget import BUCKETS, Budget

_UNCLASSIFIED_SHOWN = 30


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
