"""Sets of time as sorted, disjoint intervals: exact integer nanoseconds, n log n, no loops over events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class Intervals(NamedTuple):
    """Sorted, disjoint, non-touching half-open intervals."""

    start: Ints
    end: Ints

    @property
    def length(self) -> int:
        """Total length in ns."""
        return int((self.end - self.start).sum())


EMPTY = Intervals(np.empty(0, np.int64), np.empty(0, np.int64))


def union(start: Ints, end: Ints) -> Intervals:
    """The set covered by any of the intervals; empty ones add nothing."""
    real = end > start
    if not real.all():
        start, end = start[real], end[real]
    if not len(start):
        return EMPTY
    if (start[1:] < start[:-1]).any():
        order = np.argsort(start, kind="stable")
        start, end = start[order], end[order]
    reach = np.maximum.accumulate(end)
    opens = np.concatenate(([True], start[1:] > reach[:-1]))
    closes = np.concatenate((opens[1:], [True]))
    return Intervals(start[opens], reach[closes])


def clip(intervals: Intervals, low: int, high: int) -> Intervals:
    """The part of a set inside [low, high)."""
    inside = (intervals.end > low) & (intervals.start < high)
    return Intervals(np.maximum(intervals.start[inside], low), np.minimum(intervals.end[inside], high))


def covered(intervals: Intervals, until: Ints) -> Ints:
    """How much of a set lies before each moment (ns): the difference of two moments is what it covers between them."""
    if not len(intervals.start):
        return np.zeros(len(until), np.int64)
    before = np.concatenate(([0], np.cumsum(intervals.end - intervals.start)))
    last = np.searchsorted(intervals.start, until, side="right")
    inside = np.clip(until - intervals.start[last - 1], 0, intervals.end[last - 1] - intervals.start[last - 1])
    return np.where(last > 0, before[np.maximum(last - 1, 0)] + inside, 0)


class Segments(NamedTuple):
    """The window cut wherever membership of any set changes.

    ``start``, ``end`` (ns) and ``mask``: bit k is set where the k-th set covers the segment.  The segments tile the
    window: their lengths sum to it exactly.
    """

    start: Ints
    end: Ints
    mask: Ints

    def where(self, chosen: NDArray[np.bool_]) -> int:
        """Length of the segments chosen, ns."""
        return int((self.end[chosen] - self.start[chosen]).sum())

    def by_mask(self) -> Segments:
        """One segment a mask, as long as all of that mask together: enough to ask how long, not when."""
        spent = pl.DataFrame({"mask": self.mask, "ns": self.end - self.start}).group_by("mask").agg(pl.col("ns").sum())
        ns = spent["ns"].to_numpy()
        return Segments(np.zeros_like(ns), ns, spent["mask"].to_numpy())


def segments(sets: Sequence[Intervals], low: int, high: int) -> Segments:
    """Cut the window [low, high) by up to 62 sets."""
    clipped = [clip(each, low, high) for each in sets]
    times = [np.array([low, high], np.int64)]
    flips = [np.zeros(2, np.int64)]
    for bit, each in enumerate(clipped):
        times += [each.start, each.end]
        flips += [np.full(len(each.start), 1 << bit, np.int64), np.full(len(each.end), -(1 << bit), np.int64)]
    at = np.concatenate(times)
    order = np.argsort(at, kind="stable")
    at = at[order]
    # Each set is disjoint, so adding and subtracting its bit keeps a running bit mask.
    mask = np.cumsum(np.concatenate(flips)[order])
    real = at[1:] > at[:-1]
    return Segments(at[:-1][real], at[1:][real], mask[:-1][real])
