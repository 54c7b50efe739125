"""Killed at every step, in every way: nothing of a run is left, and its run.json tells the truth.

Each run is the real command in a process of its own.  What would end in a moment is held at the step in question: by a
server that does not get ready or never answers, by an nvidia-smi that hangs, by a server that ignores its end.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest
from command import COMMAND
from command import run as ran
from launch_runs import REPORT, fake_nsys, faults, processes_of
from loopback import SERVER, free_port

from nsysk3.launch.journal import launcher, process_began
from nsysk3.launch.parallel import each
from nsysk3.run.manifest import ENDED, Status

LIMIT_S = 60.0
INTERRUPTED = 130


@dataclass(frozen=True)
class Hold:
    """What keeps a run at a step: faults of its server, and which call of nvidia-smi hangs (0: none)."""

    faults: tuple[str, ...] = ()
    smi_hangs_at: int = 0
    options: tuple[str, ...] = ("--skip-preflight",)
    stop_timeout_s: float = 4
    overhead: str = "load"


# Of nvidia-smi: preflight's call, if any, then before, healthy, after, cleaned.
HOLDS = {
    "preflight": Hold(smi_hangs_at=1, options=("--force",)),
    "starting": Hold(faults=("slow-start=/nonexistent", "orphans")),
    "healthy": Hold(smi_hangs_at=2),
    "warming": Hold(faults=("no-answer=1",)),
    "loading": Hold(faults=("no-answer=5", "hang-on-stop", "orphans")),
    "window": Hold(faults=("no-answer=10", "endless-capture"), overhead="off"),
    "draining": Hold(smi_hangs_at=3),
    "stopping": Hold(faults=("hang-on-stop",), stop_timeout_s=20),
    "collecting": Hold(smi_hangs_at=4),
    "exported": Hold(),  # the analysis takes its time
}


class Launched:
    """``nsysk3 profile`` in a process and a session of its own."""

    def __init__(self, folder: Path, hold: Hold) -> None:
        self.folder = folder
        self.out = folder / "out"
        self.port = free_port()
        (folder / "nsysk3.toml").write_text(f"""
[cluster]
port = {self.port}
scratch = "{folder}"
python = "{sys.executable}"
[server]
command = ["{sys.executable}", "{SERVER}"]
args = ["--disable-radix-cache", "--speed", "20"]
start_timeout_s = 60
stop_timeout_s = {hold.stop_timeout_s}
[load]
input_len = 256
chunk = 128
concurrency = 2
requests = 40
warmup = 2
[window]
overhead = "{hold.overhead}"
[nsys]
path = "{fake_nsys(folder)}"
""")
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*COMMAND, "profile", "--pp", "2", "--tp", "1", "--out", "out", *hold.options, "--",
                 *faults(*hold.faults)],
                cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env=environment(folder, hold.smi_hangs_at),
            )  # fmt: skip

    def json(self) -> dict[str, Any]:
        with suppress(FileNotFoundError):
            found: dict[str, Any] = json.loads((self.out / "run.json").read_text())
            return found
        return {}

    @property
    def run_id(self) -> str:
        return str(self.json()["run_id"])

    def held_at(self, step: str) -> bool:
        """Whether it has come to the step; fails where it has ended before."""
        assert self.process.poll() is None, self.log.read_text()[-3000:]
        if self.json().get("status") != step:
            return False
        if step == "starting":  # and to where it is held
            return self.port_is_taken()
        hangs = HOLDS[step].smi_hangs_at
        return not hangs or ((self.folder / "smi.calls").exists() and smi_calls(self.folder) >= hangs)

    def left(self) -> list[str]:
        """What there is of the run on this machine."""
        found = [words for _, words in processes_of(self.run_id)]
        found += [str(each) for each in self.folder.glob("nsysk3-*") if each.is_dir()]
        found += [str(each) for each in (self.folder / "tmp").iterdir()]
        return [*found, f"port {self.port}"] if self.port_is_taken() else found

    def port_is_taken(self) -> bool:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", self.port))
            except OSError:
                return True
        return False


def environment(folder: Path, smi_hangs_at: int = 0) -> dict[str, str]:
    (folder / "tmp").mkdir(exist_ok=True)
    (folder / "bin").mkdir(exist_ok=True)
    smi = folder / "bin/nvidia-smi"
    smi.write_text(f"#!/bin/sh\necho >>{folder}/smi.calls\n"
                   f"[ $(wc -l <{folder}/smi.calls) -eq {smi_hangs_at} ] && sleep 300\necho index\n")  # fmt: skip
    smi.chmod(0o755)
    inherited = {name: text for name, text in os.environ.items() if name != "NSYSK3_NSYS"}  # it would win over the file
    return {
        **inherited, "PATH": f"{folder}/bin:{os.environ['PATH']}", "FAKE_NSYS_REPORT": str(REPORT),
        "TMPDIR": str(folder / "tmp"),
    }  # fmt: skip


def smi_calls(folder: Path) -> int:
    return len((folder / "smi.calls").read_text())


def until(condition: Callable[[], object], what: Callable[[], object] = lambda: "") -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, what()
        time.sleep(0.1)  # looking costs the processor that the runs need


@contextmanager
def own_folder() -> Iterator[Path]:
    """A folder with a short name, or the temporary files of a run would not go into the run's own."""
    with tempfile.TemporaryDirectory(prefix="n3-", dir="/tmp") as name:
        yield Path(name)


