"""NVTX ranges of one report."""

from __future__ import annotations

from collections.abc import Callable

import polars as pl

from nsysk3.trace.order import row_order
from nsysk3.trace.report import Report
from nsysk3.trace.source import AnyOf

PUSH_POP, START_END = 59, 60
# A longer list of ids costs more than the rows that it spares.
_MANY_NAMES = 5_000


def read_nvtx(report: Report, of_use: Callable[[pl.Series], pl.Series] | None = None) -> pl.DataFrame:
    """NVTX ranges on UTC nanoseconds, sorted by (tid, start, end descending).

    Columns: ``start``, ``end``, ``event_type`` (59 push/pop, 60 start/end), ``tid`` and ``end_tid`` (globalTid),
    ``name`` (Categorical; null where the range has none), ``truncated``.  A range still open when the capture stopped,
    or whose pop a dying process never sent, ends at the capture's end in every version of Nsight: it keeps its place in
    the nesting and is marked ``truncated``, because its length means nothing.  Ranges that end before they start are
    left out.

    ``of_use`` gives those names (a String series) of a trace's that are of use; ranges with other registered names may
    then be left out.
    """
    last = report.end_ns
    rows = _rows(report, last, of_use)
    registered = pl.col("value").cast(pl.Categorical).alias("registered")
    strings = report.strings.select(pl.col("id").alias("textId"), registered)
    rows = rows.filter(pl.col("start").is_between(*report.possible_ns) & pl.col("globalTid").is_not_null())
    rows = rows.with_columns(pl.when(pl.col("end") <= report.possible_ns[1]).then("end"))
    rows = rows.join(strings, on="textId", how="left", maintain_order="left")
    first_open, latest = (rows.select(pl.col("start").max(), pl.col("end").max()).row(0)) if rows.height else (0, 0)
    if last is None or (first_open or 0) > last:  # no stated end, or one that the rows themselves disprove
        last = max(first_open or 0, latest or 0)
    end = pl.col("end").fill_null(last)
    shift = report.to_utc_ns
    ranges = rows.filter(end >= pl.col("start")).select(
        (pl.col("start") + shift).alias("start"),
        (end + shift).alias("end"),
        pl.col("eventType").alias("event_type"),
        pl.col("globalTid").alias("tid"),
        pl.col("endGlobalTid").alias("end_tid"),
        pl.coalesce(pl.col("text").cast(pl.Categorical), "registered").alias("name"),
        (pl.col("end").is_null() | (pl.col("end") >= last)).alias("truncated"),
    )
    return ranges[row_order(ranges.select("tid", "start", -1 - pl.col("end")), ties=1)]


def _rows(report: Report, last: int | None, of_use: Callable[[pl.Series], pl.Series] | None) -> pl.DataFrame:
    numbers = ("start", "end", "eventType", "globalTid", "endGlobalTid", "textId")

    def read(some: AnyOf | None) -> pl.DataFrame:
        kinds = {"eventType": [PUSH_POP, START_END]}
        return report.source.read("NVTX_EVENTS", numbers, texts=("text",), only=kinds, any_of=some)

    if of_use is None or last is None:
        return read(None)
    # Ranges after the stated end disprove it, whatever their names.
    always = {"text": None, "start": range(last + 1, 2**63), "end": range(last + 1, 2**63)}

    def ids(names: pl.Series) -> list[int]:
        used = of_use(names.drop_nulls().unique())
        return report.strings.filter(pl.col("value").is_in(used.implode()))["id"].to_list()

    registered = report.strings["value"]
    first = ids(registered)
    if len(first) > _MANY_NAMES:
        return read(None)
    rows = read({"textId": first, **always})
    # What a registered name means can depend on names that are not registered.
    every = ids(pl.concat([registered, rows["text"]]))
    return rows if set(every) <= set(first) else read({"textId": every, **always})
