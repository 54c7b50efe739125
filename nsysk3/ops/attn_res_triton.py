"""Attention residual and RMSNorm in one Triton launch: any hidden size and type, any GPU that Triton compiles for.

One program takes whole tokens, one after the other, and holds a token's row in registers: every row is read from
memory once, in an online softmax.  The running sum can be formed on the way (``addend``) and stored to the bank.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsysk3.ops.pytorch import torch


@triton.jit
def _fold(value, score_weight, peak, total, mixed, hidden, eps):
    """One row [BLOCK] (fp32, zero beyond ``hidden``) into the online softmax."""
    score = tl.sum(value * score_weight, 0) * tl.rsqrt(tl.sum(value * value, 0) / hidden + eps)
    higher = tl.maximum(peak, score)
    shrink = tl.exp(peak - higher)
    share = tl.exp(score - higher)
    return higher, total * shrink + share, mixed * shrink + share * value


@triton.jit(do_not_specialize=["rows", "write_row", "tokens"])
def _attn_res_kernel(
    prefix,
    addend,
    new_prefix,
    bank,
    score_weight,
    norm_weight,
    normed,
    tokens,
    rows,
    write_row,
    prefix_stride,
    addend_stride,
    bank_token_stride,
    bank_row_stride,
    eps,
    norm_eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
    WRITES: tl.constexpr,
):
    at = tl.arange(0, BLOCK)
    mask = at < HIDDEN
    query = tl.load(score_weight + at, mask=mask, other=0.0).to(tl.float32)
    for token in tl.range(tl.program_id(0), tokens, tl.num_programs(0)):
        here = tl.cast(
            token, tl.int64
        )  # a bank of 8192 tokens is beyond 2**31 elements from 37 rows on, strided ones sooner
        head = tl.load(prefix + here * prefix_stride + at, mask=mask, other=0.0)
        if HAS_ADDEND:
            more = tl.load(addend + here * addend_stride + at, mask=mask, other=0.0)
            # Rounded before it is scored: what is stored is what every later reader sees.
            head = (head.to(tl.float32) + more.to(tl.float32)).to(new_prefix.dtype.element_ty)
            tl.store(new_prefix + here * HIDDEN + at, head, mask=mask)
        slots = bank + here * bank_token_stride + at
        if WRITES:
            tl.store(slots + tl.cast(write_row, tl.int64) * bank_row_stride, head, mask=mask)
        peak, total, mixed = -float("inf"), 0.0, tl.zeros([BLOCK], tl.float32)
        for row in tl.range(0, rows, num_stages=STAGES):
            value = tl.load(slots + tl.cast(row, tl.int64) * bank_row_stride, mask=mask, other=0.0).to(tl.float32)
            peak, total, mixed = _fold(value, query, peak, total, mixed, HIDDEN, eps)
        peak, total, mixed = _fold(head.to(tl.float32), query, peak, total, mixed, HIDDEN, eps)
        inverse = 1.0 / total
        square = tl.sum(mixed * mixed, 0) * inverse * inverse / HIDDEN
        gain = tl.load(norm_weight + at, mask=mask, other=0.0).to(tl.float32)  # late: registers are what is short
        out = mixed * (inverse * tl.rsqrt(square + norm_eps)) * gain
        tl.store(normed + here * HIDDEN + at, out.to(normed.dtype.element_ty), mask=mask)


def warps_for(block: int) -> int:
    """Warps of a program: 16 columns a thread, so that registers hold a row and what is made of it."""
    return max(1, min(16, block // 512))


def launch(
    prefix: torch.Tensor,
    addend: torch.Tensor | None,
    bank: torch.Tensor,
    rows: int,
    score_weight: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    norm_eps: float,
    write_row: int | None,
    *,
    programs: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normed and the new prefix, both [T, H]; rows of every tensor contiguous.  ``programs``: the grid's size."""
    tokens, hidden = prefix.shape
    normed = prefix.new_empty((tokens, hidden))
    new_prefix = prefix if addend is None else prefix.new_empty((tokens, hidden))
    if tokens == 0:
        return normed, new_prefix
    if programs is None:
        programs = 2 * torch.cuda.get_device_properties(prefix.device).multi_processor_count
    block = triton.next_power_of_2(hidden)
    _attn_res_kernel[(min(programs, tokens),)](
        prefix, prefix if addend is None else addend, new_prefix, bank, score_weight, norm_weight, normed,
        tokens, rows, -1 if write_row is None else write_row,
        prefix.stride(0), 0 if addend is None else addend.stride(0), bank.stride(0), bank.stride(1), eps, norm_eps,
        HIDDEN=hidden, BLOCK=block, STAGES=3, HAS_ADDEND=addend is not None,
        WRITES=write_row is not None, num_warps=warps_for(block),
    )  # fmt: skip
    return normed, new_prefix
