"""Reads of the attention residual as SGLang's unfused path does them: score, mix and norm, one launch each.

What nsysk3.ops does in one launch is measured against this.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.nn import functional

from nsysk3.ops import reference
from nsysk3.ops.pytorch import torch

# normed [T, H] of prefix [T, H], bank [T, NB, H], rows, score_weight [H], norm_weight [H], eps, write_row
Read = Callable[
    [torch.Tensor, torch.Tensor, int, torch.Tensor, torch.Tensor, float, int | None],
    torch.Tensor,
]


def read_separately(
    prefix: torch.Tensor,
    bank: torch.Tensor,
    rows: int,
    score_weight: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    write_row: int | None = None,
) -> torch.Tensor:
    """Normed [T, H]; see nsysk3.ops.reference for the mathematics and the shapes.

    ``write_row``: the prefix is also copied to that row of the bank.
    """
    if write_row is not None:
        reference.write_bank(bank, write_row, prefix)
    mixed = prefix
    if rows and prefix.is_cuda:
        from nsysk3.workload.attn_res_triton import mix

        mixed = mix(prefix, bank, rows, score_weight, eps)
    elif rows:
        mixed = reference.attn_res(prefix, bank, rows, score_weight, None, eps, acc=torch.float32).to(prefix.dtype)
    return functional.rms_norm(mixed, norm_weight.shape, norm_weight, eps)


def choose_read(kind: str) -> Read:
    """``separate``, or ``fused``: nsysk3.ops' one launch."""
    if kind == "separate":
        return read_separately
    from nsysk3.ops.attn_res import attn_res_norm

    return attn_res_norm
