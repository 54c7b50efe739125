"""Where the events of a report stay between two steps: in memory as long as there is room, else in scratch files."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import polars as pl

from nsysk3.errors import MissingToolError

# Of a container, versions 2 and 1 of control groups.
_GROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
# The frames of one report between two steps, by name.
State = dict[str, pl.DataFrame]


class Shelf:
    """States by report, each the one after its latest step.

    ``folder``: made when first needed and removed by ``close``; None: a new one under the system's for temporary files
    ($TMPDIR).  ``hold``: bytes kept in memory before files are written.
    """

    def __init__(self, folder: Path | None = None, hold: int = 0) -> None:
        self._folder = folder
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
        if self._folder is not None:
            shutil.rmtree(self._folder / f"{report}.{step - 1}", ignore_errors=True)

    def get(self, report: int, step: int) -> State | None:
        """The state after ``step``, None where it is not here."""
        if (held := self._held.get(report)) and held[0] == step:
            return held[1]
        place = self._folder / f"{report}.{step}" if self._folder else None
        if place is None or not place.is_dir():
            return None
        try:
            return {file.stem: pl.read_ipc(file) for file in place.iterdir()}
        except (OSError, pl.exceptions.PolarsError):
            return None

    def close(self) -> None:
        """Forget all and remove the folder."""
        self._held.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self, report: int, step: int, state: State) -> None:
        try:
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix="nsysk3-scratch-"))
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            beside = Path(tempfile.mkdtemp(prefix=".", dir=self._folder))
            for name, frame in state.items():
                frame.write_ipc(beside / f"{name}.arrow", compression="uncompressed")  # so that it can be mapped
            with suppress(OSError):  # there already: another worker was given the same report
                beside.rename(self._folder / f"{report}.{step}")
            shutil.rmtree(beside, ignore_errors=True)
        except (OSError, pl.exceptions.PolarsError) as error:  # polars calls a full disk a ComputeError
            reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
            raise MissingToolError(f"{self._folder or tempfile.gettempdir()}: no room for scratch files ({reason}); "
                                   "set TMPDIR to a folder with more") from error  # fmt: skip


def memory_share(share: float) -> int:
    """So much of the memory that this process may use, bytes: the machine's, or what its control group allows."""
    limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in _GROUP_LIMITS:
        with suppress(OSError, ValueError):  # not there, or "max"
            limit = min(limit, int(Path(file).read_text("ascii")))
    return int(share * limit)
