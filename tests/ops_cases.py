"""Random inputs of the sequence-parallel operations, and how far a result may lie from the truth."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

BF16 = torch.bfloat16
# Relative to the float64 truth on the same bfloat16 inputs: of the whole, and of the worst row.
NORMED, NORMED_ROW = 4e-3, 6e-3
PREFIX = 1e-3  # rounded once, so a tie apart at most
LINEAR = 8e-3  # with partials rounded to be sent


@dataclass
class Case:
    """One batch: ``partials`` of all ranks [M, H], ``prefix`` [M, H], ``bank`` [M, NB, H], the two weights [H]."""

    partials: list[torch.Tensor]
    prefix: torch.Tensor
    bank: torch.Tensor
    rows: int
    score_weight: torch.Tensor
    norm_weight: torch.Tensor
    eps: float = 1e-6

    @property
    def weights(self) -> tuple[torch.Tensor, torch.Tensor, float]:
        return self.score_weight, self.norm_weight, self.eps


def make_case(
    tokens: int,
    world: int,
    hidden: int,
    rows: int,
    *,
    seed: int,
    slots: int | None = None,
    scale: float = 1.0,
    slot_major: bool = False,
    dtype: torch.dtype = BF16,
    device: str | torch.device = "cpu",
) -> Case:
    """Fresh random inputs.  Slots that hold no valid row are NaN: whoever reads one shows it."""
    g = torch.Generator().manual_seed(seed)

    def random(*shape: int, by: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=g) * by

    slots = rows + 1 if slots is None else slots
    shape = (slots, tokens, hidden) if slot_major else (tokens, slots, hidden)
    bank = torch.full(shape, math.nan, dtype=dtype, device=device)
    bank = bank.transpose(0, 1) if slot_major else bank
    for row in range(rows):  # rows of different sizes, so that none can stand for another
        bank[:, row] = random(tokens, hidden, by=scale * (0.3 + row)).to(device, dtype)
    return Case(
        [random(tokens, hidden, by=scale * (0.5 + 0.2 * rank)).to(device, dtype) for rank in range(world)],
        random(tokens, hidden, by=1.5 * scale).to(device, dtype),
        bank,
        rows,
        random(hidden, by=3 / math.sqrt(hidden)).to(device),
        (random(hidden, by=0.2) + 1).to(device, dtype),
    )


def error(out: torch.Tensor, truth: torch.Tensor) -> float:
    """Relative error in the norm; infinite where anything is not finite."""
    out, truth = out.double(), truth.double()
    if not bool(torch.isfinite(out).all()):
        return math.inf
    return float((out - truth).norm() / truth.norm()) if out.numel() else 0.0


def row_error(out: torch.Tensor, truth: torch.Tensor) -> float:
    """Relative error of the worst row."""
    out, truth = out.double(), truth.double()
    if not bool(torch.isfinite(out).all()):
        return math.inf
    return float(((out - truth).norm(dim=-1) / truth.norm(dim=-1).clamp_min(1e-300)).max()) if len(out) else 0.0


def assert_normed(out: torch.Tensor, truth: torch.Tensor, within: float = 1.0) -> None:
    """``out`` is ``truth`` with its output rounded once, and a little more."""
    assert error(out, truth) < NORMED * within
    assert row_error(out, truth) < NORMED_ROW * within
