"""What the paths on a command line mean, and that looking at them leaves them as they were."""

from __future__ import annotations

import hashlib
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from command import run as command
from conftest import FIXTURES
from exports import GEMM, Export, two_ranks

import nsysk3
from nsysk3.errors import InputError
from nsysk3.result import Result
from nsysk3.run.inputs import find_inputs
from nsysk3.trace.load import load

GRAPH = FIXTURES / "h200" / "graph.sqlite"


def small(path: Path, pid: int = 11) -> Path:
    return Export().kernel(GEMM, 0, 100, pid=pid).write(path)


def names(*paths: Path) -> list[str]:
    return [trace.name for trace in find_inputs(list(paths)).traces]


def touch(path: Path, seconds: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.utime(path, (seconds, seconds))
    return path


@contextmanager
def unprivileged() -> Iterator[Path]:
    """A folder of root's, seen by somebody else, where root runs the tests; root may do everything."""
    folder = Path(tempfile.mkdtemp(prefix="nsysk3-test-"))
    folder.chmod(0o755)
    root = os.geteuid() == 0
    try:
        yield folder
    finally:
        if root:
            os.seteuid(0)
        shutil.rmtree(folder, onerror=lambda *_: None)


def drop_privileges() -> None:
    if os.geteuid() == 0:
        os.seteuid(65534)


# --- what is found


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


# --- what is not


@pytest.mark.parametrize("where", ["alone", "in a directory", "beside another"])
def test_a_raw_capture_names_its_importer(tmp_path: Path, where: str) -> None:
    raw = touch(tmp_path / "dead.qdstrm", 1)
    paths = [tmp_path] if where == "in a directory" else [raw]
    if where == "beside another":
        paths.append(small(tmp_path / "good.sqlite"))
    ran = command("analyze", *paths, "--out", tmp_path / "out")
    assert ran.code == 2
    (line,) = [line for line in ran.err.splitlines() if "dead.qdstrm" in line]
    assert "`QdstrmImporter -i dead.qdstrm`" in line
    assert (tmp_path / "out" / "result.json").exists() == (where == "beside another")


def test_nothing_to_read_is_said(tmp_path: Path) -> None:
    for path, said in (
        (tmp_path, "no .nsys-rep, .sqlite, _pqtdir or _arwdir found here or one folder down"),
        (tmp_path / "none", "no such file or directory"),
    ):
        ran = command("analyze", path)
        assert (ran.code, ran.out, ran.err) == (2, "", f"nsysk3: {path}: {said}\n")


def test_a_missing_path_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    missing = tmp_path / "none.sqlite"
    ran = command("analyze", missing, small(tmp_path / "a.sqlite"), "--out", tmp_path / "out")
    assert ran.code == 2
    assert f"nsysk3: {missing}: no such file or directory\n" in ran.err
    assert len(Result.load(tmp_path / "out").document.ranks) == 1


NOT_EXPORTS = {
    "empty": (b"", "empty file"),
    "text": (b"Nothing here is a database.\n" * 100, "not an SQLite file"),
    "an archive": (b"PK\x03\x04" + bytes(1000), "not an SQLite file"),
    "only a header": (b"SQLite format 3\x00", "damaged or truncated"),
}


@pytest.mark.parametrize("name", NOT_EXPORTS)
def test_files_that_are_no_exports_are_named_and_the_others_go_on(tmp_path: Path, name: str) -> None:
    content, said = NOT_EXPORTS[name]
    bad = tmp_path / "bad.sqlite"
    bad.write_bytes(content)
    alone = command("analyze", bad)
    assert (alone.code, alone.out, alone.err.count("\n")) == (2, "", 1)
    assert alone.err.startswith(f"nsysk3: {bad}: {said}")
    small(tmp_path / "good.sqlite")
    both = command("analyze", tmp_path)
    assert both.code == 2
    assert f"nsysk3: {bad}: {said}" in both.err
    assert "1 ranks" in both.out
    document = Result.load(tmp_path / "analysis").document
    assert ([problem.path for problem in document.problems], len(document.ranks)) == ([str(bad)], 1)


def test_a_directory_of_broken_tables_is_named(tmp_path: Path) -> None:
    path = two_ranks().write_directory(tmp_path / "r_pqtdir")
    (path / "CUPTI_ACTIVITY_KIND_KERNEL.parquet").write_bytes(b"PAR1 no more")
    ran = command("analyze", path)
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert str(path / "CUPTI_ACTIVITY_KIND_KERNEL.parquet") in ran.err


def test_all_inputs_bad_is_still_one_line(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.sqlite").write_bytes(b"")
    ran = command("analyze", tmp_path)
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert "a.sqlite: empty file" in ran.err
    assert "b.sqlite: empty file" in ran.err


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.sqlite")
    ran = command("analyze", tmp_path / "pipe.sqlite")
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert "neither a file nor a directory" in ran.err
    # and one that lies among traces does not stop the others
    small(tmp_path / "a.sqlite")
    ran = command("analyze", tmp_path)
    assert ran.code == 2
    assert "1 ranks" in ran.out
    assert f"{tmp_path / 'pipe.sqlite'}: neither a file nor a link to one" in ran.err


def test_a_name_too_long_for_the_system_is_one_line(tmp_path: Path) -> None:
    ran = command("analyze", tmp_path / ("x" * 300))
    assert (ran.code, ran.err.count("\n")) == (2, 1)


def test_a_dangling_link_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    (tmp_path / "gone.sqlite").symlink_to(tmp_path / "nowhere.sqlite")
    small(tmp_path / "a.sqlite")
    found = find_inputs([tmp_path])
    assert [trace.name for trace in found.traces] == ["a"]
    assert [problem.path for problem in found.problems] == [str(tmp_path / "gone.sqlite")]
    with pytest.raises(InputError, match="no such file"):
        load(tmp_path / "gone.sqlite")


# --- permissions


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="needs POSIX users")
def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    command("analyze", small(tmp_path / "warm.sqlite"))  # modules are loaded by the user who may
    with unprivileged() as folder:
        secret, good = small(folder / "secret.sqlite"), small(folder / "good.sqlite")
        secret.chmod(0)
        drop_privileges()
        alone = command("analyze", secret)
        both = command("analyze", secret, good)
    assert (alone.code, alone.err) == (2, f"nsysk3: {secret}: cannot be read (Permission denied)\n")
    assert both.code == 2
    assert "1 ranks" in both.out


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="needs POSIX users")
def test_a_folder_that_may_not_be_listed_is_named(tmp_path: Path) -> None:
    command("analyze", small(tmp_path / "warm.sqlite"))
    with unprivileged() as folder:
        small(folder / "closed" / "a.sqlite")
        small(folder / "open" / "b.sqlite")
        (folder / "closed").chmod(0)
        drop_privileges()
        ran = command("analyze", folder)
        closed = command("analyze", folder / "closed")
        inside = command("analyze", folder / "closed" / "a.sqlite")
    assert ran.code == 2
    assert f"{folder / 'closed'}: cannot be listed (Permission denied)" in ran.err
    assert "1 ranks" in ran.out
    assert (closed.code, closed.err.count("\n")) == (2, 1)
    assert "Permission denied" in closed.err
    assert (inside.code, inside.err.count("\n")) == (2, 1)


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="needs POSIX users")
def test_traces_in_a_read_only_directory_are_analysed(tmp_path: Path) -> None:
    command("analyze", small(tmp_path / "warm.sqlite"))
    with unprivileged() as folder:
        small(folder / "a.sqlite").chmod(0o444)
        folder.chmod(0o555)
        drop_privileges()
        ran = command("analyze", folder)
        asked = command("analyze", folder, "--out", folder / "out")
    assert ran.code == 0
    assert "1 ranks" in ran.out
    assert f"{folder / 'analysis'}: results cannot be written here" in ran.err
    assert "--out" in ran.err
    assert asked.code == 3
    assert asked.err.count("\n") == 1