@contextmanager
def launched(step: str) -> Iterator[Launched]:
    """A run that has come to a step and is held there."""
    with own_folder() as folder:
        run = Launched(folder, HOLDS[step])
        try:
            until(lambda: run.held_at(step), run.json)
            yield run
        finally:  # of a test that failed
            run.process.kill()
            run.process.wait()
            for pid, _ in processes_of(run.json().get("run_id", "no such run")):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def press(run: Launched) -> None:
    """Ctrl-C: the terminal tells the whole process group."""
    with suppress(ProcessLookupError):
        os.killpg(run.process.pid, signal.SIGINT)


def twice(run: Launched) -> None:
    press(run)
    until(lambda: run.process.poll() is not None or run.json()["status"] == "interrupted")
    press(run)


def terminate(run: Launched) -> None:
    run.process.terminate()


WAYS = {"ctrl-c": press, "ctrl-c twice": twice, "SIGTERM": terminate}
# Each step in one way, and the one where a server hangs in every way.  Those of a row run at once: they mostly wait.
INTERRUPTIONS = [
    ["preflight ctrl-c", "starting ctrl-c twice", "stopping SIGTERM", "warming ctrl-c"],
    ["loading ctrl-c twice", "window SIGTERM", "draining ctrl-c", "stopping ctrl-c twice"],
    ["healthy SIGTERM", "collecting SIGTERM", "exported ctrl-c", "stopping ctrl-c"],
]
KILLS = [
    ["preflight", "starting", "stopping", "warming"],
    ["loading", "window", "healthy"],
    ["draining", "collecting", "exported"],
]


def test_every_step_is_interrupted_and_killed() -> None:
    steps = set(get_args(Status)) - ENDED - {"planned", "analysed"}  # which pass in a moment, with nothing running
    assert {case.partition(" ")[0] for row in INTERRUPTIONS for case in row} == steps
    assert {step for row in KILLS for step in row} == steps
    assert {case.partition(" ")[2] for row in INTERRUPTIONS for case in row} == set(WAYS)


@pytest.mark.parametrize("cases", INTERRUPTIONS, ids=", ".join)
def test_an_interrupted_run_leaves_nothing(cases: list[str]) -> None:
    each(cases, interrupted)


def interrupted(case: str) -> None:
    step, _, way = case.partition(" ")
    with launched(step) as run:
        WAYS[way](run)
        until(lambda: run.process.poll() is not None)
        assert run.left() == [], case
        assert run.process.returncode == INTERRUPTED, run.log.read_text()[-3000:]
        document = run.json()
        assert document["status"] == "interrupted", case
        assert (document["cause"]["step"], document["cause"]["kind"]) == (step, "interrupted"), case
        assert document["cleaned"] is True, case
        last = run.log.read_text().splitlines()[-1]
        assert last.startswith("nsysk3: interrupted by SIG"), (case, last)
        assert "nothing of the run is left running" in last


@pytest.mark.parametrize("steps", KILLS, ids=", ".join)
def test_a_killed_run_leaves_nothing_and_cleanup_says_so(steps: list[str]) -> None:
    each(steps, killed)


