"""Sweeps of which something fails, or which are killed, and are taken up where they stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from command import COMMAND, run
from sweep_places import REQUESTS, Place, busy, keys, place

from nsysk3.sweep import serve


@pytest.fixture
def here(tmp_path: Path) -> Place:
    return place(tmp_path)


def test_failed_layouts_are_written_down_and_the_sweep_goes_on(here: Place) -> None:
    deaths = {1: "die-at-start=oom", 2: "die-at-start=decode-graph"}
    words = [word for pp, fault in deaths.items() for word in ("--layout-args", f"PP{pp}=--fault {fault}")]
    ran = here.sweep("--pp", "1,2,4", "--concurrency", 2, "--repeats", 1, *words)
    assert ran.code == 4
    assert (
        ran.err.strip()
        .splitlines()[-1]
        .startswith("nsysk3: 2 of 3 layouts failed: PP1/TP4/EP4: a GPU ran out of memory")
    )
    assert keys(here.rows()) == [(4, 2, 1)]
    causes = {pp: here.layout(pp)["starts"][0]["cause"] for pp in deaths}
    assert [causes[pp]["kind"] for pp in (1, 2)] == ["oom", "decode-graph-ipc"]
    assert "PP2=--disable-decode-cuda-graph" in causes[2]["advice"]
    assert "a GPU ran out of memory" in ran.out  # the report says why PP1 is not in its tables
    assert here.record()["status"] == "failed"
    # What was advised is taken up where it stopped; what failed is tried again, what is done is kept.
    kept = here.rows()
    again = here.sweep(
        "--resume", "--layout-args", "PP1=--log-level info", "--layout-args", "PP2=--disable-decode-cuda-graph"
    )
    assert again.code == 0, again.err
    assert keys(here.rows()) == [(1, 2, 1), (2, 2, 1), (4, 2, 1)]
    assert here.rows()[2] == kept[0]
    assert [start["status"] for start in here.layout(2)["starts"]] == ["failed", "done"]
    assert (here.path / "out" / "service" / "pp2_tp2_ep2_start2").is_dir()
    assert "PP2/TP2/EP2: its server also got --disable-decode-cuda-graph" in again.out


def test_server_that_dies_under_load(here: Place) -> None:
    """The warm-up is request 1, the first repeat 2 to 5: the second one kills."""
    ran = here.sweep("--pp", 2, "--concurrency", 2, "--repeats", 3, "--layout-args", "PP2=--fault die-after=7")
    assert ran.code == 4
    start = here.layout(2)["starts"][0]
    assert (start["cause"]["kind"], start["cause"]["step"]) == ("killed", "loading")
    assert [row["status"] for row in here.rows()] == ["done", "failed"]
    assert [int(row["repeats"]) for row in here.rows(name="summary.csv")] == [1]
    assert not busy(here.port)


def test_a_repeat_with_errors_does_not_count(here: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third request fails, in another way with each layout."""
    monkeypatch.setattr(serve, "_DEATH_S", 0.2)  # no server dies here
    faults = {1: ("http-500=3", "HTTP 500"), 2: ("abort=3", "aborted"), 4: ("disconnect=3", "Protocol")}
    words = [word for pp, (fault, _) in faults.items() for word in ("--layout-args", f"PP{pp}=--fault {fault}")]
    ran = here.sweep("--pp", "1,2,4", "--concurrency", 2, "--repeats", 1, *words)
    assert ran.code == 4
    for row in here.rows():
        assert row["status"] == "failed"
        assert int(row["completed"]) + int(row["errors"]) == REQUESTS
        assert int(row["errors"]) > 0
        assert faults[int(row["pp"])][1] in row["cause"]
    assert len(here.rows()) == 3
    assert here.rows(name="summary.csv") == []
    assert "no report" in ran.err


def test_server_that_is_not_what_was_asked_for(tmp_path: Path) -> None:
    here = place(tmp_path, args=', "--fault", "wrong-info=pp_size:1"')
    assert here.sweep("--pp", 2, "--concurrency", 1, "--repeats", 1).code == 4
    assert "pp_size is 1, the plan asked for 2" in here.layout(2)["starts"][0]["cause"]["message"]
    assert here.rows() == []


def grown(here: Place, rows: int, process: subprocess.Popen[str]) -> bool:
    return len(here.rows()) > rows or process.poll() is not None


def until(ready: Callable[[], object], limit: float = 60.0) -> None:
    end = time.monotonic() + limit
    while not ready():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.02)


def test_a_killed_sweep_is_taken_up_where_it_stopped(tmp_path: Path) -> None:
    """First somebody presses Ctrl-C, then somebody kills it, and then it may run to its end."""
    here = place(tmp_path)
    here.settings.write_text(here.settings.read_text().replace('"400"', '"1"'))  # a repeat takes most of a second
    new = here.words("--pp", "1,2", "--concurrency", 2, "--repeats", 2)
    again = ["sweep", "--resume", "--config", str(here.settings), "--out", str(here.path / "out")]
    done: list[dict[str, str]] = []
    for number, words in ((signal.SIGINT, new), (signal.SIGKILL, again)):
        process = subprocess.Popen(
            [*COMMAND, *words],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        until(partial(grown, here, len(done), process))
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
        assert here.rows()[: len(done)] == done
        done = here.rows()
        assert 0 < len(done) < 4, err
        if number == signal.SIGINT:
            assert process.returncode == 130
            assert "--resume --out" in err.strip().splitlines()[-1]
            assert here.record()["status"] == "interrupted"
            assert not busy(here.port)
        else:
            assert process.returncode == -signal.SIGKILL
            until(lambda: not busy(here.port))  # nobody is left behind, however it ended
    # In the middle of a repeat: its JSON line is there, its row is not.
    half = here.path / "out" / "raw" / "pp2_tp2_ep2_c2_r2.jsonl"
    half.parent.mkdir(exist_ok=True)
    half.write_text('{"completed": 1, "inpu')
    ran = run(*again)
    assert ran.code == 0, ran.err
    assert keys(here.rows()) == [(1, 2, 1), (1, 2, 2), (2, 2, 1), (2, 2, 2)]
    assert here.rows()[: len(done)] == done
    assert json.loads(half.read_text())["completed"] == REQUESTS
    assert {start["status"] for each in here.record()["layouts"] for start in each["starts"]} == {"interrupted", "done"}
    assert here.record()["status"] == "done"


def test_two_sweeps_in_one_folder(here: Place) -> None:
    import fcntl

    assert here.sweep("--pp", 1, "--concurrency", 1, "--repeats", 1).code == 0
    holder = os.open(here.path / "out", os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    try:
        ran = here.sweep("--resume", "--repeats", 2)
    finally:
        os.close(holder)
    assert (ran.code, "another sweep is running" in ran.err) == (2, True)
