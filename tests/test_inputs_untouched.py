"""Looking at inputs leaves them, and their folder, as they were."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from command import run as command
from conftest import GRAPH
from exports import two_ranks
from input_files import contents, small


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