def killed(step: str) -> None:
    with launched(step) as run:
        run.process.kill()
        run.process.wait()
        until(lambda: run.left() == [], run.left)
        assert run.json()["status"] == step  # nobody was there to write more
        for name in (".run.json.abc_1234", "nodes/.trace.nsys-rep.12345678", ".nsysk3-abcdefgh.part/export"):
            (run.out / name).parent.mkdir(exist_ok=True)
            (run.out / name).touch()
        done = cleanup(run)
        assert done.returncode == 0, done.stderr
        document = run.json()
        assert document["status"] == "interrupted", step
        assert (document["cause"]["step"], document["cause"]["kind"]) == (step, "killed")
        assert document["cleaned"] is True, step
        assert list(run.out.rglob(".*")) == [], step  # nothing half written either


def test_cleanup_ends_what_is_left_when_its_keepers_are_killed_too() -> None:
    """As after a power loss of everything but the servers."""
    each(["starting", "loading", "window"], abandoned)


def abandoned(step: str) -> None:
    with launched(step) as run:
        watchers = [pid for pid, words in processes_of(run.run_id) if "nsysk3-keeper" in words]
        assert watchers, step
        for number in (signal.SIGSTOP, signal.SIGKILL):  # so that none of them can act on the end of another
            for pid in (run.process.pid, *watchers):
                os.kill(pid, number)
        run.process.wait()
        until(lambda: not any("nsysk3-keeper" in words for _, words in processes_of(run.run_id)))
        assert any("loopback_server" in words for _, words in processes_of(run.run_id)), step
        assert any(run.folder.glob("nsysk3-*")), step
        done = cleanup(run)
        assert done.returncode == 0, done.stderr
        assert run.left() == [], step
        assert "loopback_server" in done.stderr
        assert run.json()["cause"]["kind"] == "killed"
        again = cleanup(run)
        assert again.returncode == 0
        assert "nothing of" in again.stderr


def test_cleanup_ends_a_run_that_goes_on() -> None:
    with launched("window") as run:
        done = cleanup(run)
        assert done.returncode == 0, done.stderr
        assert run.process.wait(LIMIT_S) == INTERRUPTED
        assert run.left() == []
        assert run.json()["status"] == "interrupted"
        assert run.json()["cause"]["kind"] == "interrupted"


def test_cleanup_of_what_was_never_a_run_is_one_line() -> None:
    with own_folder() as folder:
        done = subprocess.run(
            [*COMMAND, "cleanup", str(folder)], capture_output=True, text=True, timeout=60, env=environment(folder)
        )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "no run.json here" in done.stderr


def test_cleanup_leaves_alone_what_is_no_run_that_goes_on(tmp_path: Path) -> None:
    """A notebook goes on after its run; a garbled or simulated manifest means nothing that could be ended."""
    notebook = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    who = {**launcher(), "pid": notebook.pid, "began": process_began(notebook.pid)}
    known = {"run_id": "t-over", "hosts": ["localhost"], "cluster": {"scratch": str(tmp_path)}}
    cases: list[tuple[dict[str, Any], int, str]] = [
        ({"status": "done", "cleaned": True, "launcher": who}, 0, "nothing of t-over is left"),
        ({"status": "window", "launcher": 5, "container": {"cli": 3}}, 0, "nothing of t-over is left"),
        ({"simulated": "nsysk3"}, 2, "was simulated"),
        ({"run_id": "../../etc"}, 2, "not one that nsysk3 gives"),
        ({"cluster": {"python": ["x"], "launcher": "local"}}, 2, "cluster.python"),
    ]
    with notebook:
        for number, (fields, code, words) in enumerate(cases):
            folder = tmp_path / str(number)
            folder.mkdir()
            (folder / "run.json").write_text(json.dumps(known | fields))
            done = ran("cleanup", folder)
            assert (done.code, words in done.err) == (code, True), done.err
            assert code == 0 or done.err.count("\n") == 1
        assert notebook.poll() is None
        notebook.communicate(b"\n")
    (tmp_path / "file").touch()
    for name in (tmp_path / "file", "*", ""):
        assert ran("cleanup", name).code == 2


def cleanup(run: Launched) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, "cleanup", str(run.out)],
        cwd=run.folder,
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(run.folder),
    )
