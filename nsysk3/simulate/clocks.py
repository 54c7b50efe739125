"""What each node's clock shows at a true moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nsysk3.simulate.config import ClockErrors

Ints = NDArray[np.int64]

# 2026-08-20 08:00:00 UTC: true time 0 of every simulated run.
EPOCH_NS = 1_787_212_800_000_000_000
_PERIODS_S = (0.9, 2.3, 5.1)


@dataclass(frozen=True)
class NodeClock:
    """shown(t) = EPOCH + t + offset + drift * t + wander(t), with t in true nanoseconds since the run began."""

    offset_ns: int
    drift_ppm: float
    wander_ns: float
    phases: tuple[float, ...]

    def shown(self, true_ns: Ints) -> Ints:
        """UTC nanoseconds on this node's clock; strictly increasing in true time."""
        late: NDArray[np.floating[Any]] = self.drift_ppm * 1e-6 * true_ns
        if self.wander_ns:
            for period, phase in zip(_PERIODS_S, self.phases, strict=True):
                late = late + self.wander_ns / len(_PERIODS_S) * np.sin(true_ns * (2 * np.pi / (period * 1e9)) + phase)
        shown: Ints = true_ns + np.rint(late).astype(np.int64) + (EPOCH_NS + self.offset_ns)
        return shown


def node_clocks(nodes: int, errors: ClockErrors, rng: np.random.Generator) -> list[NodeClock]:
    """A clock a node, each wrong by up to what ``errors`` allows."""
    return [
        NodeClock(
            round(rng.uniform(-errors.offset_ns, errors.offset_ns)),
            float(rng.uniform(-errors.drift_ppm, errors.drift_ppm)),
            errors.wander_ns,
            tuple(float(value) for value in rng.uniform(0, 2 * np.pi, len(_PERIODS_S))),
        )
        for _ in range(nodes)
    ]
