"""The output of nccl-tests (``all_reduce_perf``, ``sendrecv_perf``, ...) as a table."""

from __future__ import annotations

from pathlib import Path

import polars as pl

from nsysk3.run.nccl_log import read_nccl_log

SCHEMA = {
    "role": pl.String, "ranks": pl.Int64, "bytes": pl.Int64, "time_us": pl.Float64, "algbw_gbs": pl.Float64,
    "busbw_gbs": pl.Float64, "wrong": pl.Int64, "source": pl.String,
}  # fmt: skip


def read_nccl_tests(paths: list[Path]) -> pl.DataFrame:
    """Out-of-place results of nccl-tests logs: ``role``, ``ranks``, ``bytes``, ``time_us``, ``algbw_gbs``,
    ``busbw_gbs``, ``wrong`` (null where it was not checked), ``source``.

    Rows whose operation nobody can tell are left out.  Raises InputError for a file without a result row.
    """  # noqa: D205
    cells = []
    for path in paths:
        log = read_nccl_log(path)
        cells += [
            (row.role, log.ranks, row.bytes, row.time_us, row.algbw_gbs, row.busbw_gbs, row.wrong, log.source)
            for row in log.rows
            if row.role and row.bytes > 0
        ]
    return pl.DataFrame(cells, schema=SCHEMA, orient="row")
