"""Read the output of nccl-tests (``all_reduce_perf``, ``sendrecv_perf``, ...)."""

from __future__ import annotations

import re
from pathlib import Path

import polars as pl

from nsysk3.errors import InputError

SCHEMA = {
    "role": pl.String, "ranks": pl.Int64, "bytes": pl.Int64, "time_us": pl.Float64, "algbw_gbs": pl.Float64,
    "busbw_gbs": pl.Float64, "wrong": pl.Int64, "source": pl.String,
}  # fmt: skip

_RANK = re.compile(r"^#\s+Rank\s+(\d+)\b")
_NAME = re.compile(r"(all_reduce|all_gather|reduce_scatter|alltoall|sendrecv)_perf")
_ROLES = {
    "all_reduce": "allreduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter", "alltoall": "all_to_all",
    "sendrecv": "p2p",
}  # fmt: skip
# A row: size count type [redop root] then out-of-place and in-place time, algbw, busbw, #wrong.
_ROW = re.compile(r"^\s*(\d+)\s+(\d+)\s+(\S+)\s+(?:\S+\s+-?\d+\s+)?([\d.]+)\s+([\d.]+)\s+([\d.]+)\s+(\d+|N/A)")


def read_nccl_tests(paths: list[Path]) -> pl.DataFrame:
    """Out-of-place results of nccl-tests logs: ``role``, ``ranks``, ``bytes``, ``time_us``, ``algbw_gbs``,
    ``busbw_gbs``, ``wrong`` (null where it was not checked), ``source``.

    The operation is named in the log or the file name, else told from busbw / algbw, which is 2(n-1)/n for AllReduce.
    Raises InputError for a file without a result row.
    """  # noqa: D205
    tables = [_read(path) for path in paths]
    return pl.concat(tables) if tables else pl.DataFrame(schema=SCHEMA)


def _read(path: Path) -> pl.DataFrame:
    try:
        text = path.read_text("utf-8", errors="replace")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    lines = text.splitlines()
    ranks = len({match[1] for line in lines if (match := _RANK.match(line))})
    rows = [match.groups() for line in lines if (match := _ROW.match(line))]
    if not rows or not ranks:
        raise InputError(f"{path}: no nccl-tests results here (no rank list or no row of sizes and times)")
    named = _NAME.search(text) or _NAME.search(path.name)
    cells = []
    for size, _, _, time, algbw, busbw, wrong in rows:
        factor = float(busbw) / float(algbw) if float(algbw) > 0 else 0.0
        role = _ROLES[named[1]] if named else _role_of(factor, ranks)
        if role and int(size) > 0:
            checked = None if wrong == "N/A" else int(wrong)
            cells.append((role, ranks, int(size), float(time), float(algbw), float(busbw), checked, path.name))
    return (
        pl.DataFrame(cells, schema=SCHEMA, orient="row").unique(["role", "ranks", "bytes"], keep="first").sort("bytes")
    )


def _role_of(factor: float, ranks: int) -> str | None:
    if ranks > 1 and abs(factor - 2 * (ranks - 1) / ranks) < 0.05:
        return "allreduce"
    return "p2p" if abs(factor - 1) < 0.02 and ranks == 2 else None
