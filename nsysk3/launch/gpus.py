"""Whether there are GPUs to run on, as far as this machine can tell."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

from nsysk3.launch.commands import flag_value
from nsysk3.launch.transport import is_this_machine
from nsysk3.run.config import Settings


def runs_on_cpu(settings: Settings, args: Sequence[str]) -> bool:
    """Whether the server will compute without GPUs: told to, or nsysk3's own on this machine where there are none."""
    device = flag_value(args, "--device")
    if device is not None and device != "auto":
        return device == "cpu"
    cluster = settings.cluster
    here = settings.server.engine == "torch" and len(cluster.hosts) == 1 and is_this_machine(cluster.hosts[0])
    return here and local_gpus(settings.env.get("CUDA_VISIBLE_DEVICES")) is None


def local_gpus(visible: str | None = None) -> int | None:
    """GPUs of this machine that CUDA_VISIBLE_DEVICES leaves, None where there are none to be seen."""
    visible = visible if visible is not None else os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([each for each in visible.split(",") if each.strip() not in ("", "-1", "NoDevFiles")]) or None
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines()) or None
