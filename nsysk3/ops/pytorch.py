"""PyTorch, or one clear error where it is not installed."""

from __future__ import annotations

from nsysk3.errors import MissingToolError

try:
    import torch as torch
    import torch.distributed as dist
    from torch.utils.weak import WeakTensorKeyDictionary
except ImportError as error:  # pragma: no cover - CI has torch
    raise MissingToolError(f"nsysk3.ops needs PyTorch ({error}): pip install 'nsysk3[gpu]'") from error

__all__ = ["WeakTensorKeyDictionary", "dist", "torch"]
