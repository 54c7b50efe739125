"""The three tables of a statistics recipe, made from a result: which file a rank is, and its numbers.

Times are nanoseconds.  ``Rank`` is the rank's number in the run, not a file's place in the alphabet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import polars as pl

from nsysk3.errors import InputError
from nsysk3.result.store import Result

# Names as docs/metrics.md defines them (there with _ns).
_OVERLAP = (
    "window", "compute", "comm", "fused", "copy", "graph", "overlap", "overlap_transfer", "overlap_wait",
    "exposed_comm", "exposed_transfer", "exposed_wait", "exposed_unresolved", "idle",
)  # fmt: skip
_WAITS = ("exposed_wait_upstream", "exposed_wait_downstream", "stage_wait", "wait_upstream", "wait_downstream")
_PIPELINE = ("busy", "wait_fill", "wait_steady", "wait_drain", "bubble")
_STAGE = (
    "window", "busy", *_WAITS[:2], "stage_idle", "stage_wait", "wait_fill", "wait_steady", "wait_drain",
    *_WAITS[3:], "idle", "bubble",
)  # fmt: skip


@dataclass(frozen=True)
class RecipeTables:
    """``files``: one row a rank.  ``rank_stats``: one row a name and rank.  ``all_stats``: one row a name.

    ``all_stats`` is over the stable ranks, over all where none is; unlike NVIDIA's it is computed from every event, not
    approximated from the ranks' quartiles.  ``missing``: why a number of this recipe is null, by name.
    """

    files: pl.DataFrame
    rank_stats: pl.DataFrame
    all_stats: pl.DataFrame
    missing: dict[str, str]


def recipe_tables(result: Result, recipe: str) -> RecipeTables:
    """The tables of one recipe.  Raises InputError, in one line, when the run has nothing for it."""
    make: dict[str, Callable[[Result], tuple[pl.DataFrame, pl.DataFrame]]] = {
        "nsysk3_overlap": lambda each: _totals(_rank_metrics(each).rename(_bare(_OVERLAP)), _OVERLAP, each),
        "nsysk3_stage_wait": lambda each: _totals(_stage_metrics(each), _STAGE, each),
        "nsysk3_layers": _layers,
        "nsysk3_allreduce": _allreduce,
    }
    rank_stats, all_stats = make[recipe](result)
    return RecipeTables(_files(result), rank_stats, all_stats, _missing(rank_stats))


def _missing(rank_stats: pl.DataFrame) -> dict[str, str]:
    if "Total Time" not in rank_stats.columns:
        waits = {"Wait", "Transfer", "AllReduce Wait", "AllReduce Transfer"} & set(rank_stats.columns)
        null = [name for name in sorted(waits) if rank_stats[name].null_count()]
        return dict.fromkeys(null, "no partner of these kernels is in this run")
    names = rank_stats.filter(pl.col("Total Time").is_null())["Name"].unique(maintain_order=True)
    graphs = "CUDA graphs were traced as a whole: their kernels are unknown"
    return {name: "no pipeline, or no activation, was seen" if name in _PIPELINE else graphs for name in names}


def _ranks(result: Result) -> pl.DataFrame:
    """``rank`` (row number), ``Rank`` (number in the run), ``used`` (counts in all_stats)."""
    metrics = _rank_metrics(result)
    used = pl.col("stable") if metrics["stable"].any() else pl.lit(True)
    return metrics.select("rank", pl.col("world_rank").alias("Rank"), used.alias("used"))


def _files(result: Result) -> pl.DataFrame:
    """One row a rank.  A node's report holds several ranks and is named by each of them."""
    return result.tables["rank_metrics"].select(
        pl.col("world_rank").alias("Rank"),
        pl.col("report").alias("File"),
        pl.col("host").alias("Host"),
        pl.col("pp_rank").alias("PP"),
        pl.col("tp_rank").alias("TP"),
        pl.col("device_id").alias("Device"),
        pl.col("rank_source").alias("Rank Source"),
        pl.col("stable").alias("Stable"),
        pl.col("reason").alias("Why Not Stable"),
    ).sort("Rank")  # fmt: skip


# --- lengths of time in a rank's window: one number a rank


def _rank_metrics(result: Result) -> pl.DataFrame:
    return result.tables["rank_metrics"].with_columns(pl.int_range(pl.len(), dtype=pl.Int32).alias("rank"))


def _bare(names: Sequence[str]) -> dict[str, str]:
    return {f"{name}_ns": name for name in names}


def _stage_metrics(result: Result) -> pl.DataFrame:
    """Stage wait by its parts.  A rank of no pipeline has them too: nothing waits for a stage, which is zero."""
    buckets = result.tables["budget"].pivot("bucket", index="rank", values="ns")
    pipeline = result.tables["pipeline"].select("rank", *[f"{name}_ns" for name in _PIPELINE])
    parts = [pl.col("exposed_wait_upstream"), pl.col("exposed_wait_downstream"), pl.col("stage_idle_ns")]
    joined = _rank_metrics(result).join(buckets, on="rank").join(pipeline, on="rank", how="left")
    joined = joined.with_columns(pl.sum_horizontal(parts).alias("stage_wait"))
    joined = joined.rename(_bare(_STAGE), strict=False)
    seen = pl.col("comm_ns").is_not_null()  # else whole graphs hide what waited
    return joined.with_columns(pl.when(seen).then(pl.col(name)).alias(name) for name in (*_WAITS, "busy", "bubble"))


