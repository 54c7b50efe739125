"""Match two sequences of moments that are the same moments seen by two clocks, each possibly cut or with gaps.

Members of one collective end together, and so do the two sides of a large send.  The true partner of an event is
therefore the one whose end differs by the clock's offset, the same for all; wrong partners differ by that plus the
irregular time between events.  That makes the offset the value at which the differences pile up.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_SAMPLES = 160
_MIN_MATCHES = 3
# A pile must stand out: the spread at the true shift is this much smaller than the time between events.
_DISTINCT = 0.25


class Shift(NamedTuple):
    """``delta_ns`` = b's clock minus a's; ``spread_ns`` = median distance of the differences from it."""

    delta_ns: int
    spread_ns: int


def estimate_shift(a: Ints, b: Ints, reach: int = 256) -> Shift | None:
    """The offset between two clocks from the sorted ends of shared instances, None when nothing stands out.

    The sequences may start at different instances (up to ``reach`` apart) and each may lack some.  Of shifts that fit
    equally well the one nearest to zero is taken: UTC is roughly right.
    """
    if min(len(a), len(b)) < _MIN_MATCHES:
        return None
    picked = np.unique(np.linspace(0, len(a) - 1, min(_SAMPLES, len(a))).astype(np.int64))
    offsets = np.arange(-min(reach, len(a)), min(reach, len(b)) + 1)
    partner = picked[:, None] + offsets[None, :]
    valid = (partner >= 0) & (partner < len(b))
    differences = b[np.clip(partner, 0, len(b) - 1)] - a[picked][:, None]
    counts = valid.sum(axis=0)
    enough = counts >= max(_MIN_MATCHES, len(picked) // 4)
    if not enough.any():
        return None
    differences, valid, counts = differences[:, enough], valid[:, enough], counts[enough]
    centre = _medians(differences, valid, counts)
    spread = _medians(np.abs(differences - centre), valid, counts)
    # Ties within a few microseconds go to the smaller clock error.
    best = int(np.lexsort((np.abs(centre), spread // 10_000))[0])
    delta, width = int(centre[best]), int(spread[best])
    spacing = float(np.median(np.diff(a))) if len(a) > 1 else np.inf
    if width > _DISTINCT * max(spacing, 1.0):
        return None
    return Shift(delta, width)


def _medians(values: Ints, valid: NDArray[np.bool_], counts: Ints) -> Ints:
    """Column medians (the lower of two) over the valid cells."""
    ordered = np.sort(np.where(valid, values, np.iinfo(np.int64).max), axis=0)
    return ordered[(counts - 1) // 2, np.arange(len(counts))]


def nearest(a: Ints, b: Ints, tolerance: Ints | int) -> Ints:
    """For each of sorted ``a`` the index in sorted ``b`` of its mutual nearest within ``tolerance`` (ns), else -1."""
    if not len(a) or not len(b):
        return np.full(len(a), -1, np.int64)
    there = _closest(a, b)
    back = _closest(b, a)
    mutual = back[there] == np.arange(len(a))
    return np.where(mutual & (np.abs(b[there] - a) <= tolerance), there, -1)


def _closest(points: Ints, among: Ints) -> Ints:
    right = np.clip(np.searchsorted(among, points), 1, max(len(among) - 1, 1))
    if len(among) == 1:
        return np.zeros(len(points), np.int64)
    left_is_closer = points - among[right - 1] <= among[right] - points
    return np.where(left_is_closer, right - 1, right)
