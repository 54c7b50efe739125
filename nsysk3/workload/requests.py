"""What requests leave in the layers of a stage between their micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from nsysk3.ops.pytorch import torch

if TYPE_CHECKING:
    from nsysk3.workload.kda import DeltaState


class Requests:
    """States by request and layer; a layer makes its own when it first sees a request."""

    def __init__(self) -> None:
        self._delta: dict[int, dict[int, DeltaState]] = {}
        self._latents: dict[int, dict[int, torch.Tensor]] = {}

    def delta(self, rid: int, layer: int, empty: Callable[[], DeltaState]) -> DeltaState:
        """A KDA layer's state of a request, to be changed in place; ``empty()`` for a new one."""
        layers = self._delta.setdefault(rid, {})
        if layer not in layers:
            layers[layer] = empty()
        return layers[layer]

    def latents(self, rid: int, layer: int, capacity: int, like: torch.Tensor) -> torch.Tensor:
        """An MLA layer's cache of a request, [capacity, width of ``like``], to be written in place."""
        layers = self._latents.setdefault(rid, {})
        if layer not in layers:
            layers[layer] = like.new_empty((capacity, like.shape[-1]))
        return layers[layer]

    def free(self, rid: int) -> None:
        """Forget a request."""
        self._delta.pop(rid, None)
        self._latents.pop(rid, None)

    def __len__(self) -> int:
        return len(self._delta.keys() | self._latents.keys())
