"""Bootstrap intervals of medians over ranks and forwards, and what they allow to say.

Samples of one metric of one run are a table of ranks x forwards.  Forwards of one run are alike but vary, so they are
drawn anew, the same ones for every rank: what slows a forward slows it on all ranks, and cells are not independent.
Ranks are drawn anew within their stage only: every run has the same stages, and what tells stages apart is no noise.
Where a rank gives a single number, ranks are drawn over all stages, for then nothing else says how much values vary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nsysk3.compare.model import Verdict

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

REPLICATES = 1000
MIN_SAMPLES = 3
# With fewer units a percentile bootstrap is known to give intervals that are too narrow.
FEW_SAMPLES = 8
# Why there is no interval, or no relative one.
ONE_RUN = "the ranks of a run share it, so they are one sample"
NO_VALUE = "too many of the draws of ranks and forwards have no value"
NO_BASE = "the base is 0, so there is no relative change"
ZERO_BASE = "in some draws of its ranks and forwards the base is 0, so the relative change has no interval"
_CELLS = 8_000_000
# Of the replicates, at least; a percentile of fewer is one of what happened to have a value.
_WITH_VALUE = 0.95


@dataclass(frozen=True)
class Samples:
    """``values[rank, forward]``, NaN where a rank lacks the forward; ``ranks`` and ``stages`` name the rows.

    ``per_forward`` is false where each rank gives a single number and the second axis has length one.
    """

    values: Floats
    ranks: Ints
    stages: Ints
    per_forward: bool = True

    @classmethod
    def of(cls, values: Floats, ranks: Sequence[int], stages: Sequence[int], per_forward: bool = True) -> Samples:
        """Rows in the order of ``ranks``, so that the order in which they came changes nothing."""
        order = np.argsort(np.asarray(ranks, np.int64), kind="stable")
        table = np.asarray(values, np.float64).reshape(len(ranks), -1)[order]
        if per_forward:
            table = table[:, ~np.isnan(table).all(axis=0)]  # a forward that no rank has is no sample
        return cls(
            table,
            np.asarray(ranks, np.int64)[order],
            np.asarray(stages, np.int64)[order],
            per_forward,
        )

    @property
    def n(self) -> int:
        """Cells with a value."""
        return int(np.count_nonzero(~np.isnan(self.values)))

    @property
    def median(self) -> float:
        """Median over ranks of each rank's median over its forwards; NaN without samples."""
        return float(median(median(self.values)))

    @property
    def units(self) -> int:
        """Forwards where there are enough to draw from, else ranks: those with a value."""
        return int(np.count_nonzero(~np.isnan(self.values).all(axis=0 if self.draws_forwards else 1)))

    @property
    def draws_forwards(self) -> bool:
        """Whether forwards are what is drawn anew."""
        return self.per_forward and self.values.shape[1] >= MIN_SAMPLES


@dataclass(frozen=True)
class Interval:
    """The middle 95 % of the replicates."""

    low: float
    high: float


def median(values: Floats) -> Floats:
    """Median along the last axis without NaN, NaN where there is nothing else."""
    if values.shape[-1] == 0:
        return np.full(values.shape[:-1], np.nan)
    ordered = np.sort(values, axis=-1)  # NaN last
    count = np.count_nonzero(~np.isnan(values), axis=-1)[..., None]
    low = np.take_along_axis(ordered, np.maximum(count - 1, 0) // 2, -1)
    high = np.take_along_axis(ordered, np.minimum(count // 2, values.shape[-1] - 1), -1)
    return np.asarray((low + (high - low) / 2)[..., 0])


def replicates(
    samples: Samples, *, rank_seed: Sequence[int], forward_seed: Sequence[int], count: int = REPLICATES
) -> Floats | None:
    """``count`` bootstrap replicates of ``samples.median``; None for fewer than three ranks or forwards to draw.

    Runs that share ``rank_seed`` and have the same ranks draw the same ones: their differences are paired.
    """
    if samples.units < MIN_SAMPLES or not samples.n:
        return None
    ranks, forwards = samples.values.shape
    stages = samples.stages if samples.draws_forwards else np.zeros(ranks, np.int64)
    rows = _drawn_ranks(stages, np.random.default_rng(rank_seed), count)
    rng = np.random.default_rng(forward_seed)
    made = []
    size = max(1, _CELLS // max(ranks * forwards, 1))
    for at in range(0, count, size):
        some = rows[at : at + size]
        if samples.draws_forwards:
            columns = rng.integers(0, forwards, (len(some), forwards))
            per_rank = median(samples.values[:, columns]).T
        else:
            per_rank = np.broadcast_to(median(samples.values), (len(some), ranks))
        made.append(median(np.take_along_axis(per_rank, some, 1)))
    return np.concatenate(made)


def _drawn_ranks(stages: Ints, rng: np.random.Generator, count: int) -> Ints:
    drawn = np.empty((count, len(stages)), np.int64)
    for stage in np.unique(stages):
        rows = np.flatnonzero(stages == stage)
        drawn[:, rows] = rows[rng.integers(0, len(rows), (count, len(rows)))]
    return drawn


def interval(replicated: Floats) -> Interval | None:
    """Bootstrap percentile interval, None when too many replicates have no value."""
    good = replicated[np.isfinite(replicated)]
    if len(good) < _WITH_VALUE * len(replicated):
        return None
    low, high = np.percentile(good, (2.5, 97.5))
    return Interval(float(low), float(high))


def ratio_interval(base: Floats, other: Floats) -> Interval | None:
    """Interval of ``other / base - 1`` over replicates of numbers that are never negative.

    Where a replicate of the base is 0 the ratio has no bound above, and of 0 and 0 it is anything: that widens the
    interval at both ends.  None where an end has no bound.
    """
    known = np.isfinite(base) & np.isfinite(other)
    if np.count_nonzero(known) < _WITH_VALUE * len(known):
        return None
    base, other = base[known], other[known]
    ratio = np.divide(other, base, out=np.full(len(base), np.inf), where=base > 0) - 1
    lowest = np.where((base > 0) | (other > 0), ratio, -1.0)
    with np.errstate(invalid="ignore"):  # between two replicates without bound
        low, high = float(np.percentile(lowest, 2.5)), float(np.percentile(ratio, 97.5))
    return Interval(low, high) if np.isfinite([low, high]).all() else None


def judged(change: Interval | None) -> Verdict:
    """What an interval of a change allows to say."""
    if change is None:
        return "not enough samples"
    if change.high < 0:
        return "lower"
    return "higher" if change.low > 0 else "no difference shown"
