"""The host calls that put work on a GPU."""

from __future__ import annotations

import numpy as np
import polars as pl

from nsysk3.trace.report import Report, pid_of

# Everything that can carry the correlation id of a kernel, copy or graph; the rest of the CUDA API (queries, attribute
# look-ups, event records) is most of the table and launches nothing.
_LAUNCHING = r"Launch|Memcpy|Memset"


def read_launches(report: Report) -> pl.DataFrame:
    """Launch calls of a report: ``pid``, ``correlation``, ``tid`` (globalTid), ``api_start``, ``api_end`` (UTC ns).

    One row per (pid, correlation), sorted so: correlation ids repeat between processes, so they are a key only
    together.  Where a runtime call and the driver call inside it share an id, the outer one stands.  Empty without the
    runtime table.
    """
    ids = report.strings_like(_LAUNCHING)
    columns = ("start", "end", "globalTid", "correlationId")
    rows = report.source.read("CUPTI_ACTIVITY_KIND_RUNTIME", columns, only={"nameId": ids})
    possible = pl.col("start").is_between(*report.possible_ns) & pl.col("end").is_between(*report.possible_ns)
    calls = rows.filter(pl.col("correlationId").is_not_null() & (pl.col("end") >= pl.col("start")) & possible).select(
        pid_of(pl.col("globalTid")).alias("pid"),
        pl.col("correlationId").alias("correlation"),
        pl.col("globalTid").alias("tid"),
        (pl.col("start") + report.to_utc_ns).alias("api_start"),
        (pl.col("end") + report.to_utc_ns).alias("api_end"),
    )
    calls = calls.sort(_key())
    key = calls.select(_key()).to_series()
    if not (key == key.shift()).any():
        return calls
    outer = calls.sort("api_start").group_by("pid", "correlation", maintain_order=True)
    return outer.agg(pl.first("tid"), pl.first("api_start"), pl.max("api_end")).sort(_key())


def with_launches(events: pl.DataFrame, launches: pl.DataFrame) -> pl.DataFrame:
    """GPU events with ``tid``, ``api_start`` and ``api_end`` of the call that launched them (null where unknown)."""
    # A look-up in sorted keys rather than a hash join: both sides come almost in launch order, so it reads memory in
    # order, and nothing as large as a hash table is built.
    calls = launches.filter(launches.select(_key().is_not_null()).to_series())
    known = calls.select(_key()).to_series().to_numpy()
    wanted = events.select(_key().fill_null(-1)).to_series().to_numpy()
    at = np.searchsorted(known, wanted)
    found = np.append(known, -2)[at] == wanted
    row = pl.DataFrame({"at": at, "found": found}).select(pl.when("found").then("at")).to_series()
    return events.hstack(calls.select(pl.col("tid", "api_start", "api_end").gather(row)))


def _key() -> pl.Expr:
    """(pid, correlation) in one integer; null where either is unknown.  CUPTI's correlation ids have 32 bits."""
    correlation = pl.col("correlation")
    return pl.when(correlation.is_between(0, 2**32 - 1)).then(pl.col("pid") * 2**32 + correlation)
