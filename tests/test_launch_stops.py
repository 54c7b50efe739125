"""A stop ends all of what was started and nothing else."""

from __future__ import annotations

import ast
import signal
import subprocess
import sys
import time
from importlib import resources
from pathlib import Path

import pytest
from processes import eventually, is_gone, of_run, start_zoo

from nsysk3.errors import RunFailedError
from nsysk3.launch import keeper_processes, transport
from nsysk3.launch.hosts import Host, open_host
from nsysk3.run.config import Settings

pytest_plugins = "host_fixtures"
pytestmark = pytest.mark.usefixtures("short_grace")


def test_a_stop_ends_all_of_it_and_nothing_else(
    host: Host, tmp_path: Path, run_id: str, bystander: subprocess.Popen[bytes]
) -> None:
    host.start("other", ["sleep", "1000"], log=str(tmp_path / "other"))
    zoo = start_zoo(host, tmp_path)
    host.stop("zoo", 0.4)
    stubborn = [pid for pid in zoo if not is_gone(pid)]
    # What emptied its environment, its session and its parent is known to be the run's, but not of what: it goes last.
    assert len(stubborn) <= 1
    assert host.poll("zoo") is not None
    assert host.poll("other") is None
    assert host.stop("other", 5.0) == -signal.SIGTERM
    host.close()
    assert all(is_gone(pid) for pid in zoo)
    assert not of_run(run_id)
    assert bystander.poll() is None


def test_a_name_can_be_used_again_once_it_has_ended(host: Host, tmp_path: Path) -> None:
    host.start("server", ["sleep", "1000"], log=str(tmp_path / "log"))
    with pytest.raises(RunFailedError, match="server"):
        host.start("server", ["true"], log=str(tmp_path / "log"))
    host.stop("server", 5.0)
    host.start("server", ["sh", "-c", "echo again"], log=str(tmp_path / "log"))
    assert eventually(lambda: host.poll("server") == 0)
    assert host.tail("server")[0] == "again\n"


SERVER = """
import os, signal, sys, time
def leave(*_):
    print("asked", flush=True)
    os.kill(child, signal.SIGKILL)
    sys.exit(0)
child = os.fork()
if child == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True: time.sleep(1000)
signal.signal(signal.SIGTERM, signal.SIG_IGN if sys.argv[1] == "hangs" else leave)
print("ready", flush=True)
while True: time.sleep(1000)
"""


@pytest.mark.nsys
@pytest.mark.parametrize("server", ["leaves", "hangs"])
def test_nsys_writes_its_report_before_it_ends(run_id: str, tmp_path: Path, nsys: Path, server: str) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    command = [str(nsys), "profile", "-t", "nvtx", "-s", "none", "--cpuctxsw=none", "--trace-fork-before-exec=true"]
    with open_host(Settings().cluster, "localhost", run_id) as host:
        host.make_scratch(str(tmp_path / "scratch"))
        env = {"TMPDIR": str(tmp_path / "scratch")}
        ours = [sys.executable, "server.py", server]
        log = str(tmp_path / "log")
        host.start("server", [*command, "-o", "trace", *ours], env=env, cwd=str(tmp_path), log=log)
        assert eventually(lambda: "ready" in host.tail("server")[0])
        began = time.monotonic()
        assert host.stop("server", 2.0 if server == "hangs" else 30.0) is not None
        took = time.monotonic() - began
    assert ("asked" in Path(log).read_text()) == (server == "leaves")
    assert (tmp_path / "trace.nsys-rep").stat().st_size > 0
    assert took < 30.0  # neither waited for what had long ended
    assert not (tmp_path / "scratch").exists()
    assert not of_run(run_id)


# The keeper by itself


def test_a_signal_reaches_the_process_that_was_meant_or_none(bystander: subprocess.Popen[bytes]) -> None:
    stat = keeper_processes.read_stat(bystander.pid)
    assert stat is not None
    assert not keeper_processes.send(stat._replace(start=stat.start - 1), signal.SIGKILL)
    assert bystander.poll() is None
    assert keeper_processes.send(stat, signal.SIGKILL)
    assert bystander.wait() == -signal.SIGKILL
    assert not keeper_processes.send(stat, signal.SIGKILL)


@pytest.mark.parametrize("name", transport.SOURCES)
def test_the_keeper_runs_on_any_python_of_a_host(name: str) -> None:
    tree = ast.parse(resources.files("nsysk3.launch").joinpath(f"{name}.py").read_text(), feature_version=(3, 8))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert all(alias.name in sys.stdlib_module_names for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            package, _, module = str(node.module).rpartition(".")
            assert (package or module).split(".")[0] in sys.stdlib_module_names or module in transport.SOURCES
