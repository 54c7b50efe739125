"""Waits that are known beforehand: a stage that works more than the others, and forwards that begin late."""

from __future__ import annotations

import random
import time
from itertools import pairwise

from nsysk3.ops.pytorch import torch
from nsysk3.workload.devices import cuda
from nsysk3.workload.options import Options


def layer_passes(options: Options, stage: int, layers: int) -> list[int]:
    """How often each layer of a stage does its work: all together floor(layers * factor) times for ``--imbalance``."""
    factor = options.imbalance_factor if stage == options.imbalance_stage else 1.0
    through = [int((number * factor) + 1e-9) for number in range(layers + 1)]
    return [after - before for before, after in pairwise(through)]


def delay_ms(seed: int, sigma: float, forward: int, rank: int) -> float:
    """How late ``--jitter`` lets a rank begin a forward: the size of a normal number of deviation ``sigma``."""
    return abs(random.Random(f"{seed}/{forward}/{rank}").gauss(0.0, sigma)) if sigma else 0.0


class Delay:
    """Lets a device wait: the GPU in a kernel that does nothing, else this thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cycles_a_ms: float | None = None

    def __call__(self, ms: float) -> None:
        """Wait; on a GPU in the order of its stream, and without waiting here."""
        if not ms:
            return
        if self._device.type == "cuda":
            cuda._sleep(int(ms * self._rate()))
            return
        time.sleep(ms / 1000)

    def _rate(self) -> float:
        """Cycles of a millisecond, measured once."""
        if self._cycles_a_ms is None:
            cycles = 20_000_000
            begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
            cuda._sleep(cycles)  # the clock rises first
            begin.record()
            cuda._sleep(cycles)
            end.record()
            end.synchronize()
            self._cycles_a_ms = cycles / float(begin.elapsed_time(end))
        return self._cycles_a_ms
