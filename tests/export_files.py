"""Tables of an export as Nsight writes them: a SQLite file, or a folder of Parquet or Arrow files."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

# Columns and rows of each table, by its name.
Tables = dict[str, tuple[list[str], list[tuple[Any, ...]]]]

_TEXT = {"value", "text", "name", "busLocation", "uuid", "devStateName", "utcTime", "localTime", "binaryData"}


def write_sqlite(tables: Tables, path: Path) -> Path:
    """Write them as a database."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("pragma synchronous=off")
        connection.execute("pragma journal_mode=off")
        for table, (columns, rows) in tables.items():
            declared = ", ".join(f'"{name}" {"TEXT" if name in _TEXT else "INTEGER"}' for name in columns)
            connection.execute(f'CREATE TABLE "{table}" ({declared})')
            marks = ", ".join("?" * len(columns))
            connection.executemany(f'INSERT INTO "{table}" VALUES ({marks})', rows)
        connection.commit()
    return path


def write_directory(tables: Tables, path: Path, kind: str, *, large: bool) -> Path:
    """Write them as a ``parquetdir`` or ``arrowdir``, ids unsigned as Nsight has them there."""
    path.mkdir(parents=True, exist_ok=True)
    for table, (columns, rows) in tables.items():
        arrow = pa.table(
            {name: _arrow_column([row[i] for row in rows], _arrow_type(name, large)) for i, name in enumerate(columns)},
        )
        if kind == "parquetdir":
            pq.write_table(arrow, path / f"{table}.parquet")
        else:  # Nsight writes the stream format
            with (
                pa.OSFile(str(path / f"{table}.arrow"), "wb") as sink,
                pa.ipc.new_stream(sink, arrow.schema) as out,
            ):
                out.write_table(arrow)
    return path


def _arrow_column(values: list[Any], kind: pa.DataType) -> pa.Array:
    if kind == pa.uint64():
        values = [None if value is None else value % 2**64 for value in values]
    return pa.array(values, kind)


def _arrow_type(column: str, large: bool) -> pa.DataType:
    if column == "binaryData":
        return pa.large_binary() if large else pa.binary()
    if column in _TEXT:
        return pa.large_string() if large else pa.string()
    if column in ("globalTid", "globalPid", "endGlobalTid", "graphNodeId", "demangledName", "shortName"):
        return pa.uint64()
    if column in ("deviceId", "streamId", "correlationId", "textId"):
        return pa.uint32()
    return pa.int64()
