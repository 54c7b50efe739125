"""What a run launched, counted over windows and over whole forwards: collectives of one kind, kernels, layers."""

from __future__ import annotations

import polars as pl

from nsysk3.result import Result

GRAPHS = "CUDA graphs were traced as a whole: their kernels are unknown"
NO_LAYERS = "no layers were found"
NO_LAYER_COUNT = "the result does not count the kernels of its layers: analyze again"
OTHER_OPS = ("reduce_scatter", "all_gather")
_KEY = ["rank", "forward"]


def placed(calls: pl.DataFrame, forwards: pl.DataFrame, op: str) -> pl.DataFrame:
    """Kernels of a collective that start in a whole forward, with that ``forward``."""
    mine = calls.filter(pl.col("op") == op).select(
        "rank", pl.col("start_utc_ns").alias("at"), "duration_ns", "wait_ns", "transfer_ns"
    )
    spans = forwards.select(*_KEY, "start_utc_ns", "end_utc_ns").sort("start_utc_ns")
    found = mine.sort("at").join_asof(
        spans, left_on="at", right_on="start_utc_ns", by="rank", strategy="backward", check_sortedness=False
    )
    return found.filter(pl.col("at") <= pl.col("end_utc_ns"))


def other_cells(calls: pl.DataFrame | None, forwards: pl.DataFrame) -> pl.DataFrame:
    """Count and total of ReduceScatter and of AllGather by rank and forward."""
    table = forwards.select(*_KEY, "tokens")
    if calls is None:
        return pl.DataFrame()
    for op in OTHER_OPS:
        cells = placed(calls, forwards, op).group_by(_KEY).agg(
            pl.len().cast(pl.Int64).alias(f"{op}_count"), pl.col("duration_ns").sum().alias(f"{op}_total_ns")
        )  # fmt: skip
        table = table.join(cells, on=_KEY, how="left")
    return table.with_columns(pl.exclude(*_KEY, "tokens").fill_null(0))


def with_counts(result: Result, ranks: pl.DataFrame) -> pl.DataFrame:
    """``ranks`` with what the window's other roles add up to, null where whole CUDA graphs hide kernels."""
    roles = result.tables.get("roles")
    names = [f"{op}_{what}" for op in OTHER_OPS for what in ("count", "total_ns")] + ["fused_count"]
    if roles is None or not {"role", "count", "total_ns"} <= set(roles.columns):
        table = ranks.with_columns(pl.lit(None, pl.Int64).alias(name) for name in names)
    else:
        sums = [
            pl.col(what).filter(pl.col("role") == role).sum().alias(f"{role}_{what}")
            for role, what in map(_split, names)
        ]
        table = ranks.join(roles.group_by("rank").agg(sums), on="rank", how="left", maintain_order="left")
        table = table.with_columns(pl.col(names).fill_null(0))
    clear = pl.col("graph_ns") == 0
    return table.with_columns(pl.when(clear).then(name).alias(name) for name in (*names, "kernel_count"))


def _split(name: str) -> tuple[str, str]:
    role = name.removesuffix("_count").removesuffix("_total_ns")
    return role, name.removeprefix(f"{role}_")


def with_kernels(result: Result, forwards: pl.DataFrame, ranks: pl.DataFrame) -> pl.DataFrame:
    """``forwards`` with ``kernel_count``, null on ranks where whole CUDA graphs hide kernels."""
    table = result.tables.get("forwards")
    if table is None or "kernels" not in table.columns:
        return forwards
    clear = ranks.filter(pl.col("kernel_count").is_not_null()).select("rank")
    counted = table.join(clear, on="rank", how="semi").select(*_KEY, pl.col("kernels").alias("kernel_count"))
    return forwards.join(counted, on=_KEY, how="left", maintain_order="left")


def layer_counts(layers: pl.DataFrame) -> pl.DataFrame:
    """By rank and forward the median over its layers of how many kernels a layer has; null where one is not known."""
    count = pl.col("kernel_count")
    known = count.null_count() == 0
    return (
        layers.drop_nulls("forward").group_by(_KEY).agg(pl.when(known).then(count.median()).alias("layer_kernel_count"))
    )


def no_layer_counts(layers: pl.DataFrame | None) -> str:
    """Why layer_counts has nothing for a rank and forward."""
    return NO_LAYERS if layers is None else GRAPHS if "kernel_count" in layers.columns else NO_LAYER_COUNT
