"""Results are there as a whole or not at all."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from command import run
from conftest import FIXTURES

import nsysk3
from nsysk3.errors import MissingToolError
from nsysk3.result import Result

TP2 = FIXTURES / "h200" / "tp2.sqlite"


@pytest.fixture(scope="module")
def result() -> Result:
    return nsysk3.analyze(TP2)


def test_a_disk_that_fills_up_leaves_the_folder_as_it_was(
    result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    result.save(out)
    before = {file.name: (file.stat().st_mtime_ns, file.read_bytes()) for file in out.iterdir()}
    write = pl.DataFrame.write_parquet
    written = []

    def until_full(table: pl.DataFrame, file: Path) -> None:
        written.append(file)
        if len(written) == 5:
            raise pl.exceptions.ComputeError("No space left on device (os error 28)")
        write(table, file)

    monkeypatch.setattr(pl.DataFrame, "write_parquet", until_full)
    with pytest.raises(MissingToolError, match=r"results cannot be written here \(No space left"):
        result.save(out)
    assert len(written) == 5
    assert {file.name: (file.stat().st_mtime_ns, file.read_bytes()) for file in out.iterdir()} == before
    written.clear()
    with pytest.raises(MissingToolError):
        result.save(tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("command", ["report", "analyze"])
def test_tables_without_their_document_are_called_what_they_are(result: Result, tmp_path: Path, command: str) -> None:
    out = result.save(tmp_path / "out")
    (out / "result.json").unlink()
    done = run(command, out)
    assert done.code == 2
    assert done.err == f"nsysk3: {out}: tables of an analysis without its result.json; analyze the traces again\n"


def test_traces_beside_them_are_read_all_the_same(result: Result, tmp_path: Path) -> None:
    out = result.save(tmp_path)
    (out / "result.json").unlink()
    (out / "tp2.sqlite").symlink_to(TP2)
    assert nsysk3.analyze(out).rank_metrics.height == result.rank_metrics.height
