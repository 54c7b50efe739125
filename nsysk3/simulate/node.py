"""One node's export: the batches of its ranks as rows on its own clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from nsysk3.simulate.batch import API_NS, Batch
from nsysk3.simulate.clocks import NodeClock
from nsysk3.simulate.config import Config
from nsysk3.simulate.database import Database
from nsysk3.simulate.layers import ALL_GATHER, ALLREDUCE, COPY, FORWARD_STREAM, P2P, REDUCE_SCATTER
from nsysk3.simulate.ranges import NCCL_DOMAIN, communicator_id, layer_ranges, payload
from nsysk3.simulate.symbols import GRAPH, LAUNCH_CALLS, SYMBOL_KEYS, SYMBOLS

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

VM_ID = 1 << 48
_FIRST_PID = 1100
_CALLS = {ALLREDUCE: "ncclAllReduce", ALL_GATHER: "ncclAllGather", REDUCE_SCATTER: "ncclReduceScatter"}
_KERNEL_CONSTANTS: dict[str, Any] = {
    "contextId": 1, "greenContextId": 0, "launchType": 1, "cacheConfig": 1, "registersPerThread": 96, "gridX": 132,
    "gridY": 1, "gridZ": 1, "blockX": 256, "blockY": 1, "blockZ": 1, "localMemoryTotal": 250871808,
    "sharedMemoryExecuted": 102400, "sharedMemoryLimitConfig": 0,
}  # fmt: skip


@dataclass
class Strings:
    """StringIds of one file."""

    ids: dict[str, int] = field(default_factory=dict)

    def __call__(self, text: str) -> int:
        """The id of a string, new if need be."""
        return self.ids.setdefault(text, len(self.ids) + 1)


def pid_of_rank(config: Config, rank: int) -> int:
    """Process id of a rank's scheduler on its node; the same numbers on every node, as in containers."""
    return _FIRST_PID + rank % config.gpus_per_node


@dataclass
class Faulty:
    """What goes wrong while recording: world ranks without ranges, replayed as whole graphs, share of kernels lost."""

    no_ranges: frozenset[int] = frozenset()
    graphs: frozenset[int] = frozenset()
    lost_share: float = 0.0
    corrupt_share: float = 0.0


@dataclass(frozen=True)
class Written:
    """What became of a batch, [rank, slot]: recorded or not, correlation ids, times on the node's clock (UTC ns)."""

    kept: Bools
    correlation: Ints
    start: Ints
    end: Ints


