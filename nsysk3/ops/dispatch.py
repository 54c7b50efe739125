"""Which path of an operation to take: the fastest that was measured, and correct, on this GPU.

The tables in ``dispatch/``, and in the folder that ``NSYSK3_DISPATCH`` names, are made by nsysk3.ops.dispatch_table
from a benchmark's JSON; they say when, with what and by which command.  No table, or a case outside what it measured:
NCCL with the one-launch residual.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any

BASELINE = "nccl"
PULL, PUSH = "pull", "push"  # push is also what is taken where nothing was measured: it needs nothing of the partial
MAX_ROWS = 8  # bank rows that the kernels read
# Fewer tokens a rank cut o_proj's GEMM into pieces too small for the GPU.
GEMM_ROWS = 512


@dataclass(frozen=True)
class Choice:
    """The path to take, and why.  ``able`` False: no other path can take this call."""

    path: str
    reason: str
    able: bool = True


@dataclass(frozen=True)
class Table:
    """What was measured on one kind of GPU, with one number of ranks.

    ``cells``: operation -> (tokens over all ranks, bank rows) -> the best path.
    """

    device: str
    world: int
    source: dict[str, Any]
    cells: dict[str, dict[tuple[int, int], str]]

    def choose(self, operation: str, tokens: int, rows: int) -> Choice:
        """The path for ``tokens`` over all ranks and ``rows`` valid bank rows.

        Between measured cases, a path other than the baseline is taken only when none of the cases around has that.
        """
        cells = self.cells.get(operation, {})
        by_tokens, by_rows = ({case[axis] for case in cells} for axis in (0, 1))
        around = product(_around(by_tokens, tokens), _around(by_rows, rows))
        found = [cells.get(case, BASELINE) for case in around]
        paths = set(found)
        if not paths:
            return Choice(BASELINE, "not measured for so many tokens or bank rows")
        if paths == {BASELINE}:
            return Choice(BASELINE, "measured no faster")
        if BASELINE in paths:
            return Choice(BASELINE, "cases measured around this one disagree")
        # The larger case's: all of them are faster than the baseline, and there most is to lose.
        return Choice(found[-1], f"measured fastest ({self.source.get('date', 'undated')})")


def _around(measured: set[int], value: int) -> list[int]:
    """The measured values next to ``value``: itself, or one on each side; none outside what was measured."""
    if value in measured:
        return [value]
    below = [each for each in measured if each < value]
    above = [each for each in measured if each > value]
    return [max(below), min(above)] if below and above else []


def find_table(device: str, world: int) -> Table | None:
    """The table that was measured on GPUs named ``device`` with ``world`` ranks; the user's own before nsysk3's."""
    return _tables(os.environ.get("NSYSK3_DISPATCH")).get((device, world))


@cache
def _tables(own: str | None) -> dict[tuple[str, int], Table]:
    tables = [read_table(json.loads(text)) for text in _documents(own)]
    return {(table.device, table.world): table for table in tables}


def _documents(own: str | None) -> Iterator[str]:
    for folder in (resources.files("nsysk3.ops") / "dispatch", Path(own) if own else None):
        if folder is not None and folder.is_dir():
            files = sorted((each for each in folder.iterdir() if each.name.endswith(".json")), key=lambda e: e.name)
            yield from (each.read_text("utf-8") for each in files)


def read_table(document: dict[str, Any]) -> Table:
    """A table from its JSON document."""
    cells = {
        operation: {(cell["tokens"], cell["rows"]): cell["path"] for cell in measured}
        for operation, measured in document["operations"].items()
    }
    return Table(document["device"], document["world"], document["source"], cells)
