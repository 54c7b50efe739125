"""Logs of nccl-tests (``all_reduce_perf``, ``sendrecv_perf``, ...) as rows, and as text again."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from nsysk3.errors import InputError

ROLES = {
    "all_reduce": "allreduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter", "alltoall": "all_to_all",
    "sendrecv": "p2p",
}  # fmt: skip
_RANK = re.compile(r"^#\s+Rank\s+(\d+)\b(?:.*?\bon\s+(\S+)\s+device\s+(\d+))?")
# What nsysk3 adds to a log: the NUMA node of each rank's GPU, with commas between.
NUMA_MARK = "# NUMA node of each rank:"
_NUMA = re.compile(rf"^{NUMA_MARK} ([\d,]+)$", re.MULTILINE)
_NAME = re.compile(rf"({'|'.join(ROLES)})_perf")
# A row: size count type [redop root] then out-of-place and in-place time, algbw, busbw, #wrong.
_NUMBER = r"(\d+(?:\.\d*)?)"
_ROW = re.compile(
    rf"^\s*(\d+)\s+(\d+)\s+(\S+)\s+(?:\S+\s+-?\d+\s+)?{_NUMBER}\s+{_NUMBER}\s+{_NUMBER}\s+(\d+|N/A)(?!\S)"
)
# Every nccl-tests ends its log with it.
_END = re.compile(r"^#\s*Out of bounds values", re.MULTILINE)


@dataclass(frozen=True)
class NcclRow:
    """One size, out of place; ``wrong``: values that were wrong, None where they were not checked."""

    bytes: int
    time_us: float
    algbw_gbs: float
    busbw_gbs: float
    wrong: int | None
    role: str | None = None


@dataclass(frozen=True)
class NcclLog:
    """One log.  ``places``: host and device of each rank, None where the log does not say; ``numa``: their NUMA nodes.

    ``name``: what whoever measured it calls the ranks together.  ``whole``: the log has its end.
    """

    source: str
    operation: str | None
    ranks: int
    places: tuple[tuple[str, int] | None, ...]
    rows: tuple[NcclRow, ...]
    numa: tuple[int, ...] = ()
    name: str | None = None
    whole: bool = True


def read_nccl_log(path: Path) -> NcclLog:
    """A log of nccl-tests.

    The operation is named in the log or the file name, else told from busbw / algbw, which is 2(n-1)/n for AllReduce.
    Raises InputError for a file without a rank list or a result row.
    """
    try:
        text = path.read_text("utf-8", errors="replace")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    lines = text.splitlines()
    places = {
        int(match[1]): (match[2], int(match[3])) if match[2] else None for line in lines if (match := _RANK.match(line))
    }
    rows = [match.groups() for line in lines if (match := _ROW.match(line))]
    if not rows or not places:
        raise InputError(f"{path}: no nccl-tests results here (no rank list or no row of sizes and times)")
    named = _NAME.search(text) or _NAME.search(path.name)
    made: dict[tuple[int, str | None], NcclRow] = {}
    for size, _, _, time, algbw, busbw, wrong in rows:
        factor = float(busbw) / float(algbw) if float(algbw) > 0 else 0.0
        role = ROLES[named[1]] if named else _role_of(factor, len(places))
        checked = None if wrong == "N/A" else int(wrong)
        row = NcclRow(int(size), float(time), float(algbw), float(busbw), checked, role)
        made.setdefault((row.bytes, role), row)
    ordered = tuple(sorted(made.values(), key=lambda row: row.bytes))
    numa = tuple(int(node) for node in found[1].split(",")) if (found := _NUMA.search(text)) else ()
    where = tuple(places[rank] for rank in sorted(places))
    return NcclLog(
        path.name, named[1] if named else None, len(places), where, ordered, numa, whole=bool(_END.search(text))
    )


def _role_of(factor: float, ranks: int) -> str | None:
    if ranks > 1 and abs(factor - 2 * (ranks - 1) / ranks) < 0.05:
        return "allreduce"
    return "p2p" if abs(factor - 1) < 0.02 and ranks == 2 else None
