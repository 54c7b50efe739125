"""What really happened: a row a kernel in truth.parquet, and the sums in truth.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from nsysk3.simulate.batch import Batch
from nsysk3.simulate.config import Config
from nsysk3.simulate.layers import ALL_GATHER, ALLREDUCE, P2P, PURPOSES, REDUCE_SCATTER, ROLES
from nsysk3.simulate.node import Node, Written

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

WAITS = ("none", "collective", "upstream", "downstream")
# Rows of one row group.
_AT_ONCE = 131_072
_SUMS = ("wait_ns", "p2p_ns", "p2p_wait_ns", "gather_ns")
_COLLECTIVE = (ALLREDUCE, ALL_GATHER, REDUCE_SCATTER)
_SCHEMA = pa.schema(
    {
        "rank": pa.int32(), "node": pa.int32(), "pid": pa.int64(), "device": pa.int32(), "correlation": pa.int64(),
        "stage": pa.int32(), "forward": pa.int32(), "layer": pa.int32(), "stream": pa.int32(),
        "role": pa.dictionary(pa.int32(), pa.string()), "purpose": pa.dictionary(pa.int32(), pa.string()),
        "bytes": pa.int64(), "instance": pa.int64(), "start_ns": pa.int64(), "end_ns": pa.int64(),
        "shown_start_ns": pa.int64(), "shown_end_ns": pa.int64(), "wait_ns": pa.int64(),
        "wait_kind": pa.dictionary(pa.int32(), pa.string()), "recorded": pa.bool_(),
    }
)  # fmt: skip


class Truth:
    """Writes truth.parquet as the run goes; keeps the sums.

    ``start_ns``/``end_ns`` are true time since the run began, ``shown_*`` the node's clock (UTC).  ``wait_ns`` is how
    much of the kernel was waiting; the rest is its transfer.  ``recorded``: whether the trace shows the kernel.
    """

    def __init__(self, path: Path, config: Config) -> None:
        self._writer = pq.ParquetWriter(path, _SCHEMA)
        self._config = config
        self._gathered: list[pa.RecordBatch] = []
        self._held = 0
        self.kernels = 0
        self.recorded = 0
        self._reductions: dict[int, list[Ints]] = {}
        self._sums = {name: np.zeros(config.world, np.int64) for name in _SUMS}

    def add(self, node: Node, batch: Batch, rows: slice, ranks: Ints, written: Written) -> None:
        """A batch's rows of one node."""
        kept, correlation = written.kept, written.correlation
        slots, shape = batch.slots, kept.shape
        start, end, wait = batch.start[rows], batch.end[rows], batch.wait[rows]

        def wide(values: Ints) -> Ints:
            return np.broadcast_to(values, shape).ravel()

        def tall(values: Ints) -> Ints:
            return np.repeat(values, shape[1])

        kind = np.zeros(len(slots), np.int64)
        kind[np.isin(slots.role, _COLLECTIVE)] = 1
        kind[slots.role == P2P] = 3 if batch.sends else 2
        local = ranks - node.ranks.start
        columns = [
            tall(ranks).astype(np.int32), np.full(start.size, node.number, np.int32),
            tall(node.pids(ranks)), tall(local).astype(np.int32), correlation.ravel(),
            np.full(start.size, batch.stage, np.int32), np.full(start.size, batch.forward, np.int32),
            wide(slots.layer).astype(np.int32), wide(slots.stream).astype(np.int32), _named(wide(slots.role), ROLES),
            _named(wide(slots.purpose), PURPOSES), wide(slots.bytes), wide(batch.instance), start.ravel(), end.ravel(),
            written.start.ravel(), written.end.ravel(), wait.ravel(), _named(wide(kind), WAITS),
            kept.ravel(),
        ]  # fmt: skip
        self._gathered.append(pa.record_batch(columns, schema=_SCHEMA))
        self._held += start.size
        if self._held >= _AT_ONCE:
            self._flush()
        self.kernels += kept.size
        self.recorded += int(kept.sum())
        self._count(batch, ranks, kept, end - start, wait)

    def _count(self, batch: Batch, ranks: Ints, kept: Bools, spent: Ints, wait: Ints) -> None:
        role = batch.slots.role
        reduced = role == ALLREDUCE
        for row, rank in enumerate(ranks):
            if reduced.any():
                self._reductions.setdefault(int(rank), []).append(spent[row][reduced & kept[row]])
        self._sums["wait_ns"][ranks] += (wait * kept).sum(axis=1)
        self._sums["p2p_ns"][ranks] += (spent * (kept & (role == P2P))).sum(axis=1)
        self._sums["p2p_wait_ns"][ranks] += (wait * (kept & (role == P2P))).sum(axis=1)
        self._sums["gather_ns"][ranks] += (spent * (kept & (role == ALL_GATHER))).sum(axis=1)

    def ranks(self) -> list[dict[str, Any]]:
        """Per rank, of the kernels recorded: AllReduce count, total and median, P2P and AllGather time, waiting."""
        found = []
        for rank in range(self._config.world):
            spent = np.concatenate(self._reductions.get(rank, [np.zeros(0, np.int64)]))
            found.append(
                {
                    "rank": rank, "allreduce_count": len(spent), "allreduce_total_ns": int(spent.sum()),
                    "allreduce_p50_ns": float(np.median(spent)) if len(spent) else None,
                    **{name: int(values[rank]) for name, values in self._sums.items()},
                }
            )  # fmt: skip
        return found

    def _flush(self) -> None:
        self._writer.write_table(pa.Table.from_batches(self._gathered, _SCHEMA))
        self._gathered, self._held = [], 0

    def close(self) -> None:
        """Finish truth.parquet."""
        self._flush()
        self._writer.close()


def _named(codes: Ints, names: tuple[str, ...]) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int32)), pa.array(names))
