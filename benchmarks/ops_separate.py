"""The shape of SGLang's path on Hopper: score, mix and norm as launches of their own, the bank read twice."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional
import triton
import triton.language as tl

from nsysk3.ops.cuda import HIDDEN


@triton.jit
def _score(prefix, bank, cw, out, rows, stride_m, stride_b, eps, H: tl.constexpr, B: tl.constexpr):  # noqa: ANN001, ANN202, N803
    t = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1)
    squares = 0.0
    product = 0.0
    for h in tl.static_range(0, H, B):
        o = h + tl.arange(0, B)
        if j < rows:
            v = tl.load(bank + t * stride_m + j * stride_b + o).to(tl.float32)
        else:
            v = tl.load(prefix + t * H + o).to(tl.float32)
        squares += tl.sum(v * v)
        product += tl.sum(v * tl.load(cw + o))
    tl.store(out + t * 16 + j, product / tl.sqrt(squares / H + eps))


@triton.jit
def _mix(prefix, bank, scores, out, rows, stride_m, stride_b, H: tl.constexpr, B: tl.constexpr):  # noqa: ANN001, ANN202, N803
    t = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * B + tl.arange(0, B)
    r = tl.arange(0, 16)
    s = tl.load(scores + t * 16 + r, mask=r <= rows, other=float("-inf"))
    p = tl.exp(s - tl.max(s, 0))
    p = p / tl.sum(p, 0)
    acc = tl.zeros([B], tl.float32)
    for j in range(rows + 1):
        if j < rows:
            v = tl.load(bank + t * stride_m + j * stride_b + o).to(tl.float32)
        else:
            v = tl.load(prefix + t * H + o).to(tl.float32)
        acc += tl.sum(tl.where(r == j, p, 0.0), 0) * v
    tl.store(out + t * H + o, acc.to(out.dtype.element_ty))


def attn_res_separately(prefix: torch.Tensor, bank: torch.Tensor, rows: int, cw: Any, ow: Any, eps: float) -> Any:
    tokens = prefix.shape[0]
    scores = torch.empty(tokens, 16, device=prefix.device)
    mixed = torch.empty_like(prefix)
    strides = bank.stride(0), bank.stride(1)
    _score[(tokens, rows + 1)](prefix, bank, cw, scores, rows, *strides, eps, H=HIDDEN, B=1024, num_warps=8)
    _mix[(tokens, 7)](prefix, bank, scores, mixed, rows, *strides, H=HIDDEN, B=1024, num_warps=4)
    return functional.rms_norm(mixed, (HIDDEN,), ow, eps)
