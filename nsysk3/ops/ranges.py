"""NVTX ranges around the operations: what a trace says of each call; free where there is no CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nsysk3.ops.pytorch import torch


@contextmanager
def named_range(text: str, on_gpu: bool) -> Iterator[None]:
    """A range on this thread around the calls that launch the operation."""
    if not on_gpu or torch.compiler.is_compiling():
        yield
        return
    nvtx: Any = torch.cuda.nvtx  # not annotated
    nvtx.range_push(text)
    try:
        yield
    finally:
        nvtx.range_pop()
