"""Scratch files: whose they are, when they go, and what is said where there is no room for them."""

from __future__ import annotations

import errno
import gc
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from command import process, run
from processes import eventually
from scale_runs import TWO

import nsysk3
from nsysk3.errors import InputError
from nsysk3.run.scratch import PREFIX, NoRoomError, Scratch
from nsysk3.scale.pool import Pool

# A run that stays between two steps until it is ended.
SLOW = """
import sys, time
if __name__ == "__main__":
    import nsysk3
    from nsysk3.analysis import analyze
    from nsysk3.cli import main
    def slow(*_, **__):
        print("now", flush=True)
        time.sleep(600)
    analyze.match = slow
    {}
    main()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def old(path: Path) -> Path:
    os.utime(path, (1, 1))
    return path


def test_what_killed_processes_left_goes_and_what_others_use_stays(temporary: Path) -> None:
    left, young, other = (temporary / name for name in (f"{PREFIX}left", f"{PREFIX}young", "other"))
    for each in (left, young, other):
        each.mkdir()
        (each / "file").touch()
    used = Scratch()
    old(left), old(other), old(used.path)
    new = Scratch()
    assert set(temporary.iterdir()) == {young, other, used.path, new.path}
    used.remove()
    del new
    gc.collect()
    assert set(temporary.iterdir()) == {young, other}


@pytest.mark.parametrize("workers", [1, 2])
def test_a_closed_crew_says_so(temporary: Path, workers: int) -> None:
    with nsysk3.crew_of(workers=workers) as crew:
        assert list(temporary.iterdir()) == []  # made when needed
    with pytest.raises(InputError, match=r"this crew is closed: nsysk3\.crew_of\(\) makes another"):
        nsysk3.analyze(TWO, crew=crew)
    assert list(temporary.iterdir()) == []


def test_a_crew_that_nobody_closes_leaves_nothing(temporary: Path) -> None:
    crew = Pool(2)
    crew.begin()
    crew.members()
    pids = [each.process.pid for each in crew._members.values()]
    assert len(list(temporary.iterdir())) == 1
    del crew
    gc.collect()
    assert list(temporary.iterdir()) == []
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []


@pytest.mark.parametrize("workers", ["x", 0, -1, 1.5, True, 1025, None])
def test_what_is_no_number_of_workers(workers: Any) -> None:
    with pytest.raises(InputError, match=r"^workers must be a whole number from 1 to 1,024, not "):
        nsysk3.crew_of(workers=workers)


def test_no_room_is_the_runs_trouble(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("nsysk3.scale.crew.memory_share", lambda _: 0)
    monkeypatch.setattr(pl.DataFrame, "write_ipc", full)
    ran = run("analyze", TWO, "--out", temporary.parent / "out")
    said = f"nsysk3: {temporary}: no room for scratch files (No space left on device); set TMPDIR"
    assert (ran.code, ran.out, ran.err.count("\n")) == (3, "", 1)
    assert ran.err.startswith(said)
    assert list(temporary.iterdir()) == []
    pytest.importorskip("fsspec")
    monkeypatch.setattr("nsysk3.run.remote.RemotePath.copy_to", full)
    assert run("analyze", f"local://{TWO}").err == ran.err
    monkeypatch.setattr("tempfile.tempdir", "/proc/nothing")
    with pytest.raises(NoRoomError, match=r"^/proc/nothing: no room for scratch files"):
        Scratch()


def test_nor_for_workers(tmp_path: Path) -> None:
    def little() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    ran = process("analyze", TWO, "--workers", "2", env=os.environ | {"TMPDIR": str(tmp_path)}, preexec_fn=little)
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (3, "", 1), ran.stderr
    assert f": {tmp_path}: no room for scratch files (File too large" in ran.stderr
    assert list(tmp_path.iterdir()) == []


def slow(folder: Path, before: str = "") -> subprocess.Popen[str]:
    """A run of two workers that has come to its middle, with its scratch in ``folder``/tmp."""
    script, temporary = folder / "slow.py", folder / "tmp"
    script.write_text(SLOW.format(before))
    temporary.mkdir()
    environment = os.environ | {"TMPDIR": str(temporary)}
    command = [sys.executable, script, "analyze", TWO, "--workers", "2", "-q", "--out", folder / "out"]
    ran = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert ran.stdout is not None
    assert ran.stdout.readline() == "now\n"
    assert [each.name for each in temporary.iterdir() if each.name.startswith(PREFIX)]
    return ran


def test_workers_whose_parent_is_killed_remove_it(tmp_path: Path) -> None:
    with slow(tmp_path) as ran:
        ran.kill()
        assert ran.stderr is not None
        assert ran.stderr.read() == ""  # and until the last of them has gone
    assert eventually(lambda: not list((tmp_path / "tmp").iterdir()))


def test_nothing_is_left_after_ctrl_c_twice(tmp_path: Path) -> None:
    again = "import shutil; before = shutil.rmtree\n    def rmtree(*a, **k):\n        print('again', flush=True)\n"
    again += "        time.sleep(1)\n        before(*a, **k)\n    shutil.rmtree = rmtree"
    with slow(tmp_path, again) as ran:
        os.killpg(ran.pid, signal.SIGINT)
        assert ran.stdout is not None
        assert ran.stderr is not None
        assert ran.stdout.readline() == "again\n"
        os.killpg(ran.pid, signal.SIGINT)
        assert ran.stderr.read() == "nsysk3: interrupted\n"
        assert ran.wait(60) == 130
    assert list((tmp_path / "tmp").iterdir()) == []
