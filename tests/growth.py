"""How the work for an input grows with its size: a law, where seconds would measure the machine."""

from __future__ import annotations

import time
from collections.abc import Callable


def growth(work: Callable[[int], object], size: int, times: int = 10) -> float:
    """Processor time for an input ``times`` as large, over that for ``size``: about ``times`` where one sweep does it.

    The least of three tries each, for other processes only add to it.
    """
    return _least(work, size * times) / max(_least(work, size), 1e-4)  # below that the clock's own steps count


def _least(work: Callable[[int], object], size: int) -> float:
    def once() -> float:
        begun = time.process_time()
        work(size)
        return time.process_time() - begun

    return min(once() for _ in range(3))
