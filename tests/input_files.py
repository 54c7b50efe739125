"""Small inputs of an analysis, and what is in their folder."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from exports import GEMM, Export


def small(path: Path, pid: int = 11) -> Path:
    """An export of one kernel."""
    return Export().kernel(GEMM, 0, 100, pid=pid).write(path)


def touch(path: Path, seconds: int) -> Path:
    """An empty file of this time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.utime(path, (seconds, seconds))
    return path


def contents(folder: Path) -> dict[str, tuple[str, int]]:
    """The hash and the time of every file under a folder."""
    return {
        str(path.relative_to(folder)): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
