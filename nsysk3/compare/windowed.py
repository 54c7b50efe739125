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


def windows(ranks: pl.DataFrame) -> pl.DataFrame:
    """``rank``, ``_low``, ``_high``: the rank's window, UTC ns."""
    low = pl.col("window_start_utc_ns")
    return ranks.select("rank", low.alias("_low"), (low + pl.col("window_ns")).alias("_high"))
