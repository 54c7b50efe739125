"""Score and mix of the attention residual in two Triton launches, the bank read by each."""

from __future__ import annotations

import triton
import triton.language as tl

from nsysk3.ops.pytorch import torch


@triton.jit
def _score_kernel(
    prefix, bank, score_weight, scores, token_stride, row_stride, eps, HIDDEN: tl.constexpr, BLOCK: tl.constexpr
):
    """One program a token and row: scores [T, rows + 1], the prefix last."""
    token, row, rows = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.num_programs(1) - 1
    at = tl.arange(0, BLOCK)
    mask = at < HIDDEN
    source = bank + token * token_stride + row * row_stride if row < rows else prefix + token * HIDDEN
    value = tl.load(source + at, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(score_weight + at, mask=mask, other=0.0).to(tl.float32)
    score = tl.sum(value * weight, 0) * tl.rsqrt(tl.sum(value * value, 0) / HIDDEN + eps)
    tl.store(scores + token * (rows + 1) + row, score)


@triton.jit
def _combine_kernel(
    prefix,
    bank,
    scores,
    mixed,
    token_stride,
    row_stride,
    rows,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """One program a token and block of columns."""
    token, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < HIDDEN
    slots = tl.arange(0, SLOTS)
    every = tl.load(scores + token * (rows + 1) + slots, mask=slots <= rows, other=-float("inf"))
    peak = tl.max(every, 0)
    total = tl.sum(tl.exp(every - peak), 0)
    head = tl.load(prefix + token * HIDDEN + at, mask=mask, other=0.0).to(tl.float32)
    mix = head * (tl.exp(tl.load(scores + token * (rows + 1) + rows) - peak) / total)
    for row in range(rows):
        share = tl.exp(tl.load(scores + token * (rows + 1) + row) - peak) / total
        value = tl.load(bank + token * token_stride + tl.cast(row, tl.int64) * row_stride + at, mask=mask, other=0.0)
        mix += share * value.to(tl.float32)
    tl.store(mixed + token * HIDDEN + at, mix.to(mixed.dtype.element_ty), mask=mask)


def mix(prefix: torch.Tensor, bank: torch.Tensor, rows: int, score_weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The mixed rows [T, H] of prefix [T, H] and the first ``rows`` of bank [T, NB, H]; see nsysk3.ops.reference."""
    tokens, hidden = prefix.shape
    prefix = prefix.contiguous()
    scores = torch.empty((tokens, rows + 1), dtype=torch.float32, device=prefix.device)
    mixed = torch.empty_like(prefix)
    block = 1024
    _score_kernel[(tokens, rows + 1)](
        prefix, bank, score_weight, scores, bank.stride(0), bank.stride(1), eps,
        HIDDEN=hidden, BLOCK=triton.next_power_of_2(hidden), num_warps=8,
    )  # fmt: skip
    _combine_kernel[(tokens, triton.cdiv(hidden, block))](
        prefix, bank, scores, mixed, bank.stride(0), bank.stride(1), rows,
        HIDDEN=hidden, BLOCK=block, SLOTS=16, num_warps=4,
    )  # fmt: skip
    return mixed
