"""Is every rank in the export?  Asked of the SQLite file itself, so that it needs nothing but Python."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from nsysk3.errors import InputError
from nsysk3.run.absent import absent_of_host, one_device_for_all
from nsysk3.run.manifest import RankEntry

_KERNELS = re.compile(r"CUPTI_ACTIVITY_KIND_KERNEL(_V\d+)?$")
_CALLS = re.compile(r"CUPTI_ACTIVITY_KIND_RUNTIME(_V\d+)?$")
# Every export has its texts in the first, and one of the others, as nsys before 2023 and since calls it.
_TEXTS, _EXPORTS = "StringIds", {"META_DATA_EXPORT", "EXPORT_META_DATA"}
_PID = "((%s >> 24) & 0xFFFFFF)"


@dataclass(frozen=True)
class Found:
    """What one node's export holds of its ranks.

    Attributes:
        kernels: GPU kernels of each rank that is there, by world rank.
        missing: ranks with no kernel, and the likely reason.
        reason: why, empty when none is missing.
    """

    kernels: dict[int, int]
    missing: tuple[int, ...]
    reason: str


def find_ranks(export: Path, ranks: Sequence[RankEntry]) -> Found:
    """Which of a node's ranks launched kernels in an export.

    Raises InputError when the file cannot be read, or is no export of Nsight Systems.
    """
    try:
        with closing(sqlite3.connect(f"{export.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            query = "SELECT name FROM sqlite_master WHERE type = 'table'"
            tables = [str(name) for (name,) in connection.execute(query)]
            if _TEXTS not in tables or _EXPORTS.isdisjoint(tables):
                raise InputError(f"{export}: not an export of Nsight Systems; export the report again")
            return _find(connection, tables, ranks)
    except sqlite3.Error as error:
        raise InputError(f"{export}: not a whole export ({error}); export the report again") from error


def _find(connection: sqlite3.Connection, tables: Sequence[str], ranks: Sequence[RankEntry]) -> Found:
    rows = _count(connection, tables, _KERNELS, "globalPid", "deviceId")
    ordered = sorted(ranks, key=lambda rank: rank.world_rank)
    if one_device_for_all(ordered, rows):
        return Found({}, (), "")
    devices = {device for _, device in rows}
    per_device = {device: sum(count for (_, other), count in rows.items() if other == device) for device in devices}
    kernels = {rank.world_rank: per_device[rank.device] for rank in ordered if rank.device in per_device}
    missing = absent_of_host(ordered, rows)
    if not missing:
        return Found(kernels, (), "")
    callers = {pid for pid, _ in _count(connection, tables, _CALLS, "globalTid", "0")}
    return Found(kernels, missing, _reason(tables, len(callers), bool(kernels), _diagnostics(connection, tables)))


def _reason(tables: Sequence[str], callers: int, some: bool, said: Sequence[str]) -> str:
    if some:
        return (
            f"{callers} process{'' if callers == 1 else 'es'} of the node made CUDA calls inside the capture; the "
            "others were not followed (nsys needs --trace-fork-before-exec=true around the one command that starts all "
            "ranks of the node), or idle"
        )
    if callers:
        return "CUDA calls but no kernel were recorded: the capture lay between forwards, or was cut"
    cuda = next((text for text in said if "cuda" in text.lower() or "cupti" in text.lower()), None)
    if cuda:
        return f"nsys saw no CUDA: {cuda}"
    if not any(table.startswith("CUPTI_ACTIVITY") for table in tables):
        return (
            "nsys saw no CUDA at all: the capture never opened, the driver is newer than this nsys knows, or the "
            "processes were forked before it could follow them"
        )
    return "no kernel was recorded: the capture lay between forwards, or was cut"


def _count(
    connection: sqlite3.Connection, tables: Sequence[str], name: re.Pattern[str], pid: str, device: str
) -> dict[tuple[int, int], int]:
    """Rows by process and device."""
    found: dict[tuple[int, int], int] = {}
    for table in filter(name.match, tables):
        columns = {row[1] for row in connection.execute(f'PRAGMA table_info("{table}")')}
        process = _PID % pid if pid in columns else "0"
        query = f'SELECT {process}, {device}, COUNT(*) FROM "{table}" GROUP BY 1, 2'
        for process_id, device_id, count in connection.execute(query):
            found[process_id, device_id] = found.get((process_id, device_id), 0) + count
    return found


def _diagnostics(connection: sqlite3.Connection, tables: Sequence[str]) -> list[str]:
    """What nsys said of its own trouble: warnings and errors."""
    if "DIAGNOSTIC_EVENT" not in tables:
        return []
    columns = {row[1] for row in connection.execute("PRAGMA table_info(DIAGNOSTIC_EVENT)")}
    if not {"text", "severity"} <= columns:
        return []
    query = "SELECT DISTINCT text FROM DIAGNOSTIC_EVENT WHERE severity >= 2 LIMIT 50"
    return [" ".join(str(text).split())[:300] for (text,) in connection.execute(query)]
