"""How many multiprocessors cuBLAS counts on, where others are kept busy beside it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch


@cache
def _library() -> ctypes.CDLL | None:
    """The cuBLAS that PyTorch has loaded, whatever its version."""
    for line in Path("/proc/self/maps").read_text("utf-8").splitlines():
        path = line.rpartition(" ")[2]
        if "/libcublas.so" in path:
            return ctypes.CDLL(path)
    return None


@contextmanager
def multiprocessors(count: int | None) -> Iterator[bool]:
    """Inside, PyTorch's products on the current stream are planned for ``count`` multiprocessors; None: for all.

    Gives False where cuBLAS cannot be told.
    """
    library = None if count is None else _library()
    if count is None or library is None or not hasattr(library, "cublasSetSmCountTarget"):
        yield count is None
        return
    handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
    before = ctypes.c_int(0)
    library.cublasGetSmCountTarget(handle, ctypes.byref(before))
    told = library.cublasSetSmCountTarget(handle, ctypes.c_int(count)) == 0
    carve = getattr(torch._C, "_set_sm_carveout_experimental", None)  # what PyTorch's cuBLASLt calls look at
    if carve is not None:
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        carve(total - count)
    try:
        yield told
    finally:
        library.cublasSetSmCountTarget(handle, before)
        if carve is not None:
            carve(None)
