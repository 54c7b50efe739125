"""What does not end but hangs, or cannot be reached: workers, terminals, web servers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command import run
from conftest import FIXTURES
from dask_processes import DaskProcesses
from processes import eventually
from scale_runs import TWO

from nsysk3 import analyze
from nsysk3.run.remote import RemotePath
from nsysk3.run.scratch import NoRoomError, Scratch
from nsysk3.scale.cluster import Cluster
from nsysk3.scale.pool import Pool

SMALL = FIXTURES / "h200" / "pp2.sqlite"


def test_hung_workers_are_as_good_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed")
    monkeypatch.setenv("NSYSK3_ANALYZE_PATIENCE_S", "2")
    really = Cluster.give

    with DaskProcesses(tmp_path, 1) as dask:

        def give(self: Cluster, *given: Any) -> None:
            really(self, *given)
            dask.stop_workers()
            monkeypatch.setattr("nsysk3.scale.cluster._SILENT_S", 4)

        monkeypatch.setattr(Cluster, "give", give)
        ran = run("analyze", TWO, "--scheduler", dask.address, "-q", "--out", tmp_path / "out")
        assert (ran.code, ran.out) == (3, "")
        assert ran.err == (
            f"nsysk3: {dask.address}: no worker answers; waiting up to 2 s for one\n"
            f"nsysk3: {dask.address}: no Dask worker for 2 s; start some, and analyze again\n"
        )


def test_why_a_scheduler_does_not_answer_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed")
    monkeypatch.setattr("nsysk3.scale.cluster._CONNECT_S", 1)
    ran = run("analyze", SMALL, "--scheduler", "tcp://127.0.0.1:1", "-q")
    assert (ran.code, ran.err) == (
        3,
        "nsysk3: tcp://127.0.0.1:1: no Dask scheduler answers there (Connection refused)\n",
    )


def test_a_closed_terminal_leaves_no_scratch(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    script = tmp_path / "script.py"
    script.write_text(
        "import time, nsysk3\n"
        "from nsysk3.scale.pool import Pool\n"
        "if __name__ == '__main__':\n"
        "    pool = Pool(2)\n"
        "    pool.begin()\n"
        "    pool.members()\n"
        "    while not all(each.ready for each in pool._members.values()):\n"
        "        list(pool.answered())\n"
        "    print('now', flush=True)\n"
        "    time.sleep(600)\n"
    )
    process = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, start_new_session=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == b"now\n"
    assert list(temporary.glob("nsysk3-scratch-*"))
    os.killpg(process.pid, signal.SIGHUP)
    assert process.wait() == -signal.SIGHUP
    process.stdout.close()
    assert eventually(lambda: not list(temporary.glob("nsysk3-scratch-*")), 30)


def test_no_more_processes_than_reports() -> None:
    with Pool(999) as pool:
        analyze(SMALL, crew=pool)
        assert pool.members() == ["0"]


@pytest.mark.parametrize("what", ["missing", "file"])
def test_a_tmpdir_that_is_none_is_not_replaced_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    place = tmp_path / "tmp"
    if what == "file":
        place.write_text("")
    monkeypatch.setenv("TMPDIR", str(place))
    with pytest.raises(NoRoomError, match=f"^{place}: no room for scratch files"):
        Scratch()


class Web:
    """What fsspec's HTTP file system answers: every address that answers is a file, and a folder where it has links."""

    def __init__(self, files: set[str], up: bool = True) -> None:
        self.files, self.up = files, up

    def exists(self, path: str) -> bool:
        return self.up and any(file.startswith(path) for file in self.files)

    isfile = exists

    def isdir(self, path: str) -> bool:
        assert not path.endswith(".sqlite"), "that reads all of it"
        return self.exists(path)

    def info(self, path: str) -> dict[str, str]:
        raise FileNotFoundError(path) from (None if self.up else ConnectionRefusedError(111, "Connection refused"))


def test_a_folder_of_a_web_server_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec = pytest.importorskip("fsspec")
    web = Web({"http://host/run/nodes/a/trace.sqlite"})
    monkeypatch.setattr(fsspec, "url_to_fs", lambda url: (web, url))
    folder = RemotePath("http:/host/run")
    assert (folder.exists(), folder.is_dir(), folder.is_file()) == (True, True, False)
    trace = folder / "nodes" / "a" / "trace.sqlite"
    assert (trace.exists(), trace.is_dir(), trace.is_file()) == (True, False, True)
    assert not (folder / "other").exists()
    web.up = False
    with pytest.raises(ConnectionRefusedError):
        folder.exists()
    monkeypatch.setattr(fsspec, "url_to_fs", lambda url: (SimpleNamespace(exists=lambda _: False), url))
    assert not RemotePath("s3:/bucket/none").exists()
