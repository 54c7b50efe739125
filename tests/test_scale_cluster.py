"""The same on the workers of a Dask cluster, and what is said when there is none."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from command import run
from scale_runs import TWO, assert_same, four_nodes

import nsysk3
from nsysk3.errors import MissingToolError
from nsysk3.scale.cluster import Cluster

distributed = pytest.importorskip("distributed")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two worker processes, each with a nanny that starts it again."""
    import dask

    folder = tmp_path_factory.mktemp("dask")
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 0, "distributed.admin.log-length": 0}),
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None, local_directory=str(folder), silence_logs=50
        ) as found,
    ):
        yield found


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return four_nodes(tmp_path_factory.mktemp("run"), micro_batches=2)


def scratch(cluster: Any) -> list[Path]:
    """What workers keep of runs."""
    return [path for worker in cluster.workers.values() for path in Path(worker.local_directory).rglob("nsysk3-*")]


def test_a_cluster_finds_what_one_process_finds(
    cluster: Any, simulated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(simulated.parent)  # a worker's current folder is another
    ran = run("analyze", simulated.name, "--scheduler", cluster.scheduler_address, "--out", tmp_path / "out")
    assert ran.code == 0, ran.err
    assert "2 workers: " in ran.err
    assert_same(nsysk3.analyze(Path(simulated.name)), nsysk3.Result.load(tmp_path / "out"))
    assert scratch(cluster) == []


class Deadly(Cluster):
    """Kills the worker that takes ``report`` in ``step``, so many ``times``."""

    def __init__(self, address: str, report: int, step: int, times: int) -> None:
        super().__init__(address)
        self._doomed, self._times = (report, step), times

    def give(self, member: str, report: int, number: int, calls: Sequence[bytes]) -> None:
        doomed = (report, number) == self._doomed and self._times > 0
        pids = self._client.run(os.getpid) if doomed else {}  # not once one is dead
        super().give(member, report, number, calls)
        if doomed:
            self._times -= 1
            for _ in range(500):
                if self._client.processing(workers=[member])[member]:
                    break
                time.sleep(0.01)
            os.kill(pids[member], signal.SIGKILL)


def test_a_worker_that_dies_takes_its_reports_events_along_and_no_more(cluster: Any, simulated: Path) -> None:
    crew = Deadly(cluster.scheduler_address, report=1, step=2, times=1)
    crew.retries = 2
    with crew:
        found = nsysk3.analyze(simulated, crew=crew)
    assert_same(nsysk3.analyze(simulated), found)
    assert crew.account.repeated >= 1


def test_a_report_that_kills_its_workers_is_a_problem(cluster: Any) -> None:
    with Deadly(cluster.scheduler_address, report=1, step=0, times=1) as crew:
        found = nsysk3.analyze(TWO, crew=crew)
    assert [Path(problem.path).name for problem in found.document.problems] == ["node1.sqlite"]
    assert len(found.rank_metrics) == 1


def test_another_nsysk3_on_the_workers_is_named(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsysk3.scale.cluster.__version__", "99.0")
    with pytest.raises(MissingToolError, match=r"has nsysk3 \d.*, here is 99\.0: install the same everywhere"):
        nsysk3.crew_of(scheduler=cluster.scheduler_address)
    monkeypatch.setattr("nsysk3.scale.cluster._VERSION", "__import__('no_nsysk3_here').__version__")
    with pytest.raises(MissingToolError, match="nsysk3 cannot be imported there"):
        nsysk3.crew_of(scheduler=cluster.scheduler_address)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:9", "nonsense", "udp://x:1", ""])
def test_no_scheduler_there_is_one_line(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsysk3.scale.cluster._CONNECT_S", 1)
    ran = run("analyze", TWO, "--scheduler", address)
    assert ran.code in (2, 3)
    assert ran.out == ""
    assert ran.err.count("\n") == 1, ran.err
    assert "scheduler" in ran.err


def test_without_dask_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "distributed", None)
    ran = run("analyze", TWO, "--scheduler", "tcp://127.0.0.1:9")
    assert (ran.code, ran.out) == (3, "")
    assert ran.err == "nsysk3: --scheduler needs Dask: pip install 'nsysk3[scale]'\n"


def test_workers_and_a_scheduler_are_one_or_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = run("analyze", TWO, "--workers", "2", "--scheduler", "tcp://127.0.0.1:9")
    assert (ran.code, ran.err) == (2, "nsysk3: --workers and --scheduler: one or the other\n")
    assert run("analyze", TWO, "--workers", "0").code == 2
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("nsysk3.scale.cluster._CONNECT_S", 1)
    Path("nsysk3.toml").write_text('[analyze]\nscheduler = "tcp://127.0.0.1:9"\n')
    assert run("analyze", TWO, "-q", "--out", "out").code == 3
    assert run("analyze", TWO, "-q", "--out", "out", "--workers", "1").code == 0
