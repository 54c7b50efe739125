"""Bandwidth of communication from bytes and transfer time, waiting left out: METRICS section 9."""

from __future__ import annotations

import polars as pl


def bus_factor(role: pl.Expr, ranks: pl.Expr) -> pl.Expr:
    """The ratio busbw / algbw as nccl-tests defines it, null for operations it does not."""
    n = ranks.cast(pl.Float64)
    return (
        pl.when(role == "allreduce").then(2 * (n - 1) / n)
        .when(role.is_in(["all_gather", "reduce_scatter", "all_to_all"])).then((n - 1) / n)
        .when(role == "p2p").then(1.0)
    )  # fmt: skip


def with_busbw(collectives: pl.DataFrame) -> pl.DataFrame:
    """``collectives`` with ``busbw_gbs`` (GB/s = bytes per ns), null without bytes, transfer or a partner."""
    moved = pl.when((pl.col("transfer_ns") > 0) & (pl.col("bytes") > 0)).then(pl.col("bytes") / pl.col("transfer_ns"))
    return collectives.with_columns((moved * bus_factor(pl.col("role"), pl.col("ranks"))).alias("busbw_gbs"))


def bandwidth_table(collectives: pl.DataFrame, pairs: pl.DataFrame, reference: pl.DataFrame | None) -> pl.DataFrame:
    """One row a communicator, operation and message size.

    ``communicator``, ``role``, ``ranks``, ``bytes``, ``count`` (kernels), ``transfer_p50_ns``, ``algbw_gbs``,
    ``busbw_gbs`` (medians) and, where an nccl-tests table covers the operation and the number of ranks,
    ``reference_busbw_gbs`` (interpolated over the logarithm of the size) and ``of_reference``.
    """
    whole = collectives.filter(pl.col("transfer_ns").is_not_null() & (pl.col("bytes") > 0)).select(
        "communicator", "role", "ranks", "bytes", "transfer_ns"
    )
    boundary = pairs.filter(pl.col("bytes") > 0).select(
        pl.format("rank {} to {}", "src_rank", "dst_rank").alias("communicator"),
        pl.lit("p2p").alias("role"),
        pl.lit(2, pl.Int64).alias("ranks"),
        "bytes",
        # Both sides move the same bytes; the receiver's clock stops when they are there.
        pl.col("recv_transfer_ns").alias("transfer_ns"),
    )
    algbw = pl.col("bytes") / pl.col("transfer_ns")
    moved = pl.concat([whole, boundary]).filter(pl.col("transfer_ns") > 0)
    table = (
        moved.with_columns(algbw.alias("algbw"), bus_factor(pl.col("role"), pl.col("ranks")).alias("factor"))
        .group_by("communicator", "role", "ranks", "bytes")
        .agg(
            pl.len().cast(pl.Int64).alias("count"),
            pl.col("transfer_ns").median().alias("transfer_p50_ns"),
            pl.col("algbw").median().alias("algbw_gbs"),
            (pl.col("algbw") * pl.col("factor")).median().alias("busbw_gbs"),
        )
        .sort("communicator", "role", "bytes")
    )
    return _against(table, reference)


def _against(table: pl.DataFrame, reference: pl.DataFrame | None) -> pl.DataFrame:
    if reference is None or reference.is_empty() or table.is_empty():
        return table.with_columns(
            pl.lit(None, pl.Float64).alias("reference_busbw_gbs"), pl.lit(None, pl.Float64).alias("of_reference")
        )
    import numpy as np

    values: list[float | None] = []
    for role, ranks, size in table.select("role", "ranks", "bytes").iter_rows():
        known = reference.filter((pl.col("role") == role) & (pl.col("ranks") == ranks)).sort("bytes")
        inside = known.height and known["bytes"][0] <= size <= known["bytes"][-1]
        x, y = known["bytes"].to_numpy(), known["busbw_gbs"].to_numpy()
        # Outside the measured sizes nothing is known: no extrapolation.
        values.append(float(np.interp(np.log2(size), np.log2(x), y)) if inside else None)
    filled = table.with_columns(pl.Series("reference_busbw_gbs", values, pl.Float64))
    return filled.with_columns((pl.col("busbw_gbs") / pl.col("reference_busbw_gbs")).alias("of_reference"))
