"""Missing ranks are asked for however a run is given, and results that cannot be written leave nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from exports import Export, two_ranks
from input_files import small

from nsysk3.analysis.analyze import analyze
from nsysk3.errors import MissingToolError
from nsysk3.run.inputs import find_inputs
from nsysk3.trace.load import load


@pytest.fixture
def short(tmp_path: Path) -> Path:
    """A run of two hosts, one rank each, of which one report came."""
    small(tmp_path / "run" / "nodes" / "a" / "trace.sqlite")
    ranks = [{"world_rank": rank, "host": host, "device": 0, "pp": rank} for rank, host in enumerate("ab")]
    (tmp_path / "run" / "run.json").write_text(json.dumps({"ranks": ranks}), "utf-8")
    return tmp_path / "run"


def test_its_nodes_folder_means_the_run(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (problem,) = load(short).problems
    assert "rank 1 of b" in problem.message
    for paths in ([short / "nodes"], [short, short], [short / "nodes", short / "nodes"]):
        run = load(paths)
        assert (run.run_dir, run.problems, run.ranks["rank_source"].to_list()) == (short, (problem,), ["manifest"])
    assert load([short, short]).directory == short
    monkeypatch.chdir(short / "nodes")
    assert load(".").run_dir == short


@pytest.mark.parametrize("given", ["nodes/a", "nodes/a/trace.sqlite"])
def test_a_manifest_that_was_not_read_is_noted(short: Path, given: str) -> None:
    run = load(short / given)
    assert (run.problems, run.run_dir) == ((), None)
    assert run.notes[0] == f"{short / 'run.json'} was not read: give {short} itself to have its ranks asked for"


def test_of_processes_that_call_every_gpu_the_same_no_one_is_named(tmp_path: Path) -> None:
    for host, pids in {"a": (11, 12), "b": (21,)}.items():
        export = Export()
        for pid in pids:
            export.kernel("k", 0, 10, pid=pid, device=0)
        export.write(tmp_path / "nodes" / host / "trace.sqlite")
    ranks = [{"world_rank": n, "host": "ab"[n // 2], "device": n % 2, "tp": n} for n in range(4)]
    (tmp_path / "run.json").write_text(json.dumps({"ranks": ranks}), "utf-8")
    run = load(tmp_path)
    (problem,) = run.problems
    assert "1 of the 4 ranks that it lists is in no report: 1 of ranks 2, 3 of b (every process" in problem.message
    assert run.unplaced == 1


def test_tables_beside_nodes_are_no_export(short: Path) -> None:
    (short / "truth.parquet").write_bytes(b"PAR1")
    (short / "run.json").unlink()
    assert [trace.name for trace in find_inputs([short]).traces] == ["a/trace"]


def test_results_that_cannot_be_written_leave_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = analyze(two_ranks().write(tmp_path / "x.sqlite"))
    with pytest.raises(MissingToolError, match=r"x\.sqlite: results cannot be written here \(not a folder\)"):
        result.save(tmp_path / "x.sqlite")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(result), "_write", full)
    with pytest.raises(MissingToolError, match="No space left"):
        result.save(tmp_path / "new")
    (tmp_path / "old").mkdir()
    with pytest.raises(MissingToolError, match="No space left"):
        result.save(tmp_path / "old")
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["old", "x.sqlite"]
