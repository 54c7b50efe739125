"""One Nsight Systems export, whatever its kind and version, as tables that may or may not be there.

Nothing here knows a product version: what a file holds is asked of the file (SQLAlchemy reflection, parquet and
Arrow schemas).  Bulk columns then move column-wise into polars.  Files are opened read-only and never altered.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

# Not adbc_driver_sqlite.dbapi, which imports pandas: a third of the start-up time of a command.
import adbc_driver_manager as adbc
import adbc_driver_sqlite
import polars as pl
import sqlalchemy as sa

from nsysk3.errors import InputError

# Rows per partition below which a second reader thread costs more than it saves.
_PARTITION_ROWS = 200_000
_READERS = 4
# The driver's default of 1024 cuts a column of millions of rows into thousands of chunks.
_BATCH = {adbc_driver_sqlite.StatementOptions.BATCH_ROWS.value: "65536"}
_SQLITE_MAGIC = b"SQLite format 3\x00"

Only = Mapping[str, Sequence[int]]
AnyOf = Mapping[str, Sequence[int] | None]


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
        self,
        table: str,
        integers: Sequence[str] = (),
        *,
        texts: Sequence[str] = (),
        blobs: Sequence[str] = (),
        only: Only | None = None,
        any_of: AnyOf | None = None,
    ) -> pl.DataFrame:
        """Rows of a table, in file order.

        ``integers`` come back as Int64 (unsigned 64-bit values wrap, as SQLite stores them), ``texts`` as String with
        invalid UTF-8 replaced, ``blobs`` as Binary, null where empty.  A column or table that the export lacks comes
        back as nulls or no rows.  ``only`` keeps rows whose column holds one of the given integers; a column that is
        absent filters nothing.  Of those rows ``any_of`` keeps the ones that have one of the given integers, or with
        None any value, in at least one of its columns; a ``range`` costs nothing however long it is.
        """

    def holds(self, table: str, column: str) -> bool:
        """Whether any row has a value in the column; False when there is no such column."""


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
        _ = self._names

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
    def _names(self) -> dict[str, list[str]]:
        """Columns of each table, in one query: an export has ninety tables, of which a dozen are read."""
        query = sa.text(
            "SELECT m.name, c.name FROM sqlite_master AS m JOIN pragma_table_info(m.name) AS c "
            "WHERE m.type = 'table' ORDER BY m.name, c.cid"
        )
        names: dict[str, list[str]] = {}
        try:
            with self._engine.connect() as connection:
                for table, column in connection.execute(query):
                    if not table.startswith(("ENUM_", "sqlite_")):
                        names.setdefault(table, []).append(column)
        except (sa.exc.SQLAlchemyError, sqlite3.Error, UnicodeError) as error:
            raise self._broken(error) from error
        return names

    @cached_property
    def _made(self) -> dict[str, sa.Table]:
        return {}

    def _broken(self, error: BaseException) -> InputError:
        detail = str(getattr(error, "orig", None) or error).splitlines()[0] if str(error) else type(error).__name__
        return InputError(f"{self.path}: damaged or truncated SQLite file ({detail}); export the report again")

    def _table(self, table: str) -> sa.Table | None:
        name = versioned(self._names, table)
        if name is not None and name not in self._made:
            self._made[name] = _bare_table(name, self._names[name])
        return None if name is None else self._made[name]

    def columns(self, table: str) -> tuple[str, ...]:
        """See Source."""
        found = self._table(table)
        return () if found is None else tuple(found.c.keys())

    def read(
        self,
        table: str,
        integers: Sequence[str] = (),
        *,
        texts: Sequence[str] = (),
        blobs: Sequence[str] = (),
        only: Only | None = None,
        any_of: AnyOf | None = None,
    ) -> pl.DataFrame:
        """See Source."""
        found = self._table(table)
        if found is None:
            return _empty(integers, texts, blobs)
        present = [name for name in integers if name in found.c]
        # Text travels as bytes: Arrow strings must be valid UTF-8 and NVTX text need not be.
        others = [_bytes(found.c[name]).label(name) for name in (*texts, *blobs) if name in found.c]
        frame = None
        with suppress(InputError):
            frame = self._fetch(found, _query(found, [*[found.c[name] for name in present], *others], only, any_of))
        if frame is None or any(frame.schema[name] != pl.Int64 for name in present):
            # The driver guesses a column's type from its first rows; one cell of another kind would spoil the others.
            whole = [_whole_number(found.c[name]).label(name) for name in present]
            frame = self._fetch(found, _query(found, [*whole, *others], only, any_of))
        if frame.is_empty():  # no row to guess from: the driver calls every column an integer
            return _empty(integers, texts, blobs)
        return _complete(frame, integers, texts, blobs)

    def holds(self, table: str, column: str) -> bool:
        """See Source."""
        found = self._table(table)
        if found is None or column not in found.c:
            return False
        query = sa.select(sa.literal(1)).select_from(found).where(found.c[column].is_not(None)).limit(1)
        try:
            with self._engine.connect() as connection:
                return connection.execute(query).first() is not None
        except (sa.exc.SQLAlchemyError, sqlite3.Error) as error:
            raise self._broken(error) from error

    def _fetch(self, table: sa.Table, query: sa.Select[Any]) -> pl.DataFrame:
        """Run a query column-wise, split over rowid ranges so that reader threads share the scan."""
        try:
            parts = list(self._partitions(table))
            queries = [_compiled(query.where(part) if part is not None else query) for part in parts]
            if len(queries) == 1:
                frames = [self._columns(queries[0])]
            else:
                with ThreadPoolExecutor(_READERS) as pool:
                    frames = list(pool.map(self._columns, queries))
        except (adbc.Error, pl.exceptions.PolarsError, sa.exc.SQLAlchemyError, sqlite3.Error) as error:
            raise self._broken(error) from error
        filled = [frame for frame in frames if frame.height] or frames[:1]
        try:
            return pl.concat(filled, rechunk=True)
        except pl.exceptions.PolarsError as error:  # parts that differ in type
            raise self._broken(error) from error

    def _columns(self, query: str) -> pl.DataFrame:
        with (
            adbc_driver_sqlite.connect(self._uri) as database,
            adbc.AdbcConnection(database) as connection,
            adbc.AdbcStatement(connection) as statement,
        ):
            statement.set_options(**_BATCH)
            statement.set_sql_query(query)
            stream, _ = statement.execute_query()
            return pl.DataFrame(stream)

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
            import pyarrow as pa

            # Nsight writes the IPC stream format, which scan_ipc (the file format) refuses.
            with pa.memory_map(str(file)) as mapped:
                return pl.DataFrame(pl.from_arrow(pa.ipc.open_stream(mapped).read_all())).lazy()
        except (pl.exceptions.PolarsError, ValueError, OSError) as error:  # ArrowInvalid is a ValueError
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
        self,
        table: str,
        integers: Sequence[str] = (),
        *,
        texts: Sequence[str] = (),
        blobs: Sequence[str] = (),
        only: Only | None = None,
        any_of: AnyOf | None = None,
    ) -> pl.DataFrame:
        """See Source."""
        names = self.columns(table)
        scan = self._scan(table)
        if scan is None or not names:
            return _empty(integers, texts, blobs)
        for name, values in (only or {}).items():
            if name in names:
                scan = scan.filter(_wrapped(pl.col(name)).is_in(list(values)))
        if any_of is not None:
            kept = [_holds_one(pl.col(name), values) for name, values in any_of.items() if name in names]
            scan = scan.filter(pl.any_horizontal(kept or [pl.lit(False)]))
        present = [name for name in integers if name in names]
        columns = [_wrapped(pl.col(name)) for name in present]
        columns += [pl.col(name).cast(pl.Binary) for name in (*texts, *blobs) if name in names]
        frame = self._collect(table, scan.select(columns or [pl.first().alias("_")]))
        return _complete(frame, integers, texts, blobs)

    def holds(self, table: str, column: str) -> bool:
        """See Source."""
        scan = self._scan(table)
        if scan is None or column not in self.columns(table):
            return False
        found: bool = self._collect(table, scan.select(pl.col(column).is_not_null().any())).item()
        return found

    def _collect(self, table: str, scan: pl.LazyFrame) -> pl.DataFrame:
        try:
            return scan.collect()
        except (pl.exceptions.PolarsError, OSError) as error:
            raise self._broken(self._files[versioned(self._files, table) or table], error) from error


def _bare_table(name: str, columns: Sequence[str]) -> sa.Table:
    return sa.Table(name, sa.MetaData(), *[sa.Column(column, sa.Integer) for column in columns])


def _bytes(column: sa.ColumnElement[object]) -> sa.ColumnElement[object]:
    # Without the coalesce a first batch of nulls would make the driver guess an integer column.
    return sa.cast(sa.func.coalesce(column, sa.literal_column("x''")), sa.LargeBinary)


def _compiled(query: sa.Select[Any]) -> str:
    from sqlalchemy.dialects import sqlite

    # The only literals are the integers of `only` and of the rowid ranges.
    return str(query.compile(dialect=sqlite.dialect(), compile_kwargs={"literal_binds": True}))


def _query(
    table: sa.Table, columns: Sequence[sa.ColumnElement[Any]], only: Only | None, any_of: AnyOf | None
) -> sa.Select[Any]:
    # A table asked for none of its columns still has as many rows.
    query = sa.select(*(columns or [sa.literal(1).label("_")])).select_from(table)
    for name, values in (only or {}).items():
        if name in table.c:
            query = query.where(_among(table.c[name], values))
    if any_of is not None:
        kept = [_among(table.c[name], values) for name, values in any_of.items() if name in table.c]
        query = query.where(sa.or_(sa.false(), *kept))
    return query


def _among(column: sa.ColumnElement[Any], values: Sequence[int] | None) -> sa.ColumnElement[bool]:
    if values is None:
        return column.is_not(None)
    if isinstance(values, range):
        return column.between(values.start, values.stop - 1)
    wanted = [int(value) for value in values]
    # Two comparisons spare most rows the look-up in the list.
    near = column.between(min(wanted), max(wanted)) if wanted else sa.false()
    return sa.and_(near, column.in_(wanted))


def _holds_one(column: pl.Expr, values: Sequence[int] | None) -> pl.Expr:
    if values is None:
        return column.is_not_null()
    if isinstance(values, range):
        return _wrapped(column).is_between(values.start, values.stop - 1)
    return _wrapped(column).is_in(list(values))


def _whole_number(column: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    """The cells that hold an integer; what else a damaged row holds is null."""
    return sa.case((sa.func.typeof(column) == sa.literal("integer"), column))


def _wrapped(column: pl.Expr) -> pl.Expr:
    """Unsigned 64-bit ids as SQLite stores them: the same bits, read as signed."""
    as_bits = column.cast(pl.Int128, strict=False)
    return pl.when(as_bits >= 2**63).then(as_bits - 2**64).otherwise(as_bits).cast(pl.Int64, strict=False).name.keep()


def _complete(frame: pl.DataFrame, integers: Sequence[str], texts: Sequence[str], blobs: Sequence[str]) -> pl.DataFrame:
    """All columns asked for, in order: text decoded, absent ones null."""
    found = frame.columns
    columns = [pl.col(name) if name in found else pl.lit(None, pl.Int64).alias(name) for name in integers]
    decoded = [_decoded(frame[name]) if name in found else pl.lit(None, pl.String).alias(name) for name in texts]
    for name in blobs:
        blob = pl.when(pl.col(name) != b"").then(name) if name in found else pl.lit(None, pl.Binary)
        columns.append(blob.alias(name))
    # Not select alone: a frame of nothing but literals would have one row, whatever the table has.
    return frame.with_columns(*columns, *decoded).select(*integers, *texts, *blobs)


def _decoded(raw: pl.Series) -> pl.Series:
    """Text out of bytes, null where empty."""
    try:
        text = raw.cast(pl.String)
    except pl.exceptions.PolarsError:  # not all of it is UTF-8, and polars has no lenient decoding
        mended = (None if each is None else each.decode("utf-8", "replace") for each in raw)
        text = pl.Series(raw.name, list(mended), pl.String)
    return text.set(text == "", None)


def _empty(integers: Sequence[str], texts: Sequence[str], blobs: Sequence[str]) -> pl.DataFrame:
    kinds = {pl.Int64: integers, pl.String: texts, pl.Binary: blobs}
    return pl.DataFrame(schema={name: kind for kind, names in kinds.items() for name in names})
