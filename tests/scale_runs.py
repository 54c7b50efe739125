"""Runs of several reports, and what two results of one must have in common: everything."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

from conftest import FIXTURES
from simulated import make

from nsysk3.result import Result
from nsysk3.scale.pool import Pool

TWO = FIXTURES / "h200" / "pp2-two-reports"
# No run, but many kinds of trace in one: graphs by node and as a whole, SGLang's ranges, and none.
MIXED = [
    *(FIXTURES / "h200" / f"{name}.sqlite" for name in ("tp2", "graph", "graphwhole")),
    FIXTURES / "sglang-h200" / "pp2-lw.sqlite",
]


def four_nodes(folder: Path, **changes: object) -> Path:
    """A simulated run directory with four reports whose clocks are milliseconds apart."""
    sizes = {"pp": 4, "tp": 2, "ep": 2, "nodes": 4, "layers": 4, "micro_batches": 3, "seed": 5}
    return make(folder, **(sizes | changes)).path


def assert_same(one: Result, other: Result) -> None:
    """Two results agree in every table, row and column, and in every word of the document."""
    assert one.tables.keys() == other.tables.keys()
    assert [name for name, table in one.tables.items() if not table.equals(other.tables[name])] == []
    assert one.document == other.document


class Deadly(Pool):
    """Two processes, of which one is killed as soon as it has been given a report in ``doomed`` (report, step)."""

    def __init__(self, doomed: Sequence[tuple[int, int]], times: int) -> None:
        super().__init__(2)
        self._doomed = dict.fromkeys(doomed, times)

    def give(self, member: str, report: int, number: int, calls: Sequence[bytes]) -> None:
        """Give it, and kill."""
        super().give(member, report, number, calls)
        if self._doomed.get((report, number), 0) > 0:
            self._doomed[report, number] -= 1
            pid = self._members[member].process.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
