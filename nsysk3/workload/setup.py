"""Everything a rank has: device, groups, stage and engine."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from nsysk3.ops.pytorch import dist, torch
from nsysk3.plugin.rank import Facts
from nsysk3.workload.boundary import Boundary, make_boundary
from nsysk3.workload.devices import choose_device, cuda
from nsysk3.workload.engine import Engine
from nsysk3.workload.groups import make_facts, make_groups
from nsysk3.workload.hub import TOKEN_VARIABLE
from nsysk3.workload.marks import Marks
from nsysk3.workload.model import Stage
from nsysk3.workload.paths import Path, logger, make_path
from nsysk3.workload.weights import Source

if TYPE_CHECKING:
    from nsysk3.workload.rank import Task

# The server's own watchdog comes first: it says what every thread was doing.
_GROUP_EXTRA_S = 120.0


@dataclass(frozen=True)
class Rank:
    """A rank that is set up."""

    facts: Facts
    device: torch.device
    dtype: torch.dtype
    stage: Stage
    path: Path
    boundary: Boundary
    engine: Engine
    marks: Marks
    hub: tuple[str, int]
    token: str

    def description(self) -> dict[str, Any]:
        """What does not change: who it is, what it holds, what it runs on."""
        facts, on_gpu = self.facts, self.device.type == "cuda"
        return {
            "rank": facts.world, "pp": facts.pp, "tp": facts.tp, "ep": facts.ep, "host": socket.gethostname(),
            "pid": os.getpid(), "device": str(self.device),
            "gpu": cuda.get_device_name(self.device) if on_gpu else None,
            "dtype": str(self.dtype).removeprefix("torch."), "torch": torch.__version__,
            "nccl": ".".join(map(str, cuda.nccl.version())) if on_gpu else None,
            "layers": len(self.stage.held), "layer_passes": sum(self.stage.passes),
            "weight_bytes": sum(each.nbytes for each in self.stage.parameters()),
        }  # fmt: skip

    def state(self) -> dict[str, Any]:
        """What does: memory of torch's allocator in bytes (None without a GPU), and sequence parallelism's choices."""
        read = {
            "allocated_bytes": cuda.memory_allocated, "peak_bytes": cuda.max_memory_allocated,
            "reserved_bytes": cuda.memory_reserved,
        }  # fmt: skip
        on_gpu = self.device.type == "cuda"
        memory = {name: function(self.device) if on_gpu else None for name, function in read.items()}
        return {**memory, "sp_decisions": self.path.decisions(), "boundary": self.boundary.transport}

    def close(self) -> None:
        """Finish what was launched and leave the groups."""
        self.engine.close()
        self.path.check()
        dist.destroy_process_group()


def set_up(
    task: Task,
    *,
    on_done: Callable[[int, list[int] | None], None],
    on_stopped: Callable[[], None],
    on_failure: Callable[[Exception], None],
) -> Rank:
    """Make a rank; waits for all others.  Raises MissingToolError where there is no GPU for it."""
    options, began = task.options, time.monotonic()
    facts = make_facts(options, task.rank, task.local)
    if options.nnodes == 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Streams that share a hardware queue would wait for each other's receives.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    device = choose_device(options, task.local)
    distributed: Any = dist
    store = distributed.TCPStore(
        *task.store, world_size=options.world_size, is_master=task.rank == 0, wait_for_workers=False,
        timeout=timedelta(seconds=options.dist_timeout), master_listen_fd=_own(task.store_fd),
    )  # fmt: skip
    hub, token = _meet(store, task)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=distributed.PrefixStore("world", store), rank=task.rank, world_size=options.world_size,
        timeout=timedelta(seconds=options.dist_timeout),
    )  # fmt: skip
    groups = make_groups(facts, device, options.watchdog_timeout + _GROUP_EXTRA_S)
    shape, dtype = options.shape(), torch.bfloat16 if device.type == "cuda" else torch.float32
    stage = Stage(options, shape, facts, Source(options.random_seed, device, dtype), groups.tp)
    path = make_path(options, shape, groups.tp, device)
    marks = Marks(facts, stage, device, groups.tp_host, options.depth, on_stopped)
    boundary = make_boundary(options, facts, groups, path, shape, torch.empty(0, dtype=dtype, device=device))
    engine = Engine(options, facts, stage, path, boundary, groups, device, marks, on_done, on_failure)
    rank = Rank(facts, device, dtype, stage, path, boundary, engine, marks, hub, token)
    held, weights = stage.held, rank.description()["weight_bytes"] / (1 << 30)
    logger.info(
        "layers %d-%d, %.2f GiB of weights on %s, in %.1f s",
        held.start, held.stop - 1, weights, device, time.monotonic() - began,
    )  # fmt: skip
    return rank


def _own(inherited: int | None) -> int | None:
    """A duplicate that torch may close, of the socket that the launcher listens on."""
    return None if inherited is None else os.dup(inherited)


def _meet(store: Any, task: Task) -> tuple[tuple[str, int], str]:
    """Where the first node's launcher listens, and its secret: known there, read from the store elsewhere."""
    if task.hub is not None:
        token = os.environ.pop(TOKEN_VARIABLE)
        if task.rank == 0:
            store.set("hub", f"{task.hub[0]} {task.hub[1]} {token}")
        return task.hub, token
    host, port, token = store.get("hub").decode().split(" ")
    return (host, int(port)), token
