"""Runs on other storage: what fsspec reaches is read as if it lay here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from command import run
from conftest import FIXTURES
from scale_runs import TWO, assert_same

import nsysk3
from nsysk3.errors import InputError
from nsysk3.run.remote import RemotePath, nearby, to_path
from nsysk3.scale.pool import Pool

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def memory() -> Iterator[str]:
    """An empty place in memory, as a URL."""
    files = fsspec.filesystem("memory")
    files.store.clear()
    yield "memory://bucket"
    files.store.clear()


def upload(path: Path, url: str) -> None:
    fsspec.filesystem("memory").put(str(path), url.removeprefix("memory:/"), recursive=path.is_dir())


def test_a_run_directory_in_memory(memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    upload(FIXTURES / "torch-h200" / "pp2", f"{memory}/run")
    here, there = nsysk3.analyze(FIXTURES / "torch-h200" / "pp2"), nsysk3.analyze(f"{memory}/run")
    assert_same(here, there)
    assert there.document.reports[0].path == "nodes/localhost/trace.sqlite"
    assert list(tmp_path.iterdir()) == []  # no copy stays


def test_files_and_folders_in_memory(memory: str) -> None:
    upload(TWO, f"{memory}/two")
    found = nsysk3.analyze(f"{memory}/two")
    assert [report.path for report in found.document.reports] == [f"{memory}/two/node{n}.sqlite" for n in (0, 1)]
    assert_same(found, nsysk3.analyze([f"{memory}/two/node0.sqlite", f"{memory}/two/node1.sqlite"]))
    local = nsysk3.analyze(TWO)
    assert [name for name, table in local.tables.items() if not table.equals(found.tables[name])] == []


def test_bad_ones_are_named_by_their_urls(memory: str, tmp_path: Path) -> None:
    (tmp_path / "bad.sqlite").write_text("no database")
    upload(TWO, f"{memory}/two")
    upload(tmp_path / "bad.sqlite", f"{memory}/two/bad.sqlite")
    ran = run("analyze", f"{memory}/two", "--out", tmp_path / "out")
    assert ran.code == 2
    assert f"{memory}/two/bad.sqlite: not an SQLite file" in ran.err
    assert run("analyze", f"{memory}/nothing").err == f"nsysk3: {memory}/nothing: no such file or directory\n"


def test_workers_copy_and_forget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Pool(2) as crew:
        there = nsysk3.analyze(f"local://{TWO}", crew=crew)
    assert len(there.rank_metrics) == 2
    assert there.document.reports[0].path == f"local://{TWO}/node0.sqlite"
    assert list(tmp_path.iterdir()) == []


def test_without_out_results_are_printed_only(memory: str) -> None:
    upload(TWO, f"{memory}/two")
    ran = run("analyze", f"{memory}/two")
    assert ran.code == 0
    assert " ranks, " in ran.out
    assert ran.err == "nsysk3: results of a URL are not kept; pass --out DIR to keep them\n"


def test_an_export_directory_is_copied_whole(tmp_path: Path) -> None:
    source = tmp_path / "t_pqtdir"
    source.mkdir()
    (source / "A.parquet").write_bytes(b"1")
    (source / "B.parquet").write_bytes(b"22")
    with nearby(to_path(f"local://{source}")) as copy:
        assert {file.name: file.read_bytes() for file in copy.iterdir()} == {"A.parquet": b"1", "B.parquet": b"22"}
        assert copy != source
    assert not copy.exists()


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("s3://bucket/run", "s3://bucket/run"),
        (Path("s3://bucket/run"), "s3://bucket/run"),
        ("SSH://host:22/data/run", "ssh://host:22/data/run"),
        ("ssh://me:secret@host/run", "ssh://me:[redacted]@host/run"),
        ("file:///data/a%20b", "/data/a b"),
        ("plain/path", "plain/path"),
        ("odd:name", "odd:name"),
    ],
)
def test_urls_and_paths_are_told_apart(given: str | Path, path: str) -> None:
    found = to_path(given)
    assert str(found) == path
    assert isinstance(found, RemotePath) == ("://" in path)
    if isinstance(found, RemotePath):
        assert str(found / "nodes" / "a") == f"{path}/nodes/a"
        assert (found / "nodes").parent == found


def test_schemes_and_drivers_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"nope://x: Protocol not known: nope"):
        nsysk3.analyze("nope://x")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    ran = run("analyze", "s3://bucket/run")
    assert ran.code == 3
    assert ran.err == "nsysk3: s3://bucket/run: needs s3fs: pip install s3fs, here and on every worker\n"
    monkeypatch.setitem(sys.modules, "fsspec", None)
    assert run("analyze", "s3://bucket/run").err == (
        "nsysk3: s3://bucket/run: URLs need fsspec: pip install 'nsysk3[scale]'\n"
    )


@pytest.mark.parametrize(
    ("url", "package"),
    [
        ("s3://bucket/run", "s3fs"),
        ("gs://bucket/run", "gcsfs"),
        ("https://host/run", "aiohttp"),
        ("ssh://host/run", "paramiko"),
        ("sftp://host/run", "paramiko"),
        ("abfs://container/run", "adlfs"),
    ],
)
def test_the_package_that_is_wanting_is_named(url: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    for module in ("http", "sftp"):
        monkeypatch.delitem(sys.modules, f"fsspec.implementations.{module}", raising=False)
    monkeypatch.setattr(sys.modules["fsspec.registry"], "_registry", {})
    ran = run("analyze", url)
    assert (ran.code, ran.out) == (3, "")
    assert ran.err == f"nsysk3: {url}: needs {package}: pip install {package}, here and on every worker\n"


def test_whatever_a_storage_raises_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoCredentialsError(Exception):
        pass

    def refuse(*_: object, **__: object) -> None:
        raise NoCredentialsError("no credentials\nsecond line")

    broken = SimpleNamespace(exists=refuse, isfile=refuse, isdir=refuse)
    monkeypatch.setattr(fsspec, "url_to_fs", lambda url: (broken, url))
    ran = run("analyze", "s3://bucket/run")
    assert ran.code == 2
    assert ran.err == "nsysk3: s3://bucket/run: cannot be opened (NoCredentialsError: no credentials)\n"
