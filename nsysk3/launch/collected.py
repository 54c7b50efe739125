"""What the nodes of a run left, and whether that is a run."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nsysk3.errors import MissingToolError, RunFailedError
from nsysk3.launch.failures import Failure, ServerFailedError

REPORT_NAME = "trace.nsys-rep"


@dataclass
class Collected:
    """What one node left: files on this machine, and what is wrong with them."""

    host: str
    report: Path | None = None
    export: Path | None = None
    sha256: str | None = None
    imported: bool = False
    kernels: dict[int, int] = field(default_factory=dict)
    missing: tuple[int, ...] = ()
    problems: list[str] = field(default_factory=list)
    no_room: str | None = None
    """Why the report could not be written here, where that is all that kept it from coming."""
    no_export: str | None = None
    """Why there is no export that can be read, where the report itself is here."""
    kept: list[str] = field(default_factory=list)
    """Files that stay on the host, for they did not come."""

    def record(self, folder: Path) -> dict[str, Any]:
        """For the manifest; paths are relative to the run directory."""
        return {
            "host": self.host,
            "report": None if self.report is None else self.report.relative_to(folder).as_posix(),
            "bytes": None if self.report is None else self.report.stat().st_size,
            "sha256": self.sha256,
            "imported_from_qdstrm": self.imported,
            "export": None if self.export is None else self.export.relative_to(folder).as_posix(),
            "kernels": {str(rank): count for rank, count in sorted(self.kernels.items())},
            "missing_ranks": list(self.missing),
        }


def raise_if_useless(nodes: Sequence[Collected], ranks: Collection[int], out: Path) -> None:
    """Raises MissingToolError or RunFailedError where a capture did not come, cannot be read, or has none of ``ranks``.

    A node that never made one, or single ranks that are missing, are problems of a run that can be analysed.
    """
    problems = [problem for node in nodes for problem in node.problems]
    if kept := [f"{node.host}:{path}" for node in nodes for path in node.kept]:
        room = next((node.no_room for node in nodes if node.no_room), None)
        why = room or next(problem for node in nodes if node.kept for problem in node.problems)
        raw = " (a .qdstrm through QdstrmImporter)" if any(path.endswith(".qdstrm") for path in kept) else ""
        bring = f"{'make room here, ' if room else ''}bring it to {out}/nodes/HOST/{REPORT_NAME}{raw}"
        raise (MissingToolError if room else RunFailedError)(
            f"{why}; the capture is kept on its host, {', '.join(kept)}: {bring}, `nsysk3 analyze {out}`, then "
            f"`nsysk3 cleanup {out}` removes it there"
        )
    if not any(node.report for node in nodes):
        advice = "the notes of run.json say what was seen of the window"
        raise ServerFailedError(Failure("nsys-no-report", problems[0], advice), "no report came of this run")
    if stuck := next((node.no_export for node in nodes if node.no_export), None):
        advice = f"once that is mended, `nsysk3 analyze {out}` exports and reads it"
        raise ServerFailedError(Failure("nsys-no-export", stuck, advice), "a report is here and cannot be read")
    if set(ranks) == {rank for node in nodes for rank in node.missing}:
        advice = "an nsys as new as the driver, around the one command that starts all ranks of a node, sees them"
        raise ServerFailedError(Failure("nsys-no-cuda", problems[0], advice), "no rank's GPU work is in the reports")
