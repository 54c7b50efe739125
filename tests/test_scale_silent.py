"""One worker of several that hangs: it is said, and another does its report."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from dask_processes import DaskProcesses
from scale_runs import TWO, assert_same

import nsysk3
from nsysk3.result import Result
from nsysk3.scale.cluster import Cluster
from nsysk3.scale.crew import Crew
from nsysk3.scale.pool import Pool


class Stopped(Pool):
    """Two processes, of which one is stopped just before it is given its first report, as by kill -STOP."""

    def give(self, member: str, report: int, number: int, calls: Sequence[bytes]) -> None:
        """Stop, and give."""
        if report == number == 0 and not self.account.repeated:
            pid = self._members[member].process.pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
        super().give(member, report, number, calls)


def found_though(said: str, crew: Crew, found: Result, capsys: pytest.CaptureFixture[str]) -> None:
    """All was found, one report was done again, and one line, a pattern, said so."""
    assert_same(nsysk3.analyze(TWO), found)
    assert crew.account.repeated == 1
    assert re.fullmatch(f"nsysk3: {said}\n", capsys.readouterr().err)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="only Linux tells who is stopped")
def test_a_stopped_process_is_ended_and_replaced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("nsysk3.scale.pool._STOPPED_S", 2)
    with Stopped(2) as crew:
        found = nsysk3.analyze(TWO, crew=crew)
    stopped = r"worker process \d+ has been stopped for 2 s while reading node0 \(1/2\); it is ended, another does that"
    found_though(stopped, crew, found, capsys)


def test_what_a_silent_dask_worker_has_goes_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("distributed")
    give, speaking = Cluster.give, Cluster._speaking
    hung: list[str] = []

    def hang(self: Cluster, member: str, report: int, *more: Any) -> None:
        if not hung:
            os.kill(self.on_all(os.getpid)[member], signal.SIGSTOP)
            hung.append(member)
        give(self, member, report, *more)

    def silent(self: Cluster, now: float) -> list[str]:
        """As it is told two minutes later."""
        found = speaking(self, now)
        self._silent = dict.fromkeys(hung, 130.0)
        return [name for name in found if name not in hung]

    with DaskProcesses(tmp_path, 2) as dask, nsysk3.crew_of(scheduler=dask.address) as crew:
        assert isinstance(crew, Cluster)
        crew._client.wait_for_workers(2, timeout=60)
        monkeypatch.setattr(Cluster, "give", hang)
        monkeypatch.setattr(Cluster, "_speaking", silent)
        found = nsysk3.analyze(TWO, crew=crew)
    silence = rf"{hung[0]}: this worker has been silent for 130 s while reading node\d \(\d/2\)"
    found_though(f"{silence}; after 120 s another does that", crew, found, capsys)
