"""NVTX ranges of one report."""

from __future__ import annotations

import polars as pl

from nsysk3.trace.report import Report

PUSH_POP, START_END = 59, 60


def read_nvtx(report: Report) -> pl.DataFrame:
    """NVTX ranges on UTC nanoseconds, sorted by (tid, start, end descending).

    Columns: ``start``, ``end``, ``event_type`` (59 push/pop, 60 start/end), ``tid`` and ``end_tid`` (globalTid),
    ``name`` (Categorical; null where the range has none), ``truncated``.  A range still open when the capture stopped,
    or whose pop a dying process never sent, ends at the capture's end in every version of Nsight: it keeps its place in
    the nesting and is marked ``truncated``, because its length means nothing.  Ranges that end before they start are
    left out.
    """
    numbers = ("start", "end", "eventType", "globalTid", "endGlobalTid", "textId")
    rows = report.source.read("NVTX_EVENTS", numbers, texts=("text",), only={"eventType": [PUSH_POP, START_END]})
    strings = report.strings.select(pl.col("id").alias("textId"), pl.col("value").alias("registered"))
    rows = rows.filter(pl.col("start").is_between(*report.possible_ns) & pl.col("globalTid").is_not_null())
    rows = rows.with_columns(pl.when(pl.col("end") <= report.possible_ns[1]).then("end"))
    rows = rows.join(strings, on="textId", how="left", maintain_order="left")
    last = report.end_ns
    first_open, latest = (rows.select(pl.col("start").max(), pl.col("end").max()).row(0)) if rows.height else (0, 0)
    if last is None or (first_open or 0) > last:  # no stated end, or one that the rows themselves disprove
        last = max(first_open or 0, latest or 0)
    end = pl.col("end").fill_null(last)
    shift = report.to_utc_ns
    named = pl.coalesce("text", "registered").cast(pl.Categorical)
    return (
        rows.filter(end >= pl.col("start"))
        .select(
            (pl.col("start") + shift).alias("start"),
            (end + shift).alias("end"),
            pl.col("eventType").alias("event_type"),
            pl.col("globalTid").alias("tid"),
            pl.col("endGlobalTid").alias("end_tid"),
            named.alias("name"),
            (pl.col("end").is_null() | (pl.col("end") >= last)).alias("truncated"),
        )
        .sort("tid", "start", "end", descending=[False, False, True], maintain_order=True)
    )
