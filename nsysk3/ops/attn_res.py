"""K0: attention residual and RMSNorm in one launch, each bank row read once; on any GPU, and on the CPU for tests.

Three implementations, the same result within a rounding of the output: the CUDA kernel (sm_90, H = 7168, bfloat16),
Triton (any GPU, size and type), PyTorch (anything; several launches).
"""

from __future__ import annotations

from collections.abc import MutableMapping
from functools import cache
from importlib.util import find_spec
from typing import Literal

from nsysk3.errors import InputError
from nsysk3.ops import reference
from nsysk3.ops.pytorch import WeakTensorKeyDictionary, torch

Backend = Literal["auto", "cuda", "triton", "torch"]
# Tokens at a time in PyTorch: bounds what it holds in float32 for 9 rows of 7168 to 130 MB.
_CHUNK = 512


def attn_res_norm(
    prefix: torch.Tensor,
    bank: torch.Tensor,
    rows: int,
    score_weight: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    write_row: int | None = None,
    *,
    norm_eps: float | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Normed [T, H] of prefix [T, H] and the first ``rows`` of bank [T, NB, H]; see nsysk3.ops.reference.

    ``score_weight`` [H] may be float32; ``rows`` may be 0.  ``write_row`` stores prefix to that bank slot in the same
    launch.  ``norm_eps``: of the last RMSNorm, where it is not ``eps``.
    """
    return _run(prefix, None, bank, rows, score_weight, norm_weight, eps, norm_eps, write_row, backend)[0]


def attn_res_add_norm(
    prefix: torch.Tensor,
    addend: torch.Tensor,
    bank: torch.Tensor,
    rows: int,
    score_weight: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    write_row: int | None = None,
    *,
    norm_eps: float | None = None,
    backend: Backend = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for the sum of ``prefix`` and ``addend`` [T, H]: normed and that sum, rounded once, both [T, H]."""
    return _run(prefix, addend, bank, rows, score_weight, norm_weight, eps, norm_eps, write_row, backend)


def backend_for(prefix: torch.Tensor) -> Backend:
    """The implementation that ``auto`` takes for tensors like ``prefix``."""
    if not prefix.is_cuda:
        return "torch"
    if prefix.shape[1] == reference.HIDDEN and prefix.dtype == torch.bfloat16 and cuda_unavailable() is None:
        return "cuda"
    return "triton" if find_spec("triton") else "torch"


@cache
def cuda_unavailable() -> str | None:
    """Why the CUDA kernels cannot run in this process, None when they can."""
    try:
        from nsysk3.ops import cuda
    except ImportError as error:  # beside SGLang, nsysk3 is installed without its requirements
        return f"the CUDA kernels need more than is installed: {error}"
    reason: str | None = cuda.available()
    return reason


def _run(
    prefix: torch.Tensor,
    addend: torch.Tensor | None,
    bank: torch.Tensor,
    rows: int,
    score_weight: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    norm_eps: float | None,
    write_row: int | None,
    backend: Backend,
) -> tuple[torch.Tensor, torch.Tensor]:
    check_shapes(prefix, bank, rows, write_row)
    norm_eps = eps if norm_eps is None else norm_eps
    if backend == "auto":
        backend = backend_for(prefix)
    if backend == "torch" or prefix.shape[0] == 0:
        return _in_torch(prefix, addend, bank, rows, score_weight, norm_weight, eps, norm_eps, write_row)
    # What the kernels cannot read as it lies is copied, and the slot that they write is written back.
    read = readable(bank)
    prefix, addend = dense(prefix), None if addend is None else dense(addend)
    if backend == "cuda" and norm_eps == eps:
        from nsysk3.ops import cuda

        result = cuda.attn_res(
            prefix, read, rows, as_type(score_weight, torch.float32), as_type(norm_weight, prefix.dtype), eps,
            addend=addend, write_row=write_row,
        )  # fmt: skip
    else:
        from nsysk3.ops import attn_res_triton

        result = attn_res_triton.launch(prefix, addend, read, rows, score_weight, norm_weight, eps, norm_eps, write_row)
    if write_row is not None and read is not bank:
        reference.write_bank(bank, write_row, result[1])
    return result


def check_shapes(prefix: torch.Tensor, bank: torch.Tensor, rows: int, write_row: int | None) -> None:
    """Raise InputError unless these fit together: the kernels trust them."""
    if prefix.ndim != 2 or bank.ndim != 3 or bank.shape[0] != prefix.shape[0] or bank.shape[2] != prefix.shape[1]:
        raise InputError(f"prefix {tuple(prefix.shape)} and bank {tuple(bank.shape)} are not [T, H] and [T, NB, H]")
    slots = bank.shape[1]
    if not 0 <= rows <= slots:
        raise InputError(f"{rows} valid rows in a bank of {slots}")
    if write_row is not None and not rows <= write_row < slots:
        raise InputError(f"row {write_row} is no free slot of a bank of {slots} with {rows} valid")
    if bank.dtype != prefix.dtype:
        raise InputError(f"prefix is {prefix.dtype} and bank {bank.dtype}")


def readable(bank: torch.Tensor) -> torch.Tensor:
    """``bank`` as the kernels can read it: rows without gaps that start at a multiple of 16 bytes; else a copy."""
    step = 16 // bank.element_size()
    aligned = bank.data_ptr() % 16 == 0 and bank.stride(0) % step == 0 and bank.stride(1) % step == 0
    return bank if bank.stride(2) == 1 and aligned else bank.clone(memory_format=torch.contiguous_format)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` contiguous from a multiple of 16 bytes on, as the kernels read and write it; else a copy."""
    if tensor.is_contiguous() and tensor.data_ptr() % 16 == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


_converted: MutableMapping[torch.Tensor, tuple[int, torch.Tensor]] = WeakTensorKeyDictionary()


def as_type(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``weight`` in ``dtype`` and dense; converted once a tensor, for weights outlive many calls."""
    if weight.dtype == dtype and dense(weight) is weight:
        return weight
    now = 0 if weight.is_inference() else weight._version
    version, converted = _converted.get(weight, (-1, weight))
    if version != now or converted.dtype != dtype:
        converted = dense(weight.to(dtype))
        _converted[weight] = now, converted
    return converted


def _in_torch(
    prefix: torch.Tensor,
    addend: torch.Tensor | None,
    bank: torch.Tensor,
    rows: int,
    score_weight: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    norm_eps: float,
    write_row: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    new_prefix = prefix if addend is None else (prefix.float() + addend.float()).to(prefix.dtype)
    normed = torch.empty_like(new_prefix)
    for start in range(0, prefix.shape[0], _CHUNK):
        part = slice(start, start + _CHUNK)
        normed[part] = reference.attn_res(
            new_prefix[part], bank[part], rows, score_weight, norm_weight, eps, norm_eps=norm_eps, acc=torch.float32
        ).to(normed.dtype)
    if write_row is not None:
        reference.write_bank(bank, write_row, new_prefix)
    return normed, new_prefix
