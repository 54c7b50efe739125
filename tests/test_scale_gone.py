"""A Dask cluster that goes away in the middle: workers, the scheduler, or the client."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command import Ran, run
from dask_processes import DaskProcesses
from processes import eventually
from scale_runs import TWO, assert_same

import nsysk3
from nsysk3.scale.cluster import Cluster

pytest.importorskip("distributed")


@pytest.fixture
def at_first(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Do something as soon as a report has been given to a worker."""
    really = Cluster.give

    def arrange(what: Callable[[], None]) -> None:
        todo = [what]

        def give(self: Cluster, *given: Any) -> None:
            really(self, *given)
            if todo:
                todo.pop()()

        monkeypatch.setattr(Cluster, "give", give)

    return arrange


def analyze(dask: DaskProcesses, out: Path) -> Ran:
    return run("analyze", TWO, "--scheduler", dask.address, "-q", "--out", out)


def test_a_run_without_workers_waits_says_so_and_gives_up(
    tmp_path: Path, at_first: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NSYSK3_ANALYZE_PATIENCE_S", "2")
    with DaskProcesses(tmp_path, 1) as dask:
        at_first(dask.lose_workers)
        ran = analyze(dask, tmp_path / "out")
        assert (ran.code, ran.out) == (3, "")
        assert ran.err == (
            f"nsysk3: {dask.address}: no worker answers; waiting up to 2 s for one\n"
            f"nsysk3: {dask.address}: no Dask worker for 2 s; start some, and analyze again\n"
        )


def test_it_goes_on_with_a_worker_that_joins(
    tmp_path: Path, at_first: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with DaskProcesses(tmp_path, 1) as dask:
        at_first(dask.lose_workers)
        monkeypatch.setattr("nsysk3.scale.cluster._tell", lambda text: (print(text), dask.join()))
        with nsysk3.crew_of(scheduler=dask.address) as crew:
            found = nsysk3.analyze(TWO, crew=crew)
        assert_same(nsysk3.analyze(TWO), found)
    assert capsys.readouterr().out == f"{dask.address}: no worker answers; waiting up to 60 s for one\n"


def test_a_scheduler_that_dies_is_one_line(tmp_path: Path, at_first: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with DaskProcesses(tmp_path, 1) as dask:
        at_first(dask.lose_scheduler)
        ran = analyze(dask, tmp_path / "out")
    assert (ran.code, ran.out) == (3, "")
    assert ran.err == (
        f"nsysk3: {dask.address}: the Dask scheduler went away; start it and its workers, and analyze again\n"
    )
    assert capfd.readouterr().err == ""  # nor in Dask's words


def test_a_client_that_is_killed_leaves_nothing_on_workers(tmp_path: Path) -> None:
    script = tmp_path / "slow.py"
    script.write_text(
        "import sys, time, nsysk3\n"
        "from nsysk3.analysis import analyze\n"
        "def slow(*_, **__):\n"
        "    print('now', flush=True)\n"
        "    time.sleep(600)\n"
        "analyze.match = slow\n"
        "nsysk3.analyze(sys.argv[1], crew=nsysk3.crew_of(scheduler=sys.argv[2]))\n"
    )
    with DaskProcesses(tmp_path, 2) as dask:
        command = [sys.executable, script, TWO, dask.address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
            assert client.stdout is not None
            assert client.stdout.readline() == "now\n"
            assert dask.scratch()
            client.kill()
        assert eventually(lambda: not dask.scratch())


@pytest.mark.parametrize(
    "address", ["foo", "tcp://127.0.0.1", "http://127.0.0.1:80", "tcp://a:99999", "tcp://a b:1", "inproc://1.2.3.4/5/6"]
)
def test_what_is_no_address_is_refused_by_its_form(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)  # not even asked
    said = f"nsysk3: {address!r} is no address of a Dask scheduler; wanted is tcp://HOST:PORT, such as tcp://node1:8786"
    ran = run("analyze", TWO, "--scheduler", address)
    assert (ran.code, ran.err) == (2, f"{said} (--scheduler, or analyze.scheduler in nsysk3.toml)\n")
    monkeypatch.setenv("NSYSK3_ANALYZE_SCHEDULER", address)
    assert run("analyze", TWO).err == ran.err


def test_tls_without_certificates_says_what_is_wanting() -> None:
    ran = run("analyze", TWO, "--scheduler", "tls://127.0.0.1:9")
    assert (ran.code, ran.out, ran.err.count("\n")) == (3, "", 1)
    assert "needs certificates: set distributed.comm.tls" in ran.err
