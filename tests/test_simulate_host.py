"""A simulated host thread does one thing at a time, as a real one does."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from simulated import make

# Shapes in which posts come close: short forwards, deep pipelines, several forwards in flight, sends that back up.
SHAPES: list[dict[str, Any]] = [
    {"pp": 4, "tp": 2, "nodes": 4, "layers": 13, "micro_batches": 7, "layer_us": 400.0},
    {"pp": 4, "tp": 2, "nodes": 2, "layers": 4, "micro_batches": 12, "layer_us": 60.0},
    {"pp": 3, "tp": 1, "nodes": 3, "layers": 6, "micro_batches": 10, "layer_us": 150.0, "in_flight": 2},
    {"pp": 2, "tp": 2, "nodes": 1, "layers": 3, "micro_batches": 10, "layer_us": 20.0},
    {"pp": 1, "tp": 2, "nodes": 1, "layers": 3, "micro_batches": 6, "layer_us": 20.0},
]
CALLS = """
    SELECT globalTid, start, end, value FROM CUPTI_ACTIVITY_KIND_RUNTIME JOIN StringIds ON id = nameId
    UNION ALL
    SELECT globalTid, start, end, coalesce(text, value) FROM NVTX_EVENTS LEFT JOIN StringIds ON id = textId
    WHERE end IS NOT NULL
"""


def crossings(calls: list[tuple[int, int, str]]) -> list[tuple[str, str]]:
    """Calls that overlap without one lying in the other."""
    found = []
    still_open: list[tuple[int, str]] = []
    for start, end, name in sorted(calls, key=lambda call: (call[0], -call[1])):
        while still_open and still_open[-1][0] <= start:
            still_open.pop()
        if still_open and still_open[-1][0] < end:
            found.append((still_open[-1][1], name))
        else:
            still_open.append((end, name))
    return found


@pytest.mark.parametrize(("seed", "shape"), [(seed, shape) for seed in (0, 1) for shape in SHAPES])
def test_calls_and_ranges_of_one_thread_nest_or_are_apart(seed: int, shape: dict[str, Any], tmp_path: Path) -> None:
    made = make(tmp_path, seed=seed, **shape)
    threads: dict[tuple[Path, int], list[tuple[int, int, str]]] = defaultdict(list)
    for trace in made.path.glob("nodes/*/trace.sqlite"):
        with closing(sqlite3.connect(trace)) as connection:
            for thread, start, end, name in connection.execute(CALLS):
                threads[trace, thread].append((start, end, name))
    assert len(threads) == shape["pp"] * shape["tp"]
    for calls in threads.values():
        assert crossings(calls) == []
