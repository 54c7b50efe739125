"""Simulate one run: a run directory as ``profile`` would write it, and the truth beside it."""

from __future__ import annotations

import json
import tempfile
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nsysk3.errors import InputError, MissingToolError
from nsysk3.run.manifest import MANIFEST_NAME
from nsysk3.simulate.batch import Batch
from nsysk3.simulate.bench import write_bench
from nsysk3.simulate.clocks import EPOCH_NS, node_clocks
from nsysk3.simulate.config import Config
from nsysk3.simulate.describe import manifest, server_log
from nsysk3.simulate.faults import apply_faults, compute_factors, cut_window, recording_faults
from nsysk3.simulate.meta import write_meta
from nsysk3.simulate.node import Node, Written, nodes_of, rank_rows
from nsysk3.simulate.schedule import Schedule, last_kept_layer
from nsysk3.simulate.schema import version_of
from nsysk3.simulate.truth import Truth

Progress = Callable[[str], None]
Ints = NDArray[np.int64]

_NEVER = 2**62
_AFTER_LAST_NS = 20_000_000
# Batches a node that may wait for their file: enough to keep the threads busy, few enough for memory.
_QUEUED = 3


@dataclass(frozen=True)
class Made:
    """What was written: the run directory, how many kernels happened and were recorded, and rows in all files."""

    directory: Path
    kernels: int
    recorded: int
    rows: int


def simulate(config: Config, out: str | Path, *, force: bool = False, progress: Progress | None = None) -> Made:
    """Write a simulated run to a new directory ``out``.

    The directory appears complete or not at all; ``force`` replaces one that an earlier simulation made.  Memory does
    not grow with the length of the run.  Raises InputError for what cannot be, and when ``out`` is taken.
    """
    target = Path(out)
    if target.exists() and not (force and (target / "truth.json").is_file()):
        way = "pass --force to replace it" if (target / "truth.json").is_file() else "choose another --out"
        raise InputError(f"{target} exists: {way}")
    config = apply_faults(config)
    version = version_of(config.schema)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as folder:
            made = _write(config, version, Path(folder) / "run", progress)
            if target.exists():
                target.rename(Path(folder) / "old")
            made.directory.rename(target)
    except OSError as error:
        raise MissingToolError(f"{target}: cannot be written ({error.strerror or error})") from error
    return replace(made, directory=target)


def _write(config: Config, version: str, folder: Path, progress: Progress | None) -> Made:
    rngs = [np.random.default_rng(seed) for seed in np.random.SeedSequence(config.seed).spawn(4)]
    clocks = node_clocks(config.nodes, config.clocks, rngs[0])
    stops = np.full(config.world, _NEVER, np.int64)
    cut = cut_window(config)
    ends = np.full(config.nodes, _NEVER, np.int64)
    if cut is not None:
        last = max(int(batch.end.max()) for batch in _schedule(config).batches())
        ends[cut[0]] = config.idle_before_ns + round(cut[1] * (last - config.idle_before_ns))
    faulty = recording_faults(config)
    nodes = []
    for number, host in enumerate(config.hosts()):
        place = folder / "nodes" / host
        place.mkdir(parents=True)
        begun = int(rngs[1].uniform(0, 0.5 * config.idle_before_ns))
        nodes.append(
            Node(config, version, number, place / "trace.sqlite", clocks[number], (begun, int(ends[number])), stops,
                 faulty, np.random.default_rng((config.seed, number)))
        )  # fmt: skip
    truth = Truth(folder / "truth.parquet", config)
    last = _stream(config, nodes, truth, stops, progress)
    truth.close()
    for node in nodes:
        if node.window[1] == _NEVER:
            node.window = (node.window[0], last + _AFTER_LAST_NS + int(rngs[2].uniform(0, 5_000_000)))
        write_meta(node, version)
        node.database.close()
    _describe(config, version, folder, nodes, truth, last)
    return Made(folder, truth.kernels, truth.recorded, sum(node.database.rows for node in nodes))


def _schedule(config: Config) -> Schedule:
    return Schedule(config, np.random.default_rng((config.seed, 1)), factors=compute_factors(config))


def _stream(config: Config, nodes: list[Node], truth: Truth, stops: Ints, progress: Progress | None) -> int:
    """Write every batch to the nodes that hold its ranks, each file by a thread of its own, the truth by this one."""
    last = 0
    with ExitStack() as stack:
        pools = [stack.enter_context(ThreadPoolExecutor(1)) for _ in nodes]
        waiting: deque[tuple[Future[Written], Node, Batch, slice, Ints]] = deque()

        def settle(most: int) -> None:
            while len(waiting) > most:
                done, node, batch, rows, ranks = waiting.popleft()
                truth.add(node, batch, rows, ranks, done.result())

        for batch in _schedule(config).batches():
            last = max(last, int(batch.end.max()))
            if config.cut_layers and batch.body and batch.forward == config.forwards - 1:
                _cut(config, batch, stops)
            for number in nodes_of(config, batch.stage):
                rows, ranks = rank_rows(config, batch.stage, number)
                done = pools[number].submit(nodes[number].add, batch, rows, ranks)
                waiting.append((done, nodes[number], batch, rows, ranks))
            settle(_QUEUED * len(nodes))
            if progress and batch.body and batch.stage == 0:
                progress(f"simulating micro-batch {batch.forward + 1} of {config.forwards}")
        settle(0)
    return last


def _cut(config: Config, batch: Batch, stops: Ints) -> None:
    """End the records of a stage's ranks where the layers begin that were in flight when the capture stopped."""
    lost = np.flatnonzero(batch.slots.layer >= last_kept_layer(config, batch.stage))
    ranks = batch.stage * config.tp + np.arange(config.tp)
    stops[ranks] = batch.start[:, lost[0]]


def _describe(config: Config, version: str, folder: Path, nodes: list[Node], truth: Truth, last: int) -> None:
    """run.json, truth.json, the benchmark's lines and the server's log."""
    written = manifest(config, version, last)
    (folder / MANIFEST_NAME).write_text(written.model_dump_json(indent=1) + "\n", "utf-8")
    write_bench(config, folder / "bench", last)
    for node in nodes:
        (folder / "nodes" / config.hosts()[node.number] / "server.log").write_text(server_log(config), "utf-8")
    facts: dict[str, Any] = {
        "simulated": config.simulated,
        "epoch_ns": EPOCH_NS,
        "clocks": [
            {"host": host, "offset_ns": node.clock.offset_ns, "drift_ppm": node.clock.drift_ppm,
             "wander_ns": node.clock.wander_ns, "capture_ns": list(node.window)}
            for host, node in zip(config.hosts(), nodes, strict=True)
        ],
        "kernels": truth.kernels, "recorded": truth.recorded, "end_ns": last,
        "ranks": truth.ranks(), "config": asdict(config),
    }  # fmt: skip
    (folder / "truth.json").write_text(json.dumps(facts, indent=1) + "\n", "utf-8")
