"""A rank's device, and getting small things onto it without waiting for it."""

from __future__ import annotations

import os
from typing import Any

from nsysk3.errors import MissingToolError
from nsysk3.ops.pytorch import torch
from nsysk3.workload.options import Options

# Half of it has no types.
cuda: Any = torch.cuda


def choose_device(options: Options, local: int) -> torch.device:
    """The device of this machine's process number ``local``, made current.

    Raises MissingToolError where there is no GPU for it.
    """
    if options.device == "cpu" or (options.device == "auto" and not cuda.is_available()):
        torch.set_num_threads(max((os.cpu_count() or 1) // options.ranks_a_node, 1))
        return torch.device("cpu")
    count = cuda.device_count()
    if local >= count:
        raise MissingToolError(f"{options.ranks_a_node} ranks on this machine, which shows {count} GPUs")
    device = torch.device("cuda", local)
    cuda.set_device(device)
    torch.set_float32_matmul_precision("high")  # KDA's chunks are in float32: let them use tensor cores
    return device


def host_numbers(numbers: list[int], device: torch.device) -> torch.Tensor:
    """Whole numbers on the device."""
    return to_device(torch.tensor(numbers, dtype=torch.int64), device)


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A CPU tensor on the device."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values
