"""Who arrives last at collectives, how often and by how much."""

from __future__ import annotations

import polars as pl

# Named a straggler: last in this share of at least so many instances, and late by more than clocks and launches jitter.
_MOSTLY = 0.6
_INSTANCES = 10
_LATE_NS = 5_000


def straggler_table(collectives: pl.DataFrame) -> pl.DataFrame:
    """One row a communicator, operation and rank, over instances whose members were all seen, at least two.

    ``instances``, ``last_count``, ``last_share``, ``late_p50_ns`` and ``late_p95_ns`` (arrival after the middle of the
    other ranks), ``caused_wait_ns`` (what the others waited in the instances in which it was last) and
    ``straggler``: late in most instances, by more than the clock uncertainty.
    """
    met = collectives.filter(pl.col("wait_ns").is_not_null() & (pl.col("ranks_seen") == pl.col("ranks")))
    key = ["communicator", "role", "seq"]
    # A median is a float, which at the size of UTC counts in steps of 256 ns: measure from the first arrival.
    arrival = pl.col("start_utc_ns") - pl.col("start_utc_ns").min().over(key)
    late = arrival - arrival.median().over(key)
    # Of two, the middle lies halfway: the distance to the other is twice that.
    late = pl.when(pl.col("ranks_seen") == 2).then(2 * late).otherwise(late)
    met = met.with_columns(
        late.alias("late"),
        (pl.col("last_rank") == pl.col("rank")).alias("last"),
        (pl.col("wait_ns").sum().over(key) - pl.col("wait_ns")).alias("others"),
    )
    table = met.group_by("communicator", "role", "rank").agg(
        pl.len().cast(pl.Int64).alias("instances"),
        pl.col("last").sum().cast(pl.Int64).alias("last_count"),
        pl.col("late").median().alias("late_p50_ns"),
        pl.col("late").quantile(0.95, "linear").alias("late_p95_ns"),
        pl.col("others").filter("last").sum().alias("caused_wait_ns"),
        pl.col("uncertainty_ns").max().alias("uncertainty_ns"),
    )
    mostly = (pl.col("last_count") / pl.col("instances") >= _MOSTLY) & (pl.col("instances") >= _INSTANCES)
    return table.with_columns(
        (pl.col("last_count") / pl.col("instances")).alias("last_share"),
        (mostly & (pl.col("late_p50_ns") > pl.col("uncertainty_ns") + _LATE_NS)).alias("straggler"),
    ).sort("communicator", "role", "rank")


def straggler_notes(table: pl.DataFrame, names: dict[int, str]) -> list[str]:
    """One sentence for each straggler, worst first."""
    worst = table.filter("straggler").sort("caused_wait_ns", descending=True)
    return [
        f"{names.get(rank, f'rank {rank}')} arrives last in {share:.0%} of {n} {role} of {communicator}, "
        f"{late / 1e3:,.0f} us after the others; the others waited {caused / 1e6:,.1f} ms for it"
        for communicator, role, rank, n, share, late, caused in worst.select(
            "communicator", "role", "rank", "instances", "last_share", "late_p50_ns", "caused_wait_ns"
        ).iter_rows()
    ]
