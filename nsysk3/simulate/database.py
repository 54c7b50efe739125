"""Bulk rows into an SQLite file with the tables of one Nsight version."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

# Binding Arrow arrays in C is three times as fast as executemany over Python tuples.
import adbc_driver_manager as adbc
import adbc_driver_sqlite
import numpy as np
import pyarrow as pa

from nsysk3.errors import MissingToolError
from nsysk3.simulate.schema import create_statements, tables

Constant: TypeAlias = int | float | str | None
# Rows of one statement that are written together.
_AT_ONCE = 32_768


class Database:
    """A new SQLite export.  Columns that a version lacks are left out, those it demands and nobody gave are 0 or ''."""

    def __init__(self, path: Path, version: str) -> None:
        self.path = path
        self._tables = tables(version)
        self._prepared: dict[str, adbc.AdbcStatement] = {}
        self._texts: dict[tuple[object, ...], str] = {}
        self._gathered: dict[str, list[dict[str, Any]]] = {}
        self._held: dict[str, int] = {}
        self.rows = 0
        try:
            self._database = adbc.AdbcDatabase(driver=adbc_driver_sqlite._driver_path(), uri=str(path))
            self._connection = adbc.AdbcConnection(self._database)
            # A file that a crash leaves behind is thrown away, so nothing needs to survive one.
            for pragma in ("journal_mode=off", "synchronous=off", "locking_mode=exclusive", "cache_size=-8000"):
                self._execute(f"PRAGMA {pragma}")
            self._connection.set_autocommit(False)
            for statement in create_statements(version):
                self._execute(statement)
        except adbc.Error as error:
            raise MissingToolError(f"{path}: cannot be written ({error})") from error

    def has(self, table: str, column: str | None = None) -> bool:
        """Whether this version has the table, and the column in it."""
        return table in self._tables and (column is None or column in self._tables[table])

    def insert(self, table: str, values: Mapping[str, Any], constants: Mapping[str, Constant] | None = None) -> None:
        """Append rows: ``values`` (int64 or Arrow arrays) by column, ``constants`` the same in each row.

        Rows are gathered and written some ten thousand at a time: a call costs as much as hundreds of rows.
        """
        declared = self._tables.get(table)
        used = {name: column for name, column in values.items() if name in declared} if declared else {}
        count = len(next(iter(used.values()), ()))
        if not count or declared is None:
            return
        text = self._statement(table, declared, tuple(used), constants or {})
        kept = self._gathered.setdefault(text, [])
        kept.append(used)
        self.rows += count
        self._held[text] = self._held.get(text, 0) + count
        if self._held[text] >= _AT_ONCE:
            self._flush(text)

    def _flush(self, text: str) -> None:
        parts = self._gathered.pop(text)
        self._held[text] = 0
        columns = [_joined([part[name] for part in parts]) for name in parts[0]]
        batch = pa.record_batch(columns, names=list(parts[0]))
        schema, array = batch.__arrow_c_array__()
        try:
            statement = self._prepared.get(text)
            if statement is None:
                statement = self._prepared[text] = adbc.AdbcStatement(self._connection)
                statement.set_sql_query(text)
                statement.prepare()
            statement.bind(array, schema)
            statement.execute_update()
        except adbc.Error as error:
            raise MissingToolError(f"{self.path}: cannot be written ({error})") from error

    def insert_rows(self, table: str, rows: list[dict[str, Constant]]) -> None:
        """Append a few rows given as dictionaries with the same keys."""
        if rows:
            self.insert(table, {name: pa.array([row[name] for row in rows]) for name in rows[0]})

    def close(self) -> None:
        """Write what is left, commit and close."""
        for text in list(self._gathered):
            self._flush(text)
        for statement in self._prepared.values():
            statement.close()
        self._prepared.clear()
        self._connection.commit()
        self._connection.close()
        self._database.close()

    def __enter__(self) -> Database:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _statement(
        self, table: str, declared: Mapping[str, str], bound: tuple[str, ...], constants: Mapping[str, Constant]
    ) -> str:
        key = (table, bound, tuple(constants.items()))
        known = self._texts.get(key)
        if known is not None:
            return known
        fixed = {name: value for name, value in constants.items() if name in declared and name not in bound}
        for name, kind in declared.items():
            if "NOT NULL" in kind and name not in bound and name not in fixed:
                fixed[name] = "" if kind.startswith("TEXT") else 0
        names = ", ".join([*bound, *fixed])
        marks = ", ".join(["?"] * len(bound) + [_literal(value) for value in fixed.values()])
        return self._texts.setdefault(key, f"INSERT INTO {table} ({names}) VALUES ({marks})")

    def _execute(self, text: str) -> None:
        statement = adbc.AdbcStatement(self._connection)
        try:
            statement.set_sql_query(text)
            statement.execute_update()
        finally:
            statement.close()


def _joined(parts: list[Any]) -> pa.Array:
    if len(parts) == 1:
        return pa.array(parts[0])
    return pa.array(np.concatenate(parts)) if isinstance(parts[0], np.ndarray) else pa.concat_arrays(parts)


def _literal(value: Constant) -> str:
    if value is None:
        return "NULL"
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else repr(value)
