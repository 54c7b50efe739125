"""Rows of a result that lie in the windows of its ranks."""

from __future__ import annotations

import polars as pl

from nsysk3.result import Result


def whole_forwards(result: Result, ranks: pl.DataFrame) -> pl.DataFrame:
    """Whole forwards inside the windows of ``ranks``; empty where the result has none."""
    schema = {
        "rank": pl.Int32,
        "forward": pl.Int32,
        **dict.fromkeys(("start_utc_ns", "end_utc_ns", "tokens"), pl.Int64),
    }
    found = in_window(result.tables.get("forwards"), ranks, "start_utc_ns", "end_utc_ns")
    if found is None:
        return pl.DataFrame(schema=schema)
    return found.filter("whole").select(pl.col(name).cast(kind) for name, kind in schema.items())


def in_window(table: pl.DataFrame | None, ranks: pl.DataFrame, *moments: str) -> pl.DataFrame | None:
    """Rows of ``ranks`` whose ``moments`` lie in the rank's window."""
    if table is None or table.is_empty():
        return None
    inside = [pl.col(moment).is_between("_low", "_high") for moment in moments]
    return table.join(windows(ranks), on="rank").filter(*inside).drop("_low", "_high")


def touching(result: Result, ranks: pl.DataFrame) -> pl.DataFrame:
    """Forwards, whole or not, of which some lies in the windows of ``ranks``."""
    forwards = result.tables.get("forwards")
    if forwards is None or forwards.is_empty():
        return pl.DataFrame(schema={"rank": pl.Int32, "forward": pl.Int32, "start_utc_ns": pl.Int64})
    found = forwards.join(windows(ranks), on="rank").filter(
        (pl.col("end_utc_ns") > pl.col("_low")) & (pl.col("start_utc_ns") < pl.col("_high"))
    )
    return found.select(pl.col("rank", "forward").cast(pl.Int32), "start_utc_ns")


def unbroken(every: pl.DataFrame, whole: pl.DataFrame) -> pl.DataFrame:
    """By rank ``ns``, ``forwards``, ``tokens`` of its longest row of ``whole`` forwards with no other in between.

    A rank with one forward alone, or whose row has less than half of its whole forwards, has none.
    """
    key = ["rank", "forward"]
    marked = every.join(whole.select(*key, "end_utc_ns", "tokens"), on=key, how="left").sort("rank", "start_utc_ns")
    other = pl.col("end_utc_ns").is_null()
    rows = marked.with_columns(other.cum_sum().over("rank").alias("row")).filter(~other)
    spans = rows.group_by("rank", "row").agg(
        (pl.col("end_utc_ns").max() - pl.col("start_utc_ns").min()).alias("ns"),
        pl.len().alias("forwards"),
        pl.when(pl.col("tokens").null_count() == 0).then(pl.col("tokens").sum()).alias("tokens"),
        pl.col("start_utc_ns").min().alias("first"),
    )
    all_of = pl.col("forwards").sum().over("rank")
    longest = spans.filter((pl.col("forwards") > 1) & (pl.col("forwards") * 2 >= all_of))
    return longest.sort("forwards", "first", descending=[True, False]).unique("rank", keep="first", maintain_order=True)


def windows(ranks: pl.DataFrame) -> pl.DataFrame:
    """``rank``, ``_low``, ``_high``: the rank's window, UTC ns."""
    low = pl.col("window_start_utc_ns")
    return ranks.select("rank", low.alias("_low"), (low + pl.col("window_ns")).alias("_high"))
