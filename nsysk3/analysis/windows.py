"""The one stretch of time that all numbers of a table are taken over."""

from __future__ import annotations

import re
from dataclasses import dataclass

import polars as pl

from nsysk3.errors import InputError

_RANGE = re.compile(r"^\s*(-?[\d.]+)\s*(ns|us|ms|s)?\s*:\s*(-?[\d.]+)\s*(ns|us|ms|s)?\s*$")
_UNITS = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9, None: 10**9}
# Beyond any trace, and still far from the end of 64 bits once the date is added.
_FAR_NS = 2**60
NAMED = ("capture", "prefill", "steady")


@dataclass(frozen=True)
class WindowSpec:
    """What the user asked for: a named window, or START:END after the run's first kernel (ns)."""

    text: str
    start_ns: int | None = None
    end_ns: int | None = None


def parse_window(text: str) -> WindowSpec:
    """``capture``, ``prefill``, ``steady`` or ``START:END`` (seconds, or with a unit: ``100ms:1.5s``).

    Raises InputError for anything else.
    """
    if text in NAMED:
        return WindowSpec(text)
    match = _RANGE.match(text)
    if not match:
        raise InputError(f"--window {text!r}: give capture, prefill, steady or START:END such as 0.5s:2s")
    try:
        low, high = (
            max(-_FAR_NS, min(_FAR_NS, round(float(number) * _UNITS[unit])))
            for number, unit in ((match[1], match[2]), (match[3], match[4]))
        )
    except ValueError as error:
        raise InputError(f"--window {text!r}: not a number") from error
    if high <= low:
        raise InputError(f"--window {text!r}: the end must come after the start")
    return WindowSpec(text, low, high)


def capture_windows(events: pl.DataFrame) -> pl.DataFrame:
    """Per rank, first to last kernel or graph replay: ``rank``, ``start``, ``end`` (UTC ns).

    Copies outside it (a launcher's set-up, results copied home) are not part of the work that is judged.
    """
    return (
        events.select("rank", "start", "end", "kind")
        .filter(pl.col("kind") != "copy")
        .group_by("rank")
        .agg(pl.col("start").min(), pl.col("end").max())
        .sort("rank")
    )


def explicit_windows(captures: pl.DataFrame, spec: WindowSpec) -> pl.DataFrame:
    """One START:END for all ranks, counted from the run's first kernel and clamped to each rank's own capture.

    A rank without a kernel inside it has a window of length 0, and no ratio.
    """
    origin = captures["start"].min()
    low, high = pl.lit(origin) + spec.start_ns, pl.lit(origin) + spec.end_ns
    return captures.with_columns(
        pl.col("start").clip(low, high).alias("start"),
        pl.max_horizontal(pl.col("start").clip(low, high), pl.col("end").clip(low, high)).alias("end"),
    )


def within(table: pl.DataFrame, windows: pl.DataFrame, rank: str, time: str) -> pl.DataFrame:
    """Rows whose ``time`` (UTC ns) lies in the window of the rank in column ``rank``."""
    bounds = windows.select(pl.col("rank").alias(rank), pl.col("start").alias("_low"), pl.col("end").alias("_high"))
    moments = table.select(rank, time).join(bounds, on=rank, how="left", maintain_order="left")
    inside = (pl.col(time) >= pl.col("_low")) & (pl.col(time) < pl.col("_high"))
    chosen = moments.select(inside).to_series()
    return table if chosen.all(ignore_nulls=False) else table.filter(chosen)
