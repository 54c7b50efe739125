"""Kinds of export: a database or a folder of tables, which must hold the same."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import polars as pl
import pytest
from exports import GEMM, Export, gpid, ns, two_ranks

import nsysk3
from nsysk3.trace.source import AnyOf, SqliteSource, open_source


@pytest.mark.parametrize("kind", ["sqlite", "parquetdir", "arrowdir"])
def test_rows_can_be_chosen_by_any_of_several_columns(tmp_path: Path, kind: str) -> None:
    export = Export()
    for text, start in (("a", 1), (None, 2), (None, 3), (None, 400)):
        export.nvtx(text, start, start + 1)
    export.nvtx("registered", 5, 6, registered=True)
    path = export.write(tmp_path / "r.sqlite") if kind == "sqlite" else export.write_directory(tmp_path / "r", kind)
    source = open_source(path)
    starts = {ns(start): start for start in (1, 2, 3, 5, 400)}
    chosen: dict[tuple[int, ...], AnyOf] = {
        (1,): {"text": None},
        (1, 400): {"text": None, "start": range(ns(100), 2**63)},
        (3,): {"start": [ns(3)]},
        (5,): {"textId": [export.string("registered")], "absent": None},
        (): {"absent": [1]},
    }
    for expected, any_of in chosen.items():
        found = source.read("NVTX_EVENTS", ("start",), only={"eventType": [59]}, any_of=any_of)["start"]
        assert tuple(starts[start] for start in found) == expected


@pytest.mark.parametrize("large", [False, True], ids=["string", "large_string"])
@pytest.mark.parametrize("kind", ["parquetdir", "arrowdir"])
def test_directories_hold_what_sqlite_holds(tmp_path: Path, kind: str, large: bool) -> None:
    export = two_ranks().memcpy(0, 30, pid=11).diagnostic("NVTX payload extension is incompatible").host("node7")
    one = nsysk3.analyze(export.write(tmp_path / "r.sqlite"))
    suffix = "_pqtdir" if kind == "parquetdir" else "_arwdir"
    other = nsysk3.analyze(export.write_directory(tmp_path / f"r{suffix}", kind, large=large))
    assert other.document.reports[0].kind == kind
    assert other.document.notes == one.document.notes
    for name, table in one.tables.items():
        assert table.equals(other.tables[name]), name


def test_a_scan_that_is_shared_by_readers_gives_every_row_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export = Export().table("CUPTI_ACTIVITY_KIND_KERNEL")
    export.kernels(GEMM, [(index, index + 0.5) for index in range(1000)])
    path = export.write(tmp_path / "r.sqlite")
    with closing(sqlite3.connect(path)) as connection:  # holes, as a trimmed export has
        connection.execute("DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL WHERE rowid % 7 = 0 OR rowid BETWEEN 300 AND 650")
        connection.commit()
        expected = connection.execute("SELECT start, end, globalPid FROM CUPTI_ACTIVITY_KIND_KERNEL").fetchall()
    columns = ("start", "end", "globalPid")
    assert SqliteSource(path).read("CUPTI_ACTIVITY_KIND_KERNEL", columns).rows() == expected
    monkeypatch.setattr("nsysk3.trace.source._PARTITION_ROWS", 10)
    assert SqliteSource(path).read("CUPTI_ACTIVITY_KIND_KERNEL", columns).rows() == expected


@pytest.mark.parametrize("kind", ["sqlite", "parquetdir", "arrowdir"])
def test_a_source_answers_for_what_it_lacks(tmp_path: Path, kind: str) -> None:
    export = Export().kernel(GEMM, 0, 10).kernel(GEMM, 20, 30, pid=2).table("NVTX_EVENTS")
    path = export.write(tmp_path / "r.sqlite") if kind == "sqlite" else export.write_directory(tmp_path / "r", kind)
    source = open_source(path)
    assert source.kind == kind
    assert source.columns("NO_SUCH_TABLE") == ()
    nothing = source.read("NO_SUCH_TABLE", ("a",), texts=("b",))
    assert (nothing.rows(), dict(nothing.schema)) == ([], {"a": pl.Int64, "b": pl.String})
    lacking = source.read("CUPTI_ACTIVITY_KIND_KERNEL", ("start", "noSuch"), texts=("noText",))
    assert lacking.rows() == [(ns(0), None, None), (ns(20), None, None)]
    nowhere = source.read("CUPTI_ACTIVITY_KIND_KERNEL", ("noSuch",))
    assert nowhere["noSuch"].to_list() == [None, None]
    chosen = source.read("CUPTI_ACTIVITY_KIND_KERNEL", ("start",), only={"globalPid": [gpid(2)], "noSuch": [1]})
    assert chosen["start"].to_list() == [ns(20)]
    assert source.read("CUPTI_ACTIVITY_KIND_KERNEL", ("start",), only={"globalPid": []}).is_empty()
    empty = source.read("NVTX_EVENTS", ("start",), texts=("text",))
    assert (empty.rows(), dict(empty.schema)) == ([], {"start": pl.Int64, "text": pl.String})
    blobs = source.read("NVTX_EVENTS", ("start", "noSuch"), blobs=("binaryData",))
    assert (blobs.rows(), dict(blobs.schema)) == ([], {"start": pl.Int64, "noSuch": pl.Int64, "binaryData": pl.Binary})
