"""Who this process is among the server's ranks, from SGLang's and torch's own state."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Facts:
    """Ranks and sizes of one scheduler process."""

    world: int = 0
    world_size: int = 1
    pp: int = 0
    pp_size: int = 1
    tp: int = 0
    tp_size: int = 1
    ep: int = 0
    ep_size: int = 1
    device: int = 0
    nnodes: int = 1
    tp_ranks: tuple[int, ...] = ()
    pp_ranks: tuple[int, ...] = ()
    # Every process sees one GPU, its own first: each then opens and closes the capture.
    each_captures: bool = False

    @property
    def stages_a_node(self) -> int:
        """SGLang's own split: consecutive stages share a node, or a stage spans nodes."""
        return max(self.pp_size // self.nnodes, 1)

    @property
    def in_last_stage_of_node(self) -> bool:
        """In the stage that finishes any micro-batch last on this node."""
        return self.pp % self.stages_a_node == self.stages_a_node - 1

    @property
    def first_of_stage_on_node(self) -> bool:
        """The one process of its stage that acts for the stage on this node."""
        a_node = max(self.tp_size // max(self.nnodes // self.pp_size, 1), 1)
        return self.tp % a_node == 0

    def text(self, extra: str) -> str:
        """The rank mark.  Keys other than world, pp, tp and ep are for people and for proof."""
        pairs = [
            ("world", self.world, self.world_size),
            ("pp", self.pp, self.pp_size),
            ("tp", self.tp, self.tp_size),
            ("ep", self.ep, self.ep_size),
        ]
        said = " ".join(f"{key}={rank}/{size}" for key, rank, size in pairs)
        groups = "".join(
            f" {name}={','.join(map(str, ranks))}"
            for name, ranks in (("tp_ranks", self.tp_ranks), ("pp_ranks", self.pp_ranks))
            if ranks
        )
        return f"nsysk3.rank {said} device={self.device}{groups} {extra}"


def read_facts() -> Facts:
    """Facts of this process.  Raises when torch.distributed or SGLang cannot tell them (yet)."""
    import torch

    parallel = importlib.import_module("sglang.srt.runtime_context").get_parallel()
    groups = importlib.import_module("sglang.srt.distributed.parallel_state")
    distributed = torch.distributed
    started = distributed.is_available() and distributed.is_initialized()
    return Facts(
        world=distributed.get_rank() if started else 0,
        world_size=distributed.get_world_size() if started else 1,
        pp=int(parallel.pp_rank),
        pp_size=max(int(parallel.pp_size), 1),
        tp=int(parallel.tp_rank),
        tp_size=max(int(parallel.tp_size), 1),
        ep=int(_or(lambda: parallel.moe_ep_rank, 0)),
        ep_size=int(_or(lambda: parallel.moe_ep_size, 1)),
        device=torch.cuda.current_device(),
        nnodes=max(int(_or(lambda: parallel.nnodes, 1)), 1),
        tp_ranks=tuple(_or(lambda: groups.get_tp_group().ranks, ())),
        pp_ranks=tuple(_or(lambda: groups.get_pp_group().ranks, ())),
        each_captures=_or(_one_gpu_a_process, False),
    )


def _one_gpu_a_process() -> bool:
    environment = importlib.import_module("sglang.srt.environ").envs
    return bool(environment.SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS.get())


def sglang_version() -> str:
    """As the loaded package says it."""
    return str(getattr(sys.modules.get("sglang"), "__version__", "unknown"))


def _or(read: Callable[[], Any], default: Any) -> Any:
    """What ``read`` says, or ``default``: names that only newer or older versions have."""
    try:
        return read()
    except Exception:
        return default
