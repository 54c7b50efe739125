"""One Nsight Systems export, whatever its kind and version, as tables that may or may not be there.

Nothing here knows a product version: what a file holds is asked of the file (SQLAlchemy reflection, parquet and
Arrow schemas).  Bulk columns then move column-wise into polars.  Files are opened read-only and never altered.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import adbc_driver_manager
import adbc_driver_sqlite.dbapi as adbc
import polars as pl
import pyarrow as pa
import sqlalchemy as sa

from nsysk3.errors import InputError

# Rows per partition below which a second reader thread costs more than it saves.
_PARTITION_ROWS = 200_000
_READERS = 4
_SQLITE_MAGIC = b"SQLite format 3\x00"

Only = Mapping[str, Sequence[int]]


class Source(Protocol):
    """The tables of one export."""

    @property
    def path(self) -> Path:
        """Where it lies."""

    @property
    def kind(self) -> str:
        """``sqlite``, ``parquetdir`` or ``arrowdir``."""

    def columns(self, table: str) -> tuple[str, ...]:
        """Columns of a table, ``()`` when the export has no such table."""

    def read(
        self, table: str, integers: Sequence[str] = (), *, texts: Sequence[str] = (), only: Only | None = None
    ) -> pl.DataFrame:
        """Rows of a table, in file order.

        ``integers`` come back as Int64 (unsigned 64-bit values wrap, as SQLite stores them), ``texts`` as String with
        invalid UTF-8 replaced.  A column or table that the export lacks comes back as nulls or no rows.  ``only`` keeps
        rows whose column holds one of the given integers; a column that is absent filters nothing.
        """

    def read_blobs(self, table: str, blob: str, keys: Sequence[str]) -> pl.DataFrame:
        """Rows whose binary column ``blob`` is not empty: the integer ``keys`` and the bytes."""


def open_source(path: Path) -> Source:
    """Open an export: a SQLite file or a directory of parquet or Arrow files.

    Raises InputError, in one line, for anything that is not one.
    """
    if path.is_dir():
        if any(path.glob("*.parquet")):
            return DirectorySource(path, "parquetdir")
        if any(path.glob("*.arrow")):
            return DirectorySource(path, "arrowdir")
        raise InputError(f"{path}: no .parquet or .arrow tables in this directory")
    return SqliteSource(path)


def versioned(tables: Mapping[str, object] | Sequence[str], table: str) -> str | None:
    """The name under which an export holds ``table``: the newest ``_V<n>`` of it where Nsight added a suffix."""
    pattern = re.compile(rf"{re.escape(table)}(?:_V(\d+))?")
    found = [(int(m.group(1) or 0), name) for name in tables if (m := pattern.fullmatch(name))]
    return max(found)[1] if found else None


@dataclass(frozen=True)
class SqliteSource:
    """A ``.sqlite`` export."""

    path: Path
    kind: str = "sqlite"

    def __post_init__(self) -> None:
        try:
            with self.path.open("rb") as file:
                magic = file.read(16)
        except OSError as error:
            raise InputError(f"{self.path}: cannot be read ({error.strerror})") from error
        if not magic:
            raise InputError(f"{self.path}: empty file; export the report again with `nsys export -t sqlite`")
        if magic != _SQLITE_MAGIC:
            raise InputError(f"{self.path}: not an SQLite file; give an .nsys-rep or an export made by `nsys export`")
        _ = self._tables

    @property
    def _uri(self) -> str:
        # immutable: SQLite then neither locks, nor replays a journal, nor makes -wal and -shm files beside the user's.
        return f"file:{quote(str(self.path.absolute()))}?mode=ro&immutable=1"

    @cached_property
    def _engine(self) -> sa.Engine:
        def connect() -> sqlite3.Connection:
            connection = sqlite3.connect(self._uri, uri=True, check_same_thread=False)
            connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
            return connection

        return sa.create_engine("sqlite://", creator=connect, poolclass=sa.pool.NullPool)

    @cached_property
    def _tables(self) -> dict[str, sa.Table]:
        try:
            inspector = sa.inspect(self._engine)
            names = inspector.get_table_names()
            wanted = [name for name in names if not name.startswith(("ENUM_", "sqlite_"))]
            return {name: _bare_table(name, [c["name"] for c in inspector.get_columns(name)]) for name in wanted}
        except (sa.exc.SQLAlchemyError, sqlite3.Error, UnicodeError) as error:
            raise self._broken(error) from error

    def _broken(self, error: BaseException) -> InputError:
        detail = str(getattr(error, "orig", None) or error).splitlines()[0] if str(error) else type(error).__name__
        return InputError(f"{self.path}: damaged or truncated SQLite file ({detail}); export the report again")

    def _table(self, table: str) -> sa.Table | None:
        name = versioned(self._tables, table)
        return None if name is None else self._tables[name]

    def columns(self, table: str) -> tuple[str, ...]:
        """See Source."""
        found = self._table(table)
        return () if found is None else tuple(found.c.keys())

    def read(
        self, table: str, integers: Sequence[str] = (), *, texts: Sequence[str] = (), only: Only | None = None
    ) -> pl.DataFrame:
        """See Source."""
        found = self._table(table)
        if found is None:
            return _empty(integers, texts)
        present = [name for name in integers if name in found.c]
        # Text travels as bytes: Arrow strings must be valid UTF-8 and NVTX text need not be.
        columns: list[sa.ColumnElement[Any]] = [found.c[name] for name in present]
        columns += [_bytes(found.c[name]).label(name) for name in texts if name in found.c]
        # A table asked for none of its columns still has as many rows.
        query = _select(columns or [sa.literal(1).label("_")])
        query = query.select_from(found)
        for name, values in (only or {}).items():
            if name in found.c:
                query = query.where(found.c[name].in_([int(value) for value in values]))
        frame = self._fetch(found, query, present)
        return _complete(frame, integers, texts)

    def read_blobs(self, table: str, blob: str, keys: Sequence[str]) -> pl.DataFrame:
        """See Source."""
        found = self._table(table)
        if found is None or blob not in found.c:
            return pl.DataFrame(schema={**dict.fromkeys(keys, pl.Int64), blob: pl.Binary})
        query = sa.select(*[found.c[key] for key in keys if key in found.c], _bytes(found.c[blob]).label(blob))
        frame = self._fetch(found, query.where(found.c[blob].is_not(None)), [key for key in keys if key in found.c])
        missing = [pl.lit(None, pl.Int64).alias(key) for key in keys if key not in frame.columns]
        return frame.with_columns(pl.col(blob).cast(pl.Binary), *missing).select(*keys, blob)

    def _fetch(self, table: sa.Table, query: sa.Select[Any], integers: Sequence[str]) -> pl.DataFrame:
        """Run a query column-wise, split over rowid ranges so that reader threads share the scan."""
        try:
            parts = list(self._partitions(table))
            queries = [_compiled(query.where(part) if part is not None else query) for part in parts]
            if len(queries) == 1:
                tables = [self._arrow(queries[0])]
            else:
                with ThreadPoolExecutor(_READERS) as pool:
                    tables = list(pool.map(self._arrow, queries))
        except (adbc_driver_manager.Error, sa.exc.SQLAlchemyError, sqlite3.Error, pa.ArrowException) as error:
            raise self._broken(error) from error
        frames = [_typed(pl.DataFrame(pl.from_arrow(part)), integers) for part in tables]
        return pl.concat(frames)

    def _arrow(self, query: str) -> pa.Table:
        with adbc.connect(self._uri) as connection, connection.cursor() as cursor:
            cursor.execute(query)
            return cursor.fetch_arrow_table()

    def _partitions(self, table: sa.Table) -> Iterator[sa.ColumnElement[bool] | None]:
        rowid = sa.literal_column("rowid", sa.Integer)
        with self._engine.connect() as connection:
            # max(rowid) is one step down the b-tree; counting would scan the table.
            last = connection.execute(sa.select(sa.func.max(rowid)).select_from(table)).scalar() or 0
        if last < _PARTITION_ROWS:
            yield None
            return
        bounds = [last * i // _READERS for i in range(_READERS + 1)]
        yield from (sa.and_(rowid > low, rowid <= high) for low, high in pairwise(bounds))


@dataclass(frozen=True)
class DirectorySource:
    """A ``parquetdir`` or ``arrowdir`` export: one file a table."""

    path: Path
    kind: str

    @cached_property
    def _files(self) -> dict[str, Path]:
        return {file.stem: file for file in sorted(self.path.iterdir()) if file.suffix in (".parquet", ".arrow")}

    def _file(self, table: str) -> Path | None:
        name = versioned(self._files, table)
        return None if name is None else self._files[name]

    def _scan(self, table: str) -> pl.LazyFrame | None:
        file = self._file(table)
        if file is None:
            return None
        try:
            if file.suffix == ".parquet":
                return pl.scan_parquet(file, glob=False)
            # Nsight writes the IPC stream format, which scan_ipc (the file format) refuses.
            with pa.memory_map(str(file)) as mapped:
                return pl.DataFrame(pl.from_arrow(pa.ipc.open_stream(mapped).read_all())).lazy()
        except (pl.exceptions.PolarsError, pa.ArrowException, OSError) as error:
            raise self._broken(file, error) from error

    @staticmethod
    def _broken(file: Path, error: BaseException) -> InputError:
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        return InputError(f"{file}: damaged table ({detail}); export the report again")

    def columns(self, table: str) -> tuple[str, ...]:
        """See Source."""
        scan = self._scan(table)
        if scan is None:
            return ()
        try:
            return tuple(scan.collect_schema().names())
        except (pl.exceptions.PolarsError, OSError) as error:
            raise self._broken(self._files[versioned(self._files, table) or table], error) from error

    def read(
        self, table: str, integers: Sequence[str] = (), *, texts: Sequence[str] = (), only: Only | None = None
    ) -> pl.DataFrame:
        """See Source."""
        names = self.columns(table)
        scan = self._scan(table)
        if scan is None or not names:
            return _empty(integers, texts)
        for name, values in (only or {}).items():
            if name in names:
                scan = scan.filter(_wrapped(pl.col(name)).is_in(list(values)))
        present = [name for name in integers if name in names]
        columns = [_wrapped(pl.col(name)) for name in present]
        columns += [pl.col(name).cast(pl.Binary) for name in texts if name in names]
        frame = self._collect(table, scan.select(columns or [pl.lit(1).alias("_")]))
        return _complete(frame, integers, texts)

    def read_blobs(self, table: str, blob: str, keys: Sequence[str]) -> pl.DataFrame:
        """See Source."""
        names = self.columns(table)
        scan = self._scan(table)
        if scan is None or blob not in names:
            return pl.DataFrame(schema={**dict.fromkeys(keys, pl.Int64), blob: pl.Binary})
        columns = [_wrapped(pl.col(key)) if key in names else pl.lit(None, pl.Int64).alias(key) for key in keys]
        return self._collect(
            table, scan.filter(pl.col(blob).is_not_null()).select(*columns, pl.col(blob).cast(pl.Binary))
        )

    def _collect(self, table: str, scan: pl.LazyFrame) -> pl.DataFrame:
        try:
            return scan.collect()
        except (pl.exceptions.PolarsError, OSError) as error:
            raise self._broken(self._files[versioned(self._files, table) or table], error) from error


def _bare_table(name: str, columns: Sequence[str]) -> sa.Table:
    return sa.Table(name, sa.MetaData(), *[sa.Column(column, sa.Integer) for column in columns])


def _select(columns: Sequence[sa.ColumnElement[Any]]) -> sa.Select[Any]:
    return sa.select(*columns)


def _bytes(column: sa.ColumnElement[object]) -> sa.ColumnElement[object]:
    # Without the coalesce a first batch of nulls would make the driver guess an integer column.
    return sa.cast(sa.func.coalesce(column, sa.literal_column("x''")), sa.LargeBinary)


def _compiled(query: sa.Select[Any]) -> str:
    from sqlalchemy.dialects import sqlite

    # The only literals are the integers of `only` and of the rowid ranges.
    return str(query.compile(dialect=sqlite.dialect(), compile_kwargs={"literal_binds": True}))


def _typed(frame: pl.DataFrame, integers: Sequence[str]) -> pl.DataFrame:
    """Int64 for the integer columns and Binary for the rest, whatever the driver guessed from the first rows.

    A damaged row that holds text where an integer belongs becomes null.
    """
    if frame.is_empty():  # no row to guess from: the driver calls every column an integer
        return pl.DataFrame(schema={n: pl.Int64 if n in integers else pl.Binary for n in frame.columns})
    return frame.with_columns(pl.col(name).cast(pl.Int64, strict=False) for name in integers)


def _wrapped(column: pl.Expr) -> pl.Expr:
    """Unsigned 64-bit ids as SQLite stores them: the same bits, read as signed."""
    as_bits = column.cast(pl.Int128, strict=False)
    return pl.when(as_bits >= 2**63).then(as_bits - 2**64).otherwise(as_bits).cast(pl.Int64, strict=False).name.keep()


def _complete(frame: pl.DataFrame, integers: Sequence[str], texts: Sequence[str]) -> pl.DataFrame:
    """All columns asked for, in order: bytes decoded, absent ones null."""
    columns = [pl.col(name) if name in frame.columns else pl.lit(None, pl.Int64).alias(name) for name in integers] + [
        _decoded(frame, name) if name in frame.columns else pl.lit(None, pl.String).alias(name) for name in texts
    ]
    return frame.select(columns)


def _decoded(frame: pl.DataFrame, name: str) -> pl.Expr:
    valid = pl.col(name).cast(pl.String, strict=False)
    broken = frame.select(pl.col(name).filter(valid.is_null() & pl.col(name).is_not_null()).unique())[name].to_list()
    if broken:
        mended = {raw: raw.decode("utf-8", "replace") for raw in broken}
        valid = pl.coalesce(valid, pl.col(name).replace_strict(mended, default=None, return_dtype=pl.String))
    return pl.when(valid == "").then(None).otherwise(valid).alias(name)


def _empty(integers: Sequence[str], texts: Sequence[str]) -> pl.DataFrame:
    return pl.DataFrame(schema={**dict.fromkeys(integers, pl.Int64), **dict.fromkeys(texts, pl.String)})
