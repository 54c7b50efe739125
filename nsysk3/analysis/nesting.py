"""Which range holds a point, for ranges that nest as calls do."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def parents(start: Ints, end: Ints) -> Ints:
    """Index of the smallest range that holds each range, -1 for none.

    Ranges must be sorted by start, longer first on ties.  n log n, plus one pass a level of nesting.
    """
    count = len(start)
    # Depth of a range = earlier ranges still open when it starts; an end at the very start of another closes before it.
    closed = np.searchsorted(np.sort(end), start, side="right")
    # Ranges without length that begin here but come later (or are this very one) have not closed before it.
    empty = end == start
    closed -= np.searchsorted(start[empty], start, side="right") - (np.cumsum(empty) - empty)
    depth = np.maximum(np.arange(count) - closed, 0)
    found = np.full(count, -1, np.int64)
    order = np.arange(count)
    for level in range(1, int(depth.max(initial=0)) + 1):
        above = np.maximum.accumulate(np.where(depth == level - 1, order, -1))
        mine = depth == level
        found[mine] = above[mine]
    return found


def innermost(start: Ints, end: Ints, points: Ints) -> Ints:
    """Index of the innermost range with start <= point <= end, -1 for none.

    Ranges must be sorted by start, longer first on ties, and nest (push/pop on one thread).
    """
    if not len(start):
        return np.full(len(points), -1, np.int64)
    above = parents(start, end)
    found = np.searchsorted(start, points, side="right") - 1
    while True:
        past = (found >= 0) & (end[found] < points)
        if not past.any():
            return found
        found[past] = above[found[past]]
