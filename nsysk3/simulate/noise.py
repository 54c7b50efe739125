"""Random spreads whose mean and shape come out the same for every seed."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_GOLDEN = 0.6180339887498949
_QUANTILES = NormalDist()


def spread(classes: Ints, sigma: float, round_: int, rng: np.random.Generator) -> Floats:
    """A factor for each item: log-normal with ``sigma`` and mean 1 within every class.

    Each class gets evenly spaced quantiles in random order, shifted from one round (forward) to the next, so that a
    few hundred draws already have the mean and the median of the distribution.
    """
    factors = np.ones(len(classes))
    for each in np.unique(classes):
        mine = np.flatnonzero(classes == each)
        levels = (np.arange(len(mine)) + (0.5 + round_ * _GOLDEN) % 1) / len(mine)
        levels = np.clip(levels, 0.5 / len(mine), 1 - 0.5 / len(mine))
        drawn = np.exp(sigma * np.array([_QUANTILES.inv_cdf(float(level)) for level in levels]))
        factors[mine] = rng.permutation(drawn / drawn.mean())
    return factors
