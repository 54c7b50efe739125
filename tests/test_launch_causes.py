"""Why a server failed: what its logs say, in one line with a way out, and what is said while one waits."""

from __future__ import annotations

import signal

import pytest
from death_logs import DEATHS

from nsysk3.launch.failures import (
    explain,
    how_it_ended,
    recognise,
    relevant_lines,
)
from nsysk3.launch.health import PROGRESS_EVERY_S, STILL_EVERY_S, Progress, tidy

KINDS = {
    "oom": "oom", "kv-oom": "kv-memory", "watchdog": "watchdog", "decode-graph": "decode-graph-ipc",
    "port": "port-in-use", "dist-port": "port-in-use", "nccl": "nccl", "ib": "ib", "gloo": "gloo", "tp-ep": "tp-ep",
    "pp-layers": "pp-layers", "backend": "backend", "flag": "flag", "module": "not-installed", "model": "model",
    "driver": "gpu-kernels", "shm": "shared-memory", "no-cuda": "no-gpu", "unknown": None,
}  # fmt: skip


@pytest.mark.parametrize("name", DEATHS)
def test_known_deaths_are_recognised_with_a_way_out(name: str) -> None:
    noise = "[2026-08-21 12:02:08 PP0 TP0] Prefill batch, #new-seq: 1, #new-token: 8192, token usage: 0.05\n" * 50
    failure = recognise(noise + DEATHS[name] + "\n" + noise)
    assert (failure and failure.kind) == KINDS[name]
    assert recognise(noise) is None
    if failure:
        assert failure.line in " ".join(DEATHS[name].split())
        assert len(failure.advice) > 20
        assert "{" not in failure.message.replace(failure.line, "")
        assert failure.line in " ".join(" ".join(relevant_lines(noise + DEATHS[name], failure)[-3:]).split())


def test_the_cause_wins_over_what_it_causes() -> None:
    order = ["oom", "nccl", "watchdog"]
    for index, first in enumerate(order):
        for later in order[index:]:
            for logs in ([DEATHS[first], DEATHS[later]], [DEATHS[later], DEATHS[first]]):
                assert explain(logs, [1, -9]).kind == KINDS[first]
                assert explain(["\n".join(logs)], [1]).kind == KINDS[first]


def test_an_unknown_death_is_told_in_its_own_words() -> None:
    failure = explain([DEATHS["unknown"]], [1])
    assert (failure.kind, failure.line) == ("unknown", "ZeroDivisionError: the moon is in the wrong phase")
    assert "exit code 1" in failure.message
    assert explain([""], [-signal.SIGKILL]).kind == explain([""], [137]).kind == "killed"
    assert [how_it_ended(code) for code in (0, 3, -11, 143, 255)] == [
        "exit code 0", "exit code 3", "killed by SIGSEGV", "killed by SIGTERM", "exit code 255",
    ]  # fmt: skip


def test_hostile_logs_stay_one_short_printable_line() -> None:
    failure = recognise("torch.OutOfMemoryError: \x1b[31m" + "x" * 100_000 + "\x07")
    assert failure
    assert failure.message.isprintable()
    assert len(failure.message) < 500


def test_progress_says_little_and_never_nothing() -> None:
    now = 0.0
    lines: list[str] = []
    progress = Progress(lines.append, lambda: now)
    for second in range(420):  # a start of seven minutes that prints a bar a second on each of 8 ranks
        now = float(second)
        for rank in range(8):
            percent = second * 100 // 420
            progress.line("n1", f"[2026-08-21 12:00:00 PP{rank}] Loading safetensors: {percent}% |###  | 3/9")
        progress.still()
    assert 420 / STILL_EVERY_S <= len(lines) <= 420 / PROGRESS_EVERY_S + 1
    lines.clear()
    for _ in range(8):
        progress.line("n2", "[2026-08-21 12:00:00 PP3 TP1] Load weight end. avail mem=22.10 GB")
    assert lines == ["  n2: Load weight end. avail mem=22.10 GB"]
    now += STILL_EVERY_S
    progress.still()
    assert "still starting" in lines[-1]
    assert tidy("[2026-08-21 12:00:00 PP0] INFO:     Started \x1b[1m\n") == "Started [1m"
