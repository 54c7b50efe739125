"""Which rank runs where: SGLang's rules for stages, ranks, GPUs and layers."""

from __future__ import annotations

from collections.abc import Sequence

from nsysk3.errors import InputError
from nsysk3.run.manifest import RankEntry

# More is a slip of the keyboard, and planning it would take for ever.
_MOST_RANKS = 65_536


def default_ep(tp: int) -> int:
    """Expert parallelism where none was asked for: min(4, TP), or the next smaller number that divides TP."""
    return next(size for size in (4, 3, 2, 1) if tp % size == 0)


def check_layout(pp: int, tp: int, ep: int, nodes: int) -> None:
    """Raises InputError where PP, TP, EP and the number of hosts cannot go together."""
    for name, size in (("--pp", pp), ("--tp", tp), ("--ep", ep)):
        if size < 1:
            raise InputError(f"{name} {size}: must be 1 or more")
    if pp * tp > _MOST_RANKS:
        raise InputError(
            f"PP {pp} x TP {tp} = {pp * tp:,} GPUs are more than any server has ranks for ({_MOST_RANKS:,})"
        )
    if tp % ep:
        raise InputError(f"--ep {ep}: does not divide TP {tp} (SGLang: TP % EP == 0); try --ep {default_ep(tp)}")
    if pp * tp % nodes:
        raise InputError(f"PP {pp} x TP {tp} = {pp * tp} GPUs cannot be spread evenly over {nodes} hosts")
    if pp % nodes and nodes % pp:
        raise InputError(
            f"PP {pp} on {nodes} hosts: SGLang puts whole stages on a host or whole hosts under a stage, so one of the "
            "two numbers must divide the other"
        )


def place_ranks(
    hosts: Sequence[str], pp: int, tp: int, ep: int, *, base_gpu: int = 0, gpu_step: int = 1
) -> tuple[tuple[RankEntry, ...], ...]:
    """The ranks of each host, where SGLang puts them; ``base_gpu``, ``gpu_step``: its --base-gpu-id, --gpu-id-step.

    A stage's ranks are consecutive, a host's too: ``world_rank = stage x TP + rank in the stage``.
    """
    nodes = len(hosts)
    check_layout(pp, tp, ep, nodes)
    stages_a_host = max(pp // nodes, 1)
    hosts_a_stage = max(nodes // pp, 1)
    tp_a_host = tp // hosts_a_stage
    placed = []
    for node, host in enumerate(hosts):
        first_stage = stages_a_host * (node // hosts_a_stage)
        first_tp = tp_a_host * (node % hosts_a_stage)
        placed.append(
            tuple(
                RankEntry(
                    world_rank=stage * tp + rank,
                    host=host,
                    device=base_gpu + stage % stages_a_host * tp_a_host + rank % tp_a_host * gpu_step,
                    pp=stage,
                    tp=rank,
                    ep=rank // (tp // ep),
                )
                for stage in range(first_stage, first_stage + stages_a_host)
                for rank in range(first_tp, first_tp + tp_a_host)
            )
        )
    devices = [entry.device for entry in placed[0]]
    if len(set(devices)) < len(devices):
        raise InputError(f"--gpu-id-step {gpu_step}: two ranks of a host would share a GPU; leave it out with PP > 1")
    return tuple(placed)


def stage_layers(layers: int, pp: int, partition: str | None = None) -> tuple[range, ...]:
    """The layers of each stage; the last ones have one more where they do not come out even.

    ``partition``: SGLANG_PP_LAYER_PARTITION, numbers of layers with commas between.
    """
    if layers < pp:
        raise InputError(f"--pp {pp}: the model has only {layers} layers")
    sizes = [layers // pp + (stage >= pp - layers % pp) for stage in range(pp)]
    if partition is not None and pp > 1:
        try:
            sizes = [int(part) for part in partition.split(",")]
        except ValueError:
            sizes = []
        if len(sizes) != pp or sum(sizes) != layers or min(sizes) < 1:
            raise InputError(
                f"SGLANG_PP_LAYER_PARTITION={partition}: not {pp} numbers of layers that add up to {layers}"
            )
    ends = [sum(sizes[: stage + 1]) for stage in range(pp)]
    return tuple(range(end - size, end) for end, size in zip(ends, sizes, strict=True))