def _totals(metrics: pl.DataFrame, names: Sequence[str], result: Result) -> tuple[pl.DataFrame, pl.DataFrame]:
    window = pl.col("window")
    order = pl.DataFrame({"Name": names}).with_row_index("order")
    long = (
        metrics.select("rank", window.alias("of"), *[pl.col(name).cast(pl.Int64) for name in names])
        .unpivot(names, index=["rank", "of"], variable_name="Name", value_name="Total Time")
        .join(_ranks(result), on="rank")
        .join(order, on="Name")
        .with_columns(pl.when(pl.col("of") > 0).then(100 * pl.col("Total Time") / pl.col("of")).alias("Time"))
        .sort("Rank", "order")
    )
    value = pl.col("Total Time")
    known = pl.when(value.is_not_null()).then(pl.col("of")).sum()
    every = (
        long.filter("used")
        .group_by("Name", maintain_order=True)
        .agg(
            pl.col("order").first(),
            pl.when(known > 0).then(100 * value.sum() / known).alias("Time"),
            value.count().cast(pl.Int64).alias("Ranks"),
            *_distribution(value),
            *_extremes(value),
        )
        .sort("order")
    )
    return long.select("Name", "Time", "Total Time", "Rank"), every.drop("order")


# --- events with durations: a distribution a rank


def _layers(result: Result) -> tuple[pl.DataFrame, pl.DataFrame]:
    """One event a whole forward and layer: the time from its first kernel's start to its last one's end."""
    windows = _rank_metrics(result).select(
        "rank",
        pl.col("window_start_utc_ns").alias("low"),
        (pl.col("window_start_utc_ns") + pl.col("window_ns")).alias("high"),
    )
    whole = result.tables["forwards"].filter("whole")
    events = (
        result.tables["layers"]
        .join(windows, on="rank")
        .filter((pl.col("start_utc_ns") >= pl.col("low")) & (pl.col("end_utc_ns") <= pl.col("high")))
        .join(whole, on=["rank", "forward"], how="semi")
        .with_columns(
            pl.format("layer {}", "layer").alias("Name"), (pl.col("end_utc_ns") - pl.col("start_utc_ns")).alias("ns")
        )
        .rename({"layer": "order"})
    )
    if events.is_empty():
        raise InputError("nsysk3_layers: no whole forward with layers was found in this run's window")
    medians = [
        pl.col(f"{name}_ns").median().alias(title)
        for name, title in (
            ("compute", "Compute"), ("allreduce", "AllReduce"), ("allreduce_wait", "AllReduce Wait"),
            ("allreduce_transfer", "AllReduce Transfer"), ("exposed_comm", "Exposed"), ("fused", "Fused"),
        )
    ]  # fmt: skip
    kind = pl.col("layer_kind").drop_nulls().mode(maintain_order=True).first().alias("Kind")
    return _events(events, result, [kind, *medians])


def _allreduce(result: Result) -> tuple[pl.DataFrame, pl.DataFrame]:
    """One event an AllReduce kernel, named by what launched it."""
    kinds = ("embedding", "attention", "dense_mlp", "moe", "logits", "pp_gather", "unknown")
    events = (
        result.tables["collectives"]
        .filter(pl.col("op") == "allreduce")
        .with_columns(pl.col("kind").fill_null("unknown").alias("Name"), pl.col("duration_ns").alias("ns"))
        .join(pl.DataFrame({"Name": kinds}).with_row_index("order"), on="Name", how="left")
    )
    if events.is_empty():
        raise InputError("nsysk3_allreduce: no AllReduce kernel starts in this run's window")
    met = pl.col("wait_ns").is_not_null()
    sums = [
        pl.when(met.any()).then(pl.col("wait_ns").sum()).alias("Wait"),
        pl.when(met.any()).then(pl.col("transfer_ns").sum()).alias("Transfer"),
    ]
    return _events(events, result, sums)


def _events(events: pl.DataFrame, result: Result, more: Sequence[pl.Expr]) -> tuple[pl.DataFrame, pl.DataFrame]:
    value = pl.col("ns")
    numbers = [pl.len().cast(pl.Int64).alias("Count"), *_distribution(value), value.sum().alias("Sum"), *more]
    joined = events.join(_ranks(result), on="rank")
    by_rank = joined.group_by("Name", "Rank").agg(pl.col("order").first(), *numbers).sort("Rank", "order", "Name")
    every = (
        joined.filter("used")
        .group_by("Name")
        .agg(
            pl.col("order").first(),
            pl.col("Rank").n_unique().cast(pl.Int64).alias("Ranks"),
            *numbers,
            *_extremes(value),
        )
        .sort("order", "Name")
    )
    return by_rank.select(pl.exclude("Rank", "order"), "Rank"), every.drop("order")


def _distribution(value: pl.Expr) -> list[pl.Expr]:
    return [
        value.mean().alias("Mean"),
        value.std().alias("Std"),
        value.min().alias("Min"),
        value.quantile(0.25, "linear").alias("Q1"),
        value.median().alias("Median"),
        value.quantile(0.75, "linear").alias("Q3"),
        value.max().alias("Max"),
    ]


def _extremes(value: pl.Expr) -> list[pl.Expr]:
    """Which ranks have the least and the most, as NVIDIA's recipes write them: numbers with commas between."""
    return [
        pl.col("Rank").filter(value == bound).unique().sort().cast(pl.String).str.join(", ").alias(title)
        for bound, title in ((value.min(), "Min Rank"), (value.max(), "Max Rank"))
    ]
