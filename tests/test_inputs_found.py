"""Which traces the paths on a command line mean."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from command import run as command
from exports import two_ranks
from input_files import small, touch

import nsysk3
from nsysk3.run.inputs import find_inputs
from nsysk3.trace.load import load


def names(*paths: Path) -> list[str]:
    return [trace.name for trace in find_inputs(list(paths)).traces]


def test_files_are_taken_whatever_they_are_called(tmp_path: Path) -> None:
    for name in ("a.sqlite", "b.SQLITE", "c.sqlite3", "d.db", "export", "trace.with.dots.sqlite"):
        small(tmp_path / name)
        assert nsysk3.load(tmp_path / name).ranks.height == 1
    assert names(tmp_path / "trace.with.dots.sqlite") == ["trace.with.dots"]
    # in a directory only what looks like an export
    assert names(tmp_path) == ["a", "b", "c", "d", "trace.with.dots"]


def test_a_directory_and_the_hosts_one_level_down(tmp_path: Path) -> None:
    small(tmp_path / "top.sqlite")
    for host in ("node2", "node10", "node1"):
        small(tmp_path / host / "trace.sqlite")
    small(tmp_path / "node1" / "deeper" / "too_deep.sqlite")
    small(tmp_path / ".hidden" / "x.sqlite")
    (tmp_path / "._top.sqlite").write_bytes(b"a resource fork, as tar on a Mac leaves them")
    (tmp_path / "notes.txt").write_text("not a trace")
    found = find_inputs([tmp_path])
    assert [(trace.name, trace.host) for trace in found.traces] == [
        ("top", None), ("node1/trace", "node1"), ("node2/trace", "node2"), ("node10/trace", "node10"),
    ]  # fmt: skip
    assert (found.problems, found.run_dir) == ((), None)


def test_a_run_directory_and_not_its_results(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    small(tmp_path / "nodes" / "a" / "trace.sqlite")
    small(tmp_path / "nodes" / "b" / "trace.sqlite")
    for other in ("analysis", "bench"):
        small(tmp_path / other / "x.sqlite")
    found = find_inputs([tmp_path])
    assert [(trace.name, trace.host) for trace in found.traces] == [("a/trace", "a"), ("b/trace", "b")]
    assert found.run_dir == tmp_path


def test_results_beside_the_traces_are_not_read_again(tmp_path: Path) -> None:
    two_ranks().write(tmp_path / "r.sqlite")
    first = command("analyze", tmp_path, "--json")
    assert (tmp_path / "analysis" / "rank_metrics.parquet").exists()
    assert command("analyze", tmp_path, "--json") == first
    for folder in (tmp_path / "analysis",):
        ran = command("analyze", folder)
        assert (ran.code, ran.err.count("\n")) == (2, 1)


def test_several_paths_are_one_run(tmp_path: Path) -> None:
    one, other = small(tmp_path / "x" / "a.sqlite"), small(tmp_path / "y" / "b.sqlite")
    run = load([one, other.parent])
    assert run.ranks["report_name"].to_list() == ["a", "b"]
    assert run.directory is None
    assert load([tmp_path]).directory == tmp_path


def test_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for folder in ("x/one", "y/one", "z"):
        small(tmp_path / folder / "trace.sqlite")
    paths = [tmp_path / folder / "trace.sqlite" for folder in ("x/one", "y/one", "z")]
    assert names(*paths) == ["one/trace (1)", "one/trace (2)", "z/trace"]


def test_a_file_given_twice_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = small(tmp_path / "a.sqlite")
    (tmp_path / "link.sqlite").symlink_to(path)
    monkeypatch.chdir(tmp_path)
    assert names(path, Path("a.sqlite"), tmp_path / "link.sqlite", tmp_path / ".." / tmp_path.name / "a.sqlite") == [
        "a"
    ]
    assert load([path, path, tmp_path]).ranks.height == 1


@pytest.mark.parametrize(
    ("present", "chosen"),
    [
        ({"r.nsys-rep": 50, "r.sqlite": 60}, "r.sqlite"),
        ({"r.nsys-rep": 50, "r.sqlite": 50}, "r.sqlite"),
        ({"r.nsys-rep": 50, "r.sqlite": 40}, "r.nsys-rep"),
        # what nsysk3 exported itself is looked after by the export step
        ({"r.nsys-rep": 50, "r.nsysk3.sqlite": 60}, "r.nsys-rep"),
        ({"r.nsys-rep": 50, "r.nsysk3.sqlite": 60, "r.sqlite": 55}, "r.sqlite"),
        ({"r.nsysk3.sqlite": 60}, "r.nsysk3.sqlite"),
        ({"r.nsys-rep": 50, "r.qdstrm": 60}, "r.nsys-rep"),
        ({"r.sqlite": 50, "r.qdstrm": 60}, "r.sqlite"),
        ({"r.nsys-rep": 50, "r_pqtdir/META_DATA_EXPORT.parquet": 60}, "r_pqtdir"),
        ({"r.nsys-rep": 50, "r_arwdir/META_DATA_EXPORT.arrow": 60}, "r_arwdir"),
        # the few tables that one of NVIDIA's recipes exported for itself
        ({"r.nsys-rep": 50, "r_pqtdir/KERNEL.parquet": 60}, "r.nsys-rep"),
        ({"r_pqtdir/KERNEL.parquet": 60}, "r_pqtdir"),
    ],
    ids=str,
)  # fmt: skip
def test_a_report_and_its_exports_count_once(tmp_path: Path, present: dict[str, int], chosen: str) -> None:
    for name, seconds in present.items():
        touch(tmp_path / name, seconds)
        if "/" in name:
            os.utime((tmp_path / name).parent, (seconds, seconds))
    found = find_inputs([tmp_path])
    assert [trace.path.name for trace in found.traces] == [chosen]
    assert [trace.name for trace in found.traces] == ["r"]
    assert found.problems == ()


def test_a_report_and_its_export_given_by_name_are_both_meant(tmp_path: Path) -> None:
    # The user named the older export: it is what is read, and the report is not exported behind the user's back.
    touch(tmp_path / "r.nsys-rep", 50)
    touch(tmp_path / "r.sqlite", 40)
    assert [trace.path.name for trace in find_inputs([tmp_path / "r.sqlite"]).traces] == ["r.sqlite"]