class Node:
    """Writes the rows of the ranks on one node."""

    def __init__(
        self, config: Config, version: str, number: int, path: Path, clock: NodeClock, window: tuple[int, int],
        stops: Ints, faulty: Faulty, rng: np.random.Generator,
    ) -> None:  # fmt: skip
        self.config, self.number, self.clock, self.window, self.faulty = config, number, clock, window, faulty
        self.database = Database(path, version)
        self.session_ns = int(clock.shown(np.array([window[0]]))[0])
        self.strings = Strings()
        self.ranks = range(number * config.gpus_per_node, (number + 1) * config.gpus_per_node)
        self._stops = stops
        self._rng = rng
        self._correlation = 100 + 3 * np.arange(config.gpus_per_node, dtype=np.int64)
        self._short = np.array([self.strings(symbol.short) for symbol in SYMBOLS.values()], np.int64)
        self._full = np.array([self.strings(symbol.full) for symbol in SYMBOLS.values()], np.int64)
        self._call = np.array([self.strings(name) for name in LAUNCH_CALLS], np.int64)
        self._call_class = np.array(list(LAUNCH_CALLS.values()), np.int64)
        self._htod, self._memset = SYMBOL_KEYS.index("htod"), SYMBOL_KEYS.index("memset")

    def ts(self, true_ns: Ints) -> Ints:
        """Timestamps of the file: this node's clock since its capture began."""
        return self.clock.shown(true_ns) - self.session_ns

    def recorded(self, batch: Batch, rows: slice, ranks: Ints) -> Bools:
        """Which kernels the capture saw: launched and ended while it ran."""
        low, high = self.window
        stop = np.minimum(self._stops[ranks], high)[:, None]
        kept = (batch.launch[rows] >= low) & (batch.end[rows] <= stop)
        if self.faulty.lost_share:
            kept &= self._rng.random(kept.shape) >= self.faulty.lost_share
        return kept

    def add(self, batch: Batch, rows: slice, ranks: Ints) -> Written:
        """Write a batch's rows of this node's ranks."""
        kept = self.recorded(batch, rows, ranks)
        local = ranks - self.ranks.start
        count = len(batch.slots)
        correlation = self._correlation[local][:, None] + 3 * np.arange(count)
        self._correlation[local] += 3 * count + 5
        start, end = self.clock.shown(batch.start[rows]), self.clock.shown(batch.end[rows])
        written = Written(self._in_graph(batch, rows, ranks, kept, correlation), correlation, start, end)
        self._gpu_rows(batch, ranks, written)
        self._launches(batch, rows, ranks, correlation)
        if self.config.nvtx:
            self._nccl_ranges(batch, rows, ranks)
            if batch.body:
                self._layer_ranges(batch, rows, ranks)
        return written

    # --- rows

    def _gpu_rows(self, batch: Batch, ranks: Ints, written: Written) -> None:
        slots, count, correlation = batch.slots, len(batch.slots), written.correlation
        row, slot = np.nonzero(written.kept)
        order = np.argsort(written.start[row, slot], kind="stable")
        row, slot = row[order], slot[order]
        start, end = written.start[row, slot] - self.session_ns, written.end[row, slot] - self.session_ns
        symbol = slots.symbol[slot]
        columns = {
            "start": start, "end": end, "deviceId": ranks[row] - self.ranks.start, "streamId": slots.stream[slot],
            "correlationId": correlation[row, slot], "globalPid": self._global_pid(ranks[row]),
        }  # fmt: skip
        if slots.role[0] == COPY:
            for table, key in (("MEMCPY", self._htod), ("MEMSET", self._memset)):
                mine = symbol == key
                part = {name: values[mine] for name, values in columns.items()} | {"bytes": slots.bytes[slot][mine]}
                constants: dict[str, Any] = {"contextId": 1, "greenContextId": 0, "copyCount": 1}
                constants |= {"copyKind": 1, "srcKind": 1, "dstKind": 2} if table == "MEMCPY" else {"memKind": 2}
                self.database.insert(f"CUPTI_ACTIVITY_KIND_{table}", part, constants)
            return
        columns |= {
            "demangledName": self._full[symbol], "shortName": self._short[symbol], "mangledName": self._full[symbol],
            "gridId": correlation[row, slot] + count,
        }  # fmt: skip
        if self.faulty.corrupt_share and len(start):
            self._corrupt(columns)
        self.database.insert("CUPTI_ACTIVITY_KIND_KERNEL", columns, _KERNEL_CONSTANTS)

    def _corrupt(self, columns: dict[str, Any]) -> None:
        """Damage some rows: no start, an end before the start, or a name that is not there."""
        count = len(columns["start"])
        kind = np.where(self._rng.random(count) < self.faulty.corrupt_share, self._rng.integers(0, 3, count), 3)
        columns["end"] = np.where(kind == 1, columns["start"] - 1_000, columns["end"])
        columns["start"] = np.where(kind == 0, 0, columns["start"])
        for name in ("demangledName", "shortName"):
            columns[name] = np.where(kind == 2, 10**9, columns[name])

    def _launches(self, batch: Batch, rows: slice, ranks: Ints, correlation: Ints) -> None:
        launch, slots = batch.launch[rows], batch.slots
        low, high = self.window
        row, slot = np.nonzero((launch >= low) & (launch + API_NS <= np.minimum(self._stops[ranks], high)[:, None]))
        replayed = np.isin(ranks, list(self.faulty.graphs))[row] & (slots.layer[slot] >= 0)
        row, slot = row[~replayed], slot[~replayed]
        call = slots.call[slot]
        start = self.ts(launch[row, slot])
        self.database.insert(
            "CUPTI_ACTIVITY_KIND_RUNTIME",
            {
                "start": start, "end": self.ts(launch[row, slot] + API_NS), "eventClass": self._call_class[call],
                "globalTid": self._global_tid(ranks[row]), "correlationId": correlation[row, slot],
                "nameId": self._call[call],
            },
            {"returnValue": 0},
        )  # fmt: skip

    def _in_graph(self, batch: Batch, rows: slice, ranks: Ints, kept: Bools, correlation: Ints) -> Bools:
        """For ranks that replay their layers as a whole graph: one graph row instead of the layers' kernels."""
        hit = np.flatnonzero(np.isin(ranks, list(self.faulty.graphs)))
        inside = np.flatnonzero(batch.slots.layer >= 0)
        if not len(hit) or not batch.body or not len(inside):
            return kept
        kept = kept.copy()
        for row in hit:
            if not kept[row, inside].all():
                kept[row, inside] = False
                continue
            kept[row, inside] = False
            start, end = batch.start[rows][row, inside[0]], batch.end[rows][row, inside[-1]]
            rank, number = ranks[row : row + 1], correlation[row, inside[0]] + 1
            where = {"correlationId": np.array([number])}
            self.database.insert(
                "CUPTI_ACTIVITY_KIND_GRAPH_TRACE",
                {"start": self.ts(np.array([start])), "end": self.ts(np.array([end])),
                 "deviceId": rank - self.ranks.start, "globalPid": self._global_pid(rank), **where},
                {"contextId": 1, "greenContextId": 0, "streamId": FORWARD_STREAM, "graphId": 1, "graphExecId": 2},
            )  # fmt: skip
            at = self.ts(batch.launch[rows][row, inside[0]] + np.array([0, API_NS]))
            self.database.insert(
                "CUPTI_ACTIVITY_KIND_RUNTIME",
                {"start": at[:1], "end": at[1:], "globalTid": self._global_tid(rank), **where},
                {"eventClass": 0, "nameId": int(self._call[list(LAUNCH_CALLS).index(GRAPH)]), "returnValue": 0},
            )
        return kept

    # --- ranges

    def _marked(self, ranks: Ints) -> Ints:
        """Rows of the ranks that have ranges."""
        return np.flatnonzero(~np.isin(ranks, list(self.faulty.no_ranges)))

    def _layer_ranges(self, batch: Batch, rows: slice, ranks: Ints) -> None:
        chosen = self._marked(ranks)
        chosen = chosen[~np.isin(ranks[chosen], list(self.faulty.graphs))]
        ranges = layer_ranges(self.config, batch.stage)
        start, end = ranges.times(batch.launch[rows][chosen], API_NS)
        # The scheduler's own range around the whole, from python's nvtx package: a registered string.
        launch = batch.launch[rows][chosen]
        begun, done = launch[:, 0] - 60_000, launch[:, -1] + API_NS + 40_000
        self._registered("scheduler.run_batch", begun, done, ranks[chosen], 0, None)
        row, number = self._inside(start, end)
        if not len(row):
            return
        text = pa.array(ranges.texts).take(pa.array(number))
        self.database.insert(
            "NVTX_EVENTS",
            {
                "start": self.ts(start[row, number]), "end": self.ts(end[row, number]),
                "globalTid": self._global_tid(ranks[chosen][row]), "text": text,
            },
            {"eventType": 59, "domainId": 0},
        )  # fmt: skip

    def _inside(self, start: Ints, end: Ints) -> tuple[Ints, Ints]:
        low, high = self.window
        row, number = np.nonzero((start >= low) & (end <= high))
        return row, number

    def _nccl_ranges(self, batch: Batch, rows: slice, ranks: Ints) -> None:
        chosen = self._marked(ranks)
        for slot in np.flatnonzero(batch.slots.role == P2P):
            self._group(batch, rows, ranks, chosen, int(slot))
        group = communicator_id(self.config.seed, "tp", batch.stage)
        for role, call in _CALLS.items():
            slots = np.flatnonzero(batch.slots.role == role)
            if not len(slots):
                continue
            hidden = np.isin(ranks[chosen], list(self.faulty.graphs))[:, None] & (batch.slots.layer[slots] >= 0)
            launch = batch.launch[rows][np.ix_(chosen, slots)]
            row, number = np.nonzero(~hidden)
            at = launch[row, number]
            sizes = [payload(call, group, int(size)) for size in batch.slots.bytes[slots]]
            blobs = pa.array(sizes, pa.binary()).take(pa.array(number))
            self._registered(call, at - 400, at + API_NS + 300, ranks[chosen][row], NCCL_DOMAIN, blobs)

    def _group(self, batch: Batch, rows: slice, ranks: Ints, chosen: Ints, slot: int) -> None:
        """ncclGroupStart, the send or receive, and ncclGroupEnd, inside which the kernel is launched."""
        assert batch.peer is not None
        at = batch.launch[rows][chosen, slot]
        who = ranks[chosen]
        other = batch.peer * self.config.tp + who % self.config.tp
        call = "ncclSend" if batch.sends else "ncclRecv"
        pairs = [sorted((int(a), int(b))) for a, b in zip(who, other, strict=True)]
        size = int(batch.slots.bytes[slot])
        raw = [
            payload(call, communicator_id(self.config.seed, "pair", *pair), size, pair.index(int(peer)))
            for pair, peer in zip(pairs, other, strict=True)
        ]
        blobs = pa.array(raw, pa.binary())
        self._registered("ncclGroupStart", at - 5_000, at - 4_500, who, NCCL_DOMAIN, None)
        self._registered(call, at - 4_000, at - 2_000, who, NCCL_DOMAIN, blobs)
        self._registered("ncclGroupEnd", at - 1_500, at + API_NS + 300, who, NCCL_DOMAIN, None)

    def _registered(self, name: str, start: Ints, end: Ints, ranks: Ints, domain: int, blobs: pa.Array | None) -> None:
        low, high = self.window
        inside = np.flatnonzero((start >= low) & (end <= high))
        values: dict[str, Any] = {
            "start": self.ts(start[inside]), "end": self.ts(end[inside]), "globalTid": self._global_tid(ranks[inside]),
        }  # fmt: skip
        if blobs is not None and self.config.payloads:
            values["binaryData"] = blobs.take(pa.array(inside))
        self.database.insert("NVTX_EVENTS", values, {"eventType": 59, "domainId": domain, "textId": self.strings(name)})

    # --- ids

    def pids(self, ranks: Ints) -> Ints:
        """Process ids of world ranks on this node."""
        return _FIRST_PID + ranks - self.ranks.start

    def _global_pid(self, ranks: Ints) -> Ints:
        return VM_ID + (self.pids(ranks) << 24)

    def _global_tid(self, ranks: Ints) -> Ints:
        return self._global_pid(ranks) + self.pids(ranks)


def rank_rows(config: Config, stage: int, node: int) -> tuple[slice, Ints]:
    """Which rows of a stage's batch are on a node, and the world ranks they are."""
    first = stage * config.tp
    low = max(first, node * config.gpus_per_node)
    high = min(first + config.tp, (node + 1) * config.gpus_per_node)
    return slice(low - first, high - first), np.arange(low, max(low, high), dtype=np.int64)


def nodes_of(config: Config, stage: int) -> Sequence[int]:
    """Nodes that hold ranks of a stage."""
    first, last = stage * config.tp, (stage + 1) * config.tp - 1
    return range(first // config.gpus_per_node, last // config.gpus_per_node + 1)
