"""The CUDA kernels for Hopper (K0, K1, K3) on raw tensors and peer addresses; ``Workspace`` holds what calls share.

Rows are bf16 of HIDDEN elements, contiguous; ``bank`` is [T, NB, HIDDEN] with any strides over T and NB;
``score_weight`` is fp32, ``norm_weight`` bf16.  Nothing here uses NVLink multicast.  Every wait inside a kernel is
bounded by SPIN_S: a peer that never comes costs wrong numbers and an error word, not a hung GPU.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from nsysk3.errors import InputError, MissingToolError, RunFailedError
from nsysk3.ops.cuda_abi import MAX_PEERS, RingParams
from nsysk3.ops.cuda_build import BuildError, load

HIDDEN = 7168
ROW_BYTES = HIDDEN * 2
MAX_ROWS = 8
SPIN_S = 2.0
_CLOCK_HZ = 1.98e9
LOCAL, PULL, PUSH, GATHER = range(4)
MANY = 1  # the form of LOCAL that is faster for many tokens with several bank rows


@cache
def available() -> str | None:
    """None where the kernels can run on the current device, else why not.  Builds them at the first call."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    if major != 9:
        return f"the kernels are for compute capability 9.0, this device has {major}.{minor}"
    try:
        load()
    except BuildError as error:
        return str(error)
    return None


def library() -> ctypes.CDLL:
    """The built kernels; MissingToolError where there are none."""
    try:
        return load()
    except BuildError as error:
        raise MissingToolError(str(error)) from error


def check_launch(code: int) -> None:
    """RunFailedError for a CUDA error code."""
    if code:
        raise RunFailedError(f"kernel launch failed: {library().k3_error(code).decode()}")


@cache
def multiprocessors(device: int) -> int:
    """Of the device with this index."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def address(tensor: torch.Tensor | None) -> int | None:
    """Of the first element; None for None.  InputError unless it lies on 16 bytes."""
    if tensor is None:
        return None
    pointer = int(tensor.data_ptr())
    if pointer % 16:
        raise InputError("the CUDA kernels need tensors that start on 16 bytes")
    return pointer


def fill_common(
    params: RingParams,
    *,
    tokens: int,
    residual: torch.Tensor | None,
    prefix_out: torch.Tensor | None,
    bank: torch.Tensor,
    rows: int,
    score_weight: torch.Tensor,
    norm_weight: torch.Tensor,
    out: torch.Tensor | None,
    eps: float,
    write_row: int | None,
) -> None:
    """What all kinds of the kernel take in the same way, checked."""
    if bank.shape[-1] != HIDDEN or bank.stride(-1) != 1 or bank.stride(0) % 8 or bank.stride(1) % 8:
        raise InputError(f"the bank must be [tokens, slots, {HIDDEN}] with contiguous rows")
    if not 0 <= rows <= min(MAX_ROWS, bank.shape[1]) or bank.shape[0] < tokens:
        raise InputError(f"{rows} rows of a bank of shape {tuple(bank.shape)} for {tokens} tokens")
    if write_row is not None and not rows <= write_row < bank.shape[1]:
        raise InputError(f"bank row {write_row} cannot be written while {rows} rows of {bank.shape[1]} are read")
    if score_weight.dtype != torch.float32 or norm_weight.dtype != torch.bfloat16 or bank.dtype != torch.bfloat16:
        raise InputError("the CUDA kernels take bf16 rows, an fp32 score weight and a bf16 norm weight")
    for each in (residual, prefix_out, out):
        if each is not None and (each.dtype != torch.bfloat16 or not each.is_contiguous() or each.shape[0] < tokens):
            raise InputError("the CUDA kernels take contiguous bf16 rows, one for each token")
    params.T, params.nvb, params.write_row = tokens, rows, -1 if write_row is None else write_row
    params.residual, params.prefix_out, params.bank = address(residual), address(prefix_out), address(bank)
    params.cw, params.ow, params.out = address(score_weight), address(norm_weight), address(out)
    params.stride_bm, params.stride_bb = bank.stride(0), bank.stride(1)
    params.score_eps = params.out_eps = eps
    params.spin_limit = int(SPIN_S * _CLOCK_HZ)


def launch_ring(params: RingParams, kind: int, device: int, grid: int | None = None, *, variant: int = 0) -> None:
    """Launch the token-pipelined kernel on the current stream."""
    ctas = min(grid or multiprocessors(device), params.T)
    check_launch(library().k3_ring(ctypes.byref(params), ctas, kind, variant, torch.cuda.current_stream().cuda_stream))


def attn_res(
    prefix: torch.Tensor,
    bank: torch.Tensor,
    rows: int,
    score_weight: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    *,
    addend: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    prefix_out: torch.Tensor | None = None,
    write_row: int | None = None,
    variant: int | None = None,
    grid: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K0: attention residual and norm of this GPU's rows in one launch; the bank is read once.

    prefix [T, H] (plus ``addend`` [T, H]) is the head row; (normed [T, H], the new prefix [T, H]) comes back, where
    without an addend the new prefix is ``prefix`` itself.  ``write_row`` also stores it to that bank row.
    ``variant``: of its two forms, None for the one that was measured faster for so many tokens and rows.
    """
    tokens = prefix.shape[0]
    out = torch.empty_like(prefix) if out is None else out
    if addend is not None and prefix_out is None:
        prefix_out = torch.empty_like(prefix)
    if tokens:
        params = RingParams()
        fill_common(
            params,
            tokens=tokens,
            residual=addend,
            prefix_out=None if addend is None else prefix_out,
            bank=bank,
            rows=rows,
            score_weight=score_weight,
            norm_weight=norm_weight,
            out=out,
            eps=eps,
            write_row=write_row,
        )
        params.local[0], params.nlocal = address(prefix), 1
        if variant is None:
            variant = MANY if tokens >= 512 and rows >= 4 else 0
        launch_ring(params, LOCAL, prefix.device.index, grid, variant=variant)
    return out, prefix if prefix_out is None or addend is None else prefix_out


from nsysk3.ops.cuda_workspace import Workspace, workspace_bytes  # noqa: E402

__all__ = ["HIDDEN", "MAX_PEERS", "MAX_ROWS", "Workspace", "attn_res", "available", "workspace_bytes"]
