"""Bulk rows into an SQLite file with the tables of one Nsight version."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

# Binding Arrow arrays in C is three times as fast as executemany over Python tuples.
import adbc_driver_manager as adbc
import adbc_driver_sqlite
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from nsysk3.errors import MissingToolError
from nsysk3.simulate.schema import create_statements, tables

Column = NDArray[np.int64] | pa.Array
Constant = int | float | str | None


class Database:
    """A new SQLite export.  Columns that a version lacks are left out, those it demands and nobody gave are 0 or ''."""

    def __init__(self, path: Path, version: str) -> None:
        self.path = path
        self._tables = tables(version)
        self._prepared: dict[str, adbc.AdbcStatement] = {}
        self.rows = 0
        try:
            self._database = adbc.AdbcDatabase(driver=adbc_driver_sqlite._driver_path(), uri=str(path))
            self._connection = adbc.AdbcConnection(self._database)
            # A file that a crash leaves behind is thrown away, so nothing needs to survive one.
            for pragma in ("journal_mode=off", "synchronous=off", "locking_mode=exclusive", "cache_size=-32000"):
                self._execute(f"PRAGMA {pragma}")
            self._connection.set_autocommit(False)
            for statement in create_statements(version):
                self._execute(statement)
        except adbc.Error as error:
            raise MissingToolError(f"{path}: cannot be written ({error})") from error

    def has(self, table: str, column: str | None = None) -> bool:
        """Whether this version has the table, and the column in it."""
        return table in self._tables and (column is None or column in self._tables[table])

    def insert(self, table: str, values: Mapping[str, Column], constants: Mapping[str, Constant] | None = None) -> None:
        """Append rows: ``values`` by column, ``constants`` the same in each row."""
        declared = self._tables.get(table)
        if declared is None:
            return
        used = {name: column for name, column in values.items() if name in declared}
        count = len(next(iter(used.values()), ()))
        if not count:
            return
        statement = self._statement(table, declared, tuple(used), constants or {})
        batch = pa.record_batch([pa.array(column) for column in used.values()], names=list(used))
        schema, array = batch.__arrow_c_array__()
        try:
            statement.bind(array, schema)
            statement.execute_update()
        except adbc.Error as error:
            raise MissingToolError(f"{self.path}: cannot be written ({error})") from error
        self.rows += count

    def insert_rows(self, table: str, rows: list[dict[str, Constant]]) -> None:
        """Append a few rows given as dictionaries with the same keys."""
        if rows:
            self.insert(table, {name: pa.array([row[name] for row in rows]) for name in rows[0]})

    def close(self) -> None:
        """Commit and close."""
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
    ) -> adbc.AdbcStatement:
        fixed = {name: value for name, value in constants.items() if name in declared and name not in bound}
        for name, kind in declared.items():
            if "NOT NULL" in kind and name not in bound and name not in fixed:
                fixed[name] = "" if kind.startswith("TEXT") else 0
        names = ", ".join([*bound, *fixed])
        marks = ", ".join(["?"] * len(bound) + [_literal(value) for value in fixed.values()])
        text = f"INSERT INTO {table} ({names}) VALUES ({marks})"
        statement = self._prepared.get(text)
        if statement is None:
            statement = self._prepared[text] = adbc.AdbcStatement(self._connection)
            statement.set_sql_query(text)
            statement.prepare()
        return statement

    def _execute(self, text: str) -> None:
        statement = adbc.AdbcStatement(self._connection)
        try:
            statement.set_sql_query(text)
            statement.execute_update()
        finally:
            statement.close()


def _literal(value: Constant) -> str:
    if value is None:
        return "NULL"
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else repr(value)
