"""Where the events of a report stay between two steps: in memory as long as there is room, else in scratch files."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import polars as pl

from nsysk3.run.scratch import Scratch, no_room

# Of a container, versions 2 and 1 of control groups.
_GROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
# The frames of one report between two steps, by name.
State = dict[str, pl.DataFrame]


class Shelf:
    """States by report, each the one after its latest step.

    ``folder``: made when first needed; None: a Scratch, gone with ``close``.  ``hold``: bytes kept in memory before
    files are written.
    """

    def __init__(self, folder: Path | None = None, hold: int = 0) -> None:
        self.folder = folder
        self._own: Scratch | None = None
        self._hold = hold
        self._held: dict[int, tuple[int, State, int]] = {}

    def put(self, report: int, step: int, state: State) -> None:
        """Keep the state after ``step``; what was kept of the report before goes."""
        self._held.pop(report, None)
        size = sum(int(frame.estimated_size()) for frame in state.values())
        if sum(held for _, _, held in self._held.values()) + size <= self._hold:
            self._held[report] = step, state, size
        else:
            self._write(report, step, state)
        if self.folder is not None:
            shutil.rmtree(self.folder / f"{report}.{step - 1}", ignore_errors=True)

    def get(self, report: int, step: int) -> State | None:
        """The state after ``step``, None where it is not here."""
        if (held := self._held.get(report)) and held[0] == step:
            return held[1]
        place = self.folder / f"{report}.{step}" if self.folder else None
        if place is None or not place.is_dir():
            return None
        try:
            return {file.stem: pl.read_ipc(file) for file in place.iterdir()}
        except (OSError, pl.exceptions.PolarsError):
            return None

    def close(self) -> None:
        """Forget all and remove the shelf's own folder."""
        self._held.clear()
        if self._own is not None:
            self._own.remove()

    def _write(self, report: int, step: int, state: State) -> None:
        if self.folder is None:
            self._own = Scratch()
            self.folder = self._own.path
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            beside = Path(tempfile.mkdtemp(prefix=".", dir=self.folder))
            for name, frame in state.items():
                frame.write_ipc(beside / f"{name}.arrow", compression="uncompressed")  # so that it can be mapped
            with suppress(OSError):  # there already: another worker was given the same report
                beside.rename(self.folder / f"{report}.{step}")
            shutil.rmtree(beside, ignore_errors=True)
        except (OSError, pl.exceptions.PolarsError) as error:  # polars calls a full disk a ComputeError
            raise no_room(self.folder, error) from error


def memory_share(share: float) -> int:
    """So much of the memory that this process may use, bytes: the machine's, or what its control group allows."""
    limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in _GROUP_LIMITS:
        with suppress(OSError, ValueError):  # not there, or "max"
            limit = min(limit, int(Path(file).read_text("ascii")))
    return int(share * limit)
