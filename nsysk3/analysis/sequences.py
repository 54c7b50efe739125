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
# Widths in which differences count as piled up: what ends scatter, then more where drift smears a long capture.
_WIDTHS_NS = (100_000, 400_000, 1_600_000)
# A pile is the offset when it holds this share of the instances that both clocks can have seen.
_HELD = 0.6
# A pile must stand out: the spread at the true shift is this much smaller than the time between events.
_DISTINCT = 0.25
# Clocks of two hosts run apart by no more than this.
MAX_DRIFT = 2e-4


class Shift(NamedTuple):
    """``delta_ns`` = b's clock minus a's; ``spread_ns`` = median distance of the differences from it."""

    delta_ns: int
    spread_ns: int


def estimate_shift(a: Ints, b: Ints, reach: int = 256) -> Shift | None:
    """The offset between two clocks from the sorted ends of shared instances, None when nothing stands out.

    The sequences may start at different instances (up to ``reach`` apart) and each may lack some.  Of piles that hold
    about as many differences the tightest is taken, and of those the one nearest to zero: UTC is roughly right.
    """
    if min(len(a), len(b)) < _MIN_MATCHES:
        return None
    picked = np.unique(np.linspace(0, len(a) - 1, min(_SAMPLES, len(a))).astype(np.int64))
    partner = picked[:, None] + np.arange(-min(reach, len(a)), min(reach, len(b)) + 1)[None, :]
    row, column = np.nonzero((partner >= 0) & (partner < len(b)))
    differences = b[partner[row, column]] - a[picked[row]]
    order = np.argsort(differences)
    differences, moments = differences[order], a[picked[row[order]]]
    possible = min(len(picked), len(b))
    best: Shift | None = None
    for width in _WIDTHS_NS:
        best, held = _pile(differences, moments, width)
        if held >= _HELD * possible:
            break
    spacing = float(np.median(np.diff(a)))
    return None if best is None or best.spread_ns > _DISTINCT * max(spacing, 1.0) else best


def _pile(differences: Ints, moments: Ints, width: int) -> tuple[Shift | None, int]:
    """The best pile of at most ``width`` in sorted differences, and how many it holds."""
    last = np.searchsorted(differences, differences + width, side="right")
    held = last - np.arange(len(differences))
    most = int(held.max())
    if most < _MIN_MATCHES:
        return None, most
    chosen: list[Shift] = []
    # The same pile is found from each of its first differences: the fullest of those that overlap stands for it.
    full = np.flatnonzero(held >= most - max(1, most // 10))
    for group in np.split(full, np.flatnonzero(np.diff(differences[full]) > width) + 1):
        at = int(group[np.argmax(held[group])])
        chosen.append(_settled(differences[at : last[at]], moments[at : last[at]]))
    return min(chosen, key=lambda pile: (pile.spread_ns // 10_000, abs(pile.delta_ns))), most


def _settled(differences: Ints, moments: Ints) -> Shift:
    """Middle and scatter of one pile, the drift between the two clocks taken out of the scatter."""
    when = moments - np.median(moments)
    late = when > 0
    slope = 0.0
    if late.any() and not late.all():
        rise = np.median(differences[late]) - np.median(differences[~late])
        slope = float(np.clip(rise / (np.median(when[late]) - np.median(when[~late])), -MAX_DRIFT, MAX_DRIFT))
    centre = float(np.median(differences))
    left = differences - centre - slope * when
    return Shift(round(centre), round(float(np.median(np.abs(left - np.median(left))))))


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
