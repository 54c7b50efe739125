"""Sets of time against one bit a nanosecond: how to draw them, and what is in them."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

SPAN = 60
moments = st.integers(0, SPAN)
raw_sets = st.lists(st.tuples(moments, st.integers(-3, 20)), max_size=12)


def arrays(pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """(start, length) to starts and ends; a negative length is an end before its start."""
    start = np.array([start for start, _ in pairs], np.int64)
    return start, start + np.array([length for _, length in pairs], np.int64)


def nanoseconds(start: Any, end: Any) -> set[int]:
    """Every nanosecond of these half-open intervals."""
    return {at for low, high in zip(start, end, strict=True) for at in range(int(low), int(high))}