# --- nothing is written beside the inputs


def contents(folder: Path) -> dict[str, tuple[str, int]]:
    return {
        str(path.relative_to(folder)): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def killed_writer(path: Path, mode: str) -> None:
    """Leave the -wal or the hot -journal of a writer that died."""
    commit = "c.execute('commit')" if mode == "wal" else ""
    script = (
        "import os, sqlite3, sys\n"
        "c = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        f"c.execute('pragma journal_mode={mode}'); c.execute('pragma cache_size=1'); c.execute('begin')\n"
        "c.execute('update CUPTI_ACTIVITY_KIND_KERNEL set streamId = streamId + 100')\n"
        "c.execute('create table more as select * from CUPTI_ACTIVITY_KIND_KERNEL')\n"
        f"{commit}\n"
        "os._exit(0)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(path)], check=True)


@pytest.mark.parametrize("kind", ["sqlite", "wal mode", "-wal", "-journal", "parquetdir", "arrowdir"])
def test_inputs_stay_as_they_are(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    if kind.endswith("dir"):
        two_ranks().write_directory(folder / "r", kind)
    else:
        shutil.copy(GRAPH, folder / "r.sqlite")
    if kind == "wal mode":  # closed in order: no -wal left, but the header asks for one
        connection = sqlite3.connect(folder / "r.sqlite")
        connection.execute("pragma journal_mode=wal")
        connection.close()
    elif kind == "-wal":
        killed_writer(folder / "r.sqlite", "wal")
    elif kind == "-journal":
        killed_writer(folder / "r.sqlite", "delete")
    before = contents(folder)
    assert len(before) > 1 or kind in ("sqlite", "wal mode")
    ran = command("analyze", next(folder.iterdir()) if kind.endswith("dir") else folder / "r.sqlite")
    assert contents(folder) == before
    assert ran.err.count("\n") <= 1
    if kind == "-journal":
        # Half of a transaction is in the file: whatever can be read of it, silence would be wrong.
        assert "journal" in ran.out + ran.err
    elif not kind.endswith("dir"):
        assert ran.code == 0


def test_a_directory_gets_nothing_but_its_analysis_folder(tmp_path: Path) -> None:
    for node in ("a", "b"):
        (tmp_path / "nodes" / node).mkdir(parents=True)
        shutil.copy(GRAPH, tmp_path / "nodes" / node / "trace.sqlite")
    before = contents(tmp_path)
    assert command("analyze", tmp_path).code == 0
    after = contents(tmp_path)
    assert {name: after[name] for name in before} == before
    assert {name.split("/")[0] for name in set(after) - set(before)} == {"analysis"}


def test_exports_named_one_by_one_get_no_folder(tmp_path: Path) -> None:
    export = small(tmp_path / "a.sqlite")
    directory = two_ranks().write_directory(tmp_path / "r_pqtdir")
    before = contents(tmp_path)
    for path in (export, directory):
        assert command("analyze", path).code == 0
    assert contents(tmp_path) == before
    assert not (tmp_path / "analysis").exists()


# --- with a real nsys


@pytest.mark.nsys
def test_every_kind_of_export_gives_the_same_numbers(nsys: Path, tmp_path: Path) -> None:
    for name, kinds in {
        "tp2-small-2024.2": ("sqlite", "parquetdir", "arrowdir"),
        "pp2-small-2024.2": ("sqlite", "arrowdir"),
    }.items():
        report = FIXTURES / "h200" / f"{name}.nsys-rep"
        results = []
        for kind in kinds:
            made = tmp_path / f"{name}.{kind}"
            command_line = [nsys, "export", f"--type={kind}", f"--output={made}", "--force-overwrite=true", report]
            subprocess.run(command_line, check=True, capture_output=True, stdin=subprocess.DEVNULL)
            results.append(nsysk3.analyze(made))
            assert results[-1].document.reports[0].kind == kind
        for other in results[1:]:
            tables = dict(results[0].tables)
            for table, expected in tables.items():
                drop = [column for column in ("report",) if column in expected.columns]
                assert other.tables[table].drop(drop).equals(expected.drop(drop)), (name, table)


@pytest.mark.nsys
def test_reports_are_exported_once_and_left_alone(nsys: Path, small_reports: Path) -> None:
    before = contents(small_reports)
    first = command("analyze", small_reports, "--json")
    assert first.code == 0
    after = contents(small_reports)
    assert {name: after[name] for name in before} == before
    made = set(after) - set(before)
    assert {name for name in made if not name.startswith("analysis/")} == {
        f"{name}-small-2024.2.nsysk3.sqlite{note}" for name in ("tp2", "pp2") for note in ("", ".json")
    }
    again = command("analyze", small_reports, "--json")
    assert again == first
    unchanged = contents(small_reports)
    assert {name: unchanged[name] for name in after if "analysis" not in name} == {
        name: after[name] for name in after if "analysis" not in name
    }


@pytest.mark.nsys
def test_a_report_that_is_too_new_is_named_and_the_others_go_on(nsys: Path, tmp_path: Path) -> None:
    newer = tmp_path / "newer.nsys-rep"
    shutil.copy(FIXTURES / "h200" / "tp2-small-2025.3.nsys-rep", newer)
    alone = command("analyze", newer)
    assert (alone.code, alone.out, alone.err.count("\n")) == (3, "", 1)
    assert str(newer) in alone.err
    assert "2024.2.3" in alone.err
    small(tmp_path / "good.sqlite")
    both = command("analyze", tmp_path)
    assert both.code == 2
    assert "1 ranks" in both.out
    assert str(newer) in both.err


def test_a_report_without_any_nsys_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("NSYSK3_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("NSYSK3_NSYS", raising=False)
    report = Path(shutil.copy(FIXTURES / "h200" / "tp2-small-2024.2.nsys-rep", tmp_path / "r.nsys-rep"))
    ran = command("analyze", report)
    assert (ran.code, ran.out, ran.err.count("\n")) == (3, "", 1)
    assert "--nsys" in ran.err
    # with another input that can be read, the run goes on
    small(tmp_path / "good.sqlite")
    both = command("analyze", tmp_path)
    assert both.code == 2
    assert "1 ranks" in both.out
    assert str(report) in both.err
