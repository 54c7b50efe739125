"""Random weights that are the same in every layout, and the linear layers that share them out."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from torch import nn
from torch.nn import functional

from nsysk3.ops.pytorch import torch


@dataclass(frozen=True)
class Source:
    """Makes weights by name: a rank makes the whole tensor and keeps its share, so that shares fit together."""

    seed: int
    device: torch.device
    dtype: torch.dtype

    def normal(self, name: str, shape: tuple[int, ...], scale: float, mean: float = 0.0) -> torch.Tensor:
        """The whole tensor of a name, normal with deviation ``scale``."""
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        generator = torch.Generator(self.device).manual_seed(int.from_bytes(digest[:7], "big"))
        values = torch.empty(shape, dtype=self.dtype, device=self.device)
        return values.normal_(mean, scale, generator=generator)

    def matrix(self, name: str, out: int, into: int) -> torch.Tensor:
        """Weight [out, into] of a linear layer that keeps the size of its input."""
        return self.normal(name, (out, into), into**-0.5)

    def gains(self, name: str, size: int) -> torch.Tensor:
        """Weight [size] of a norm: about one."""
        return self.normal(name, (size,), 0.1, mean=1.0)


def frozen(values: torch.Tensor) -> nn.Parameter:
    """A parameter that owns its memory: a share of a larger tensor would keep all of it."""
    own = values if values.is_contiguous() and values.untyped_storage().nbytes() == values.nbytes else values.clone()
    return nn.Parameter(own.contiguous(), requires_grad=False)


class Linear(nn.Module):
    """x [..., into] times a weight [out, into]."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = frozen(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., out]."""
        return functional.linear(x, self.weight)


class Norm(nn.Module):
    """RMSNorm over the last axis."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = frozen(weight), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same shape."""
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
