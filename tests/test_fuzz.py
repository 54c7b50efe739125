"""Damaged traces: whatever is wrong with a file, one line says so or the rest is analysed; never a traceback.

Every variant is made from a seed, so that a failure here is a failure everywhere.
"""

from __future__ import annotations

import random
import shutil
import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command import run as command
from conftest import GRAPH
from exports import Export, two_ranks

from nsysk3.trace.load import load

# As many as the analysis may take on a loaded machine, and far from for ever.
HUNG_SECONDS = 120


@contextmanager
def not_for_ever() -> Iterator[None]:
    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise TimeoutError("the command hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(HUNG_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def survives(path: Path, *options: str) -> int:
    """Analyse a damaged input; its exit code, once everything else is as it must be."""
    with not_for_ever():
        ran = command("analyze", path, *options)
    assert ran.code in (0, 2), ran.err
    assert "Traceback" not in ran.err
    if ran.code == 2:
        assert ran.out == ""
        assert ran.err.count("\n") == 1, ran.err
        assert str(path) in ran.err, ran.err
        assert len(ran.err) < 1000
    else:
        assert ran.err == ""
        assert " ranks, " in ran.out
    return ran.code


# --- bytes of a real file


def damaged(seed: int, kind: str) -> bytes:
    """The real trace with one kind of damage."""
    chance = random.Random(f"{kind} {seed}")
    data = bytearray(GRAPH.read_bytes())
    page = 4096
    if kind == "truncated":
        pages = chance.randrange(len(data) // page)
        return bytes(data[: pages * page + chance.choice((0, 0, 1, -1, chance.randrange(page)))])
    if kind == "flipped":
        for _ in range(chance.choice((1, 10, 100, 1000))):
            data[chance.randrange(len(data))] = chance.randrange(256)
    elif kind == "flipped in one page":
        start = chance.randrange(len(data) // page) * page
        for _ in range(chance.choice((4, 40))):
            data[start + chance.randrange(page)] = chance.randrange(256)
    elif kind == "zeroed":
        for _ in range(chance.choice((1, 4, 16))):
            start = chance.randrange(len(data) // page) * page
            data[start : start + page] = bytes(page)
    elif kind == "swapped":
        one, other = (chance.randrange(1, len(data) // page) * page for _ in range(2))
        data[one : one + page], data[other : other + page] = data[other : other + page], data[one : one + page]
    elif kind == "header":
        for _ in range(chance.choice((1, 3))):
            data[chance.randrange(16, 100)] = chance.randrange(256)
    elif kind == "repeated":
        data += data[chance.randrange(len(data)) :]
    return bytes(data)


DAMAGE = {
    "truncated": 16,
    "flipped": 18,
    "flipped in one page": 10,
    "zeroed": 8,
    "swapped": 5,
    "header": 8,
    "repeated": 1,
}


@pytest.mark.parametrize(("kind", "seed"), [(kind, seed) for kind, many in DAMAGE.items() for seed in range(many)])
def test_damaged_bytes(tmp_path: Path, kind: str, seed: int) -> None:
    path = tmp_path / "r.sqlite"
    path.write_bytes(damaged(seed, kind))
    survives(path)


@pytest.mark.parametrize("seed", range(6))
def test_bytes_that_were_never_a_database(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    path = tmp_path / "r.sqlite"
    noise = chance.randbytes(chance.randrange(1, 50_000))
    path.write_bytes((b"SQLite format 3\0" if seed % 2 else b"") + noise)
    assert survives(path) == 2


# --- tables and cells of a small one

READ = {
    "CUPTI_ACTIVITY_KIND_KERNEL": "start end deviceId streamId correlationId globalPid shortName demangledName "
    "graphNodeId",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "start end deviceId globalPid bytes copyKind",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start end globalTid correlationId nameId",
    "NVTX_EVENTS": "start end eventType text globalTid textId domainId binaryData",
    "NVTX_PAYLOAD_SCHEMA_ENTRIES": "domainId schemaId type name offset",
    "StringIds": "id value",
    "TARGET_INFO_GPU": "id cuDevice uuid name",
    "TARGET_INFO_CUDA_DEVICE": "gpuId cudaId pid",
    "TARGET_INFO_SESSION_START_TIME": "utcEpochNs",
    "ANALYSIS_DETAILS": "duration startTime",
    "META_DATA_EXPORT": "name value",
    "META_DATA_CAPTURE": "name value",
    "PROCESSES": "globalPid name",
    "ThreadNames": "nameId globalTid",
    "MPI_RANKS": "globalTid rank",
    "DIAGNOSTIC_EVENT": "severity text",
}
CELLS: dict[str, Any] = {
    "null": None,
    "text": "not a number",
    "a number as text": "123",
    "huge": 2**63 - 1,
    "most negative": -(2**63),
    "minus one": -1,
    "real": 1.5e300,
    "not finite": float("inf"),
    "bytes": b"\xff\x00\xfe" * 30,
    "long": "x" * 200_000,
    "control": "\x00\x1b[2J\ud7ff\u202e\n",
}


def whole() -> Export:
    """A small export in which every table that is read has rows."""
    export = two_ranks(forwards=1).memcpy(0, 30, pid=11).host("node0").meta("EXPORT_CONFIG_TIME_SHIFT", "0")
    export.env(RANK="0").process(11, "sglang::scheduler_PP0_TP0").thread(11, 11, "python").mpi_rank(11, 0).mpi_rank(
        12, 1
    )
    return export.diagnostic("something is amiss").nvtx("nsysk3.rank world=0 tp=0", 0, 1, pid=11, event_type=34)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whole().write(tmp_path_factory.mktemp("good") / "r.sqlite")


@pytest.fixture
def changed(good: Path, tmp_path: Path) -> Callable[..., Path]:
    """The small export after some SQL."""

    def changed(*statements: str, values: tuple[Any, ...] = ()) -> Path:
        path = Path(shutil.copy(good, tmp_path / "r.sqlite"))
        with closing(sqlite3.connect(path)) as connection:
            for statement in statements:
                connection.execute(statement, values)
            connection.commit()
        return path

    return changed


def test_the_small_export_has_all_that_is_read(good: Path) -> None:
    with closing(sqlite3.connect(good)) as connection:
        for table, columns in READ.items():
            assert connection.execute(f"SELECT {columns.replace(' ', ', ')} FROM {table}").fetchone(), table
    assert survives(good) == 0


@pytest.mark.parametrize("table", READ)
def test_tables_dropped_emptied_renamed_or_made_of_nulls(changed: Callable[..., Path], table: str) -> None:
    nulls = ", ".join(f"{column} = NULL" for column in READ[table].split())
    ways = [
        f"DELETE FROM {table}",
        f"UPDATE {table} SET {nulls}",
        f"ALTER TABLE {table} RENAME TO {table}_V2",
        f"INSERT INTO {table} SELECT * FROM {table}",
        f"ALTER TABLE {table} RENAME TO {table}_V99999999999999999999",
        f"CREATE TABLE {table}_V3 (other INTEGER)",
    ]
    place = list(READ).index(table)
    for statement in (f"DROP TABLE {table}", ways[place % 6], ways[(place + 3) % 6]):
        code = survives(changed(statement))
        if table != "CUPTI_ACTIVITY_KIND_KERNEL":  # without the rest, kernels are still kernels
            assert code == 0, statement


@pytest.mark.parametrize(("table", "column"), [(t, c) for t, columns in READ.items() for c in columns.split()])
def test_columns_dropped_or_of_another_kind(changed: Callable[..., Path], table: str, column: str) -> None:
    survives(changed(f"ALTER TABLE {table} DROP COLUMN {column}"))
    # another kind of cell for each column
    place = [c for columns in READ.values() for c in columns.split()].index(column) + list(READ).index(table)
    name = list(CELLS)[place % len(CELLS)]
    survives(changed(f"UPDATE {table} SET {column} = ?", values=(CELLS[name],)))


@pytest.mark.parametrize("name", CELLS)
def test_one_bad_cell_in_a_column(changed: Callable[..., Path], name: str) -> None:
    for table, column in (
        ("CUPTI_ACTIVITY_KIND_KERNEL", "start"),
        ("NVTX_EVENTS", "globalTid"),
        ("StringIds", "value"),
    ):
        survives(changed(f"UPDATE {table} SET {column} = ? WHERE rowid = 1", values=(CELLS[name],)))


@pytest.mark.parametrize("name", ["real", "bytes", "text"])
def test_a_bad_cell_costs_no_other_cell(changed: Callable[..., Path], name: str) -> None:
    """A column that holds one real number is still read to the last nanosecond: times on UTC have more digits."""
    utc = 1_795_978_369_579_715_117
    statement = "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = start + ?, end = end + ?"
    before = load(changed(statement, values=(utc, utc))).events
    path = changed(statement, values=(utc, utc))
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = ? WHERE rowid = 1", [CELLS[name]])
        connection.commit()
    after = load(path).events
    kernels = [events.filter(pl.col("kind") == "kernel") for events in (before, after)]
    assert kernels[1].height == kernels[0].height - 1
    assert kernels[0].join(kernels[1], on=["start", "end", "stream", "rank"], how="semi").height == kernels[1].height


def test_objects_that_are_no_tables(changed: Callable[..., Path]) -> None:
    kernel = "CUPTI_ACTIVITY_KIND_KERNEL"
    survives(changed(f"ALTER TABLE {kernel} RENAME TO kept", f"CREATE VIEW {kernel} AS SELECT * FROM kept"))
    survives(changed(f"CREATE VIEW loop AS SELECT * FROM {kernel}, {kernel}, {kernel}, {kernel}, {kernel}"))
    survives(changed('CREATE TABLE "a table; with ""odd"" \'names\'" ("select" INTEGER, "from; --" TEXT)'))
    survives(changed(f"CREATE TABLE other AS SELECT * FROM {kernel}", f"DROP TABLE {kernel}", "CREATE TABLE K (x)"))
    survives(changed("CREATE TABLE MPI_RANKS_V2 (globalTid INTEGER PRIMARY KEY, rank INTEGER) WITHOUT ROWID"))


def test_a_table_of_a_module_that_is_not_there(changed: Callable[..., Path]) -> None:
    path = changed(
        "PRAGMA writable_schema=1",
        "INSERT INTO sqlite_master VALUES ('table', 'NVTX_EVENTS_V7', 'NVTX_EVENTS_V7', 0, "
        "'CREATE VIRTUAL TABLE NVTX_EVENTS_V7 USING nowhere(x)')",
    )
    survives(path)


# --- directories of tables


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", ["parquetdir", "arrowdir"])
def test_damaged_directories(tmp_path: Path, kind: str, seed: int) -> None:
    chance = random.Random(f"{kind} {seed}")
    folder = whole().write_directory(tmp_path / "r", kind)
    files = sorted(folder.iterdir())
    kernels = next(file for file in files if "KERNEL" in file.name)
    for file in [kernels] if seed % 3 == 0 else chance.sample(files, 3):
        data = bytearray(file.read_bytes())
        match seed % 4:
            case 0:
                data = data[: chance.randrange(len(data))]
            case 1:
                for _ in range(chance.choice((1, 20, 200))):
                    data[chance.randrange(len(data))] = chance.randrange(256)
            case 2:
                data = bytearray()
            case 3:
                data = bytearray(chance.randbytes(len(data)))
        file.write_bytes(data)
    survives(folder)


@pytest.mark.parametrize("kind", ["text", "bool", "float", "list", "dictionary", "timestamp", "null"])
def test_columns_of_another_type_in_directories(tmp_path: Path, kind: str) -> None:
    folder = whole().write_directory(tmp_path / "r")
    for table, column in (
        ("CUPTI_ACTIVITY_KIND_KERNEL", "start"),
        ("NVTX_EVENTS", "text"),
        ("NVTX_EVENTS", "binaryData"),
        ("StringIds", "id"),
    ):
        file = folder / f"{table}.parquet"
        kept = file.read_bytes()
        frame = pq.read_table(file)
        count = frame.num_rows
        values = {
            "text": pa.array(["x"] * count),
            "bool": pa.array([True] * count),
            "float": pa.array([1.5] * count),
            "list": pa.array([[1, 2]] * count),
            "dictionary": pa.array(["x"] * count).dictionary_encode(),
            "timestamp": pa.array([5] * count, pa.timestamp("ns")),
            "null": pa.nulls(count),
        }[kind]
        place = frame.column_names.index(column)
        pq.write_table(frame.set_column(place, column, values), file)
        survives(folder)
        file.write_bytes(kept)


# --- one bad input among good ones


@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_file_never_takes_the_others_with_it(tmp_path: Path, good: Path, seed: int) -> None:
    shutil.copy(good, tmp_path / "good.sqlite")
    (tmp_path / "bad.sqlite").write_bytes(damaged(seed, "truncated"))
    with not_for_ever():
        ran = command("analyze", tmp_path)
    assert ran.code in (0, 2)
    assert " ranks, " in ran.out
    assert len([line for line in ran.err.splitlines() if "bad.sqlite" in line]) == (ran.code == 2)
