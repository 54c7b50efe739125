"""Memory of GPUs as nvidia-smi told it, in ``gpu/``."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path

from nsysk3.sweep.folder import Folder
from nsysk3.sweep.matrix import Layout

AFTER = "after"
_NUMBER = re.compile(r"\s*(\d+)\s*(?:MiB)?\s*")


@dataclass(frozen=True)
class Peak:
    """The fullest GPU of a layout."""

    used_mib: int
    total_mib: int
    gpu: str

    @property
    def headroom_mib(self) -> int:
        """What was left on it."""
        return self.total_mib - self.used_mib


def peak_of(folder: Folder, layout: Layout) -> Peak | None:
    """The fullest GPU after a layout's repeats, None where no snapshot tells."""
    marks = f"{layout.name}_{AFTER}_"
    found: list[Peak] = []
    for path in sorted((folder.path / "gpu").glob(f"{marks}*.csv")):
        host = path.stem.removeprefix(marks)
        found += [Peak(used, total, f"{host}:{index}") for index, used, total in read_snapshot(path)]
    return max(found, key=lambda peak: peak.used_mib, default=None)


def read_snapshot(path: Path) -> list[tuple[str, int, int]]:
    """Index, used and total memory (MiB) of each GPU; empty where the file tells none.

    Columns go by nvidia-smi's names, whatever their order and whether or not they carry their unit.
    """
    try:
        rows = list(csv.reader(path.read_text("utf-8", errors="replace").splitlines(), skipinitialspace=True))
    except OSError:
        return []
    if not rows:
        return []
    names = [name.split("[")[0].strip() for name in rows[0]]
    if not {"index", "memory.used", "memory.total"} <= set(names):
        return []
    found = []
    for row in rows[1:]:
        cells = dict(zip(names, row, strict=False))
        used, total = (_NUMBER.fullmatch(cells.get(name, "")) for name in ("memory.used", "memory.total"))
        if used and total:
            found.append((cells.get("index", "?").strip(), int(used[1]), int(total[1])))
    return found
