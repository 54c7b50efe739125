"""Who a rank is, and the process groups it talks in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from nsysk3.ops.pytorch import dist, torch
from nsysk3.plugin.rank import Facts
from nsysk3.workload.options import Options


def make_facts(options: Options, rank: int, local: int) -> Facts:
    """Ranks of a process, laid out as SGLang does: tensor-parallel groups contiguous, stages strided.

    ``local`` numbers the node's processes, and so its GPUs.
    """
    tp, pp, ep = options.tp_size, options.pp_size, options.ep_size
    stage, tp_rank = divmod(rank, tp)
    return Facts(
        world=rank, world_size=tp * pp, pp=stage, pp_size=pp, tp=tp_rank, tp_size=tp,
        ep=tp_rank // (tp // ep), ep_size=ep, device=local, nnodes=options.nnodes,
        tp_ranks=tuple(range(stage * tp, (stage + 1) * tp)), pp_ranks=tuple(range(tp_rank, tp * pp, tp)),
    )  # fmt: skip


@dataclass(frozen=True)
class Groups:
    """The groups of one rank; None where it would be alone in one.

    Each has communicators of its own: a boundary's gather must not wait for an AllReduce of the layers, nor a
    micro-batch that leaves for tokens that come back.
    """

    tp: dist.ProcessGroup | None
    tp_boundary: dist.ProcessGroup | None
    tp_host: dist.ProcessGroup | None  # gloo
    pipeline: dist.ProcessGroup | None
    results: dist.ProcessGroup | None


def make_groups(facts: Facts, device: torch.device, timeout_s: float) -> Groups:
    """Make the groups; collective over all ranks of the default group."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    tp, pp = facts.tp_size, facts.pp_size
    timeout = timedelta(seconds=timeout_s)
    stages = [[stage * tp + rank for rank in range(tp)] for stage in range(pp)]
    columns = [[stage * tp + rank for stage in range(pp)] for rank in range(tp)]

    def mine(members: list[list[int]], number: int, kind: str, wanted: bool) -> dist.ProcessGroup | None:
        if not wanted:
            return None
        # torch wants every rank to make every group, in one order.
        made: list[dist.ProcessGroup] = [dist.new_group(each, backend=kind, timeout=timeout) for each in members]
        return made[number]

    return Groups(
        tp=mine(stages, facts.pp, backend, tp > 1),
        tp_boundary=mine(stages, facts.pp, backend, tp > 1 and pp > 1),
        tp_host=mine(stages, facts.pp, "gloo", tp > 1),
        pipeline=mine(columns, facts.tp, backend, pp > 1),
        results=mine(columns, facts.tp, backend, pp > 1),
    )


def split(size: int, rank: int, parts: int) -> slice:
    """Part ``rank`` of ``parts`` equal ones of ``size``."""
    each = size // parts
    return slice(rank * each, (rank + 1) * each)


# Torch 2.13 renames it, and warns at every call of the old name.
all_gather: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
