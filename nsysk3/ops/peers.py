"""What the ranks of a group must agree on before they touch each other's memory."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Any

from nsysk3.ops.pytorch import dist, torch


@dataclass(frozen=True)
class Place:
    """Where one rank runs: its host, and its GPU's name and UUID (empty without one)."""

    host: str
    gpu: str = ""
    uuid: str = ""


def gather(mine: Any, group: dist.ProcessGroup, device: torch.device) -> list[Any]:
    """``mine`` of every rank, in rank order.  Collective."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    if device.type != "cuda":
        dist.all_gather_object(everyone, mine, group=group)
        return everyone
    with torch.cuda.device(device):  # NCCL moves objects through the current device
        dist.all_gather_object(everyone, mine, group=group)
    return everyone


def first_reason(reasons: list[str | None]) -> str | None:
    """Why a group cannot: what all ranks say, or the first rank that says something and its number."""
    if len(set(reasons)) == 1:
        return reasons[0]
    return next(f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason is not None)


def place(device: torch.device) -> Place:
    """This rank's place."""
    if device.type != "cuda":
        return Place(socket.gethostname())
    properties = torch.cuda.get_device_properties(device)
    return Place(socket.gethostname(), properties.name, _uuid(properties))


def no_peer_access(places: list[Place], device: torch.device) -> str | None:
    """Why this rank cannot reach a peer's memory, where that can be asked: a process may not see its peers' GPUs."""
    seen = {_uuid(torch.cuda.get_device_properties(number)): number for number in range(torch.cuda.device_count())}
    mine = torch.cuda.current_device() if device.index is None else device.index
    for each in places:
        other = seen.get(each.uuid)
        if other is not None and other != mine and not torch.cuda.can_device_access_peer(mine, other):
            return f"no peer access between GPUs {mine} and {other}"
    return None


def symmetric_bytes(size: int, group: dist.ProcessGroup, device: torch.device) -> tuple[torch.Tensor, Any]:
    """``size`` bytes of memory that all ranks of ``group`` can reach, and torch's handle of it.  Collective.

    Raises RuntimeError or ImportError where torch cannot do that here.
    """
    # Nothing here uses NVLink multicast, and torch would set it up for every buffer.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    import torch.distributed._symmetric_memory as symmetric_memory

    buffer, failed = None, None
    with torch.cuda.device(device):
        try:
            buffer = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
        except RuntimeError as error:  # no room, most of all
            failed = str(error).splitlines()[0]
        # A rank without a buffer must not leave the others waiting for it in the rendezvous.
        if (reason := first_reason(gather(failed, group, device))) is not None or buffer is None:
            raise RuntimeError(reason)
        return buffer, symmetric_memory.rendezvous(buffer, group)


def _uuid(properties: Any) -> str:
    return str(getattr(properties, "uuid", ""))
