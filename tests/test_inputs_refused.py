"""Inputs that cannot be read are named, and the others go on."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from command import run as command
from exports import two_ranks
from input_files import small, touch

from nsysk3.errors import InputError
from nsysk3.result import Result
from nsysk3.run.inputs import find_inputs
from nsysk3.trace.load import load


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
    assert "1 rank," in both.out
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
    assert "1 rank," in ran.out
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
    assert "1 rank," in both.out


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
    assert "1 rank," in ran.out
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
    assert "1 rank," in ran.out
    assert f"{folder / 'analysis'}: results cannot be written here" in ran.err
    assert "--out" in ran.err
    assert asked.code == 3
    assert asked.err.count("\n") == 1
