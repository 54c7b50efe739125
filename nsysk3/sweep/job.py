"""A sweep to run, and what is kept of it as it goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from nsysk3.sweep.folder import Folder
from nsysk3.sweep.matrix import Matrix
from nsysk3.sweep.record import Record, write_record
from nsysk3.sweep.summarise import summarise

if TYPE_CHECKING:
    from nsysk3.launch.plan import Plan


@dataclass(frozen=True)
class Job:
    """A sweep to run; ``plans`` are those of the matrix' layouts, in their order."""

    folder: Folder
    record: Record
    matrix: Matrix
    plans: Sequence[Plan]
    say: Callable[[str], None]
    killed: tuple[str, ...] = ()
    """Runs of an earlier nsysk3 that could not clean up."""

    def save(self) -> None:
        """Write the record and, once there are repeats, their medians."""
        self.record.updated = now()
        write_record(self.folder, self.record)
        if self.folder.results():
            self.folder.write_summary(summarise(self.folder, self.record))


def now() -> str:
    """UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
