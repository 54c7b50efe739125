"""How a capture starts and ends with the SGLang plugin: no stage is cut, no range is half open."""

from __future__ import annotations

import importlib
import sys
import threading
import types
from typing import Any

import pytest
from fake_torch import Tape
from plugin_process import batch, manager_of, sglang, tape

from nsysk3.plugin.capture import stop_capture, synchronize
from nsysk3.plugin.hooks import Hooks
from nsysk3.plugin.rank import Facts

__all__ = ["sglang", "tape"]  # fixtures
STAGE_1 = Facts(world=1, world_size=2, pp=1, pp_size=2, device=1, tp_ranks=(1,), pp_ranks=(0, 1))


def test_the_window_starts_and_ends_between_forwards(sglang: Any, tape: Tape) -> None:
    profiler = manager_of(tape)
    scheduler = sglang.Scheduler(profiler=profiler)
    scheduler.run_batch(batch(at_start=profiler._start_profile))
    scheduler.run_batch(batch())
    for _ in range(2):  # SGLang asks to stop at every forward after the last step
        scheduler.run_batch(batch(at_start=profiler._stop_profile))
    forwards = [[f"push nsysk3.forward {n}", f"pop nsysk3.forward {n}"] for n in (1, 2, 3, 4)]
    assert [line for line in tape.shape() if not line.startswith("mark")] == [
        "capture starts", "start nsysk3.prefill_window", *forwards[0], *forwards[1],
        "end nsysk3.prefill_window", "synchronize", "cudaProfilerStop", *forwards[2], "cudaProfilerStop", *forwards[3],
    ]  # fmt: skip


def test_a_rank_is_named_when_the_capture_opens_and_with_every_forward(sglang: Any, tape: Tape) -> None:
    profiler = manager_of(tape)
    profiler._start_profile()
    sglang.Scheduler(profiler=profiler).run_batch(batch())
    kinds = [line.partition(" ")[0] for line in tape.log if not line.startswith("capture")]
    assert kinds == ["mark", "start", "push", "mark", "pop"]


def stop_before_a_forward(hooks: Hooks, tape: Tape, facts: Facts, first_gpu: bool) -> list[str]:
    """What a rank does when the capture's last step is over, at the start of the forward after it."""

    class Manager:
        profile_in_progress = True
        dp_tp_cpu_group = object()
        profiler_activities = ["CUDA_PROFILER"]  # noqa: RUF012

        def stop(self) -> str:
            tape.log.append("SGLang stops")
            if first_gpu and "CUDA_PROFILER" in self.profiler_activities:
                tape.log.append("cudaProfilerStop")
            return "stopped"

    manager = Manager()

    def forward(*_: Any) -> str:
        if tape.log:
            assert hooks.stop_profile(Manager.stop, manager) == "stopped"
        hooks.profile_step(None)
        return "result"

    hooks.start_profile(None, manager)
    tape.log.clear()
    for count in (3, 4):
        assert hooks.run_batch(forward, types.SimpleNamespace(forward_ct=count), batch()) == "result"
    assert manager.profiler_activities == ["CUDA_PROFILER"]
    assert not tape.open
    return [line for line in tape.shape() if not line.startswith("mark")]


@pytest.mark.parametrize(
    ("facts", "first_gpu", "expected"),
    [
        # one stage: all its GPUs finish, then the first stops
        (Facts(tp=0, tp_size=2), True, ["synchronize", "barrier", "SGLang stops", "cudaProfilerStop"]),
        (Facts(world=1, tp=1, tp_size=2), False, ["synchronize", "barrier", "SGLang stops"]),
        # two stages on a node: the first leaves it to the last
        (Facts(pp=0, pp_size=2), True, ["SGLang stops"]),
        (Facts(pp=1, pp_size=2), False, ["synchronize", "barrier", "SGLang stops", "cudaProfilerStop"]),
        (Facts(pp=1, pp_size=2, tp=1, tp_size=2), False, ["synchronize", "barrier", "SGLang stops"]),
        # four stages on two nodes: each node's last
        (Facts(pp=2, pp_size=4, nnodes=2), True, ["SGLang stops"]),
        (Facts(pp=1, pp_size=4, nnodes=2), False, ["synchronize", "barrier", "SGLang stops", "cudaProfilerStop"]),
        # a stage over two nodes: the first GPU of each
        (Facts(tp=2, tp_size=4, nnodes=2), True, ["synchronize", "barrier", "SGLang stops", "cudaProfilerStop"]),
        # every process opens a capture of its own, and Nsight counts
        (Facts(pp=0, pp_size=2, each_captures=True), True, ["SGLang stops", "cudaProfilerStop"]),
        (
            Facts(pp=1, pp_size=2, each_captures=True),
            True,
            ["synchronize", "barrier", "SGLang stops", "cudaProfilerStop"],
        ),
    ],
)
def test_the_nodes_last_stage_ends_the_capture(
    sglang: Any, tape: Tape, facts: Facts, first_gpu: bool, expected: list[str]
) -> None:
    shape = stop_before_a_forward(Hooks(tape, lambda: facts, lambda: "nsysk3=0"), tape, facts, first_gpu)
    forwards = [[f"push nsysk3.forward {n}", f"pop nsysk3.forward {n}"] for n in (4, 5)]
    window = ["start nsysk3.prefill_window", "end nsysk3.prefill_window"]
    assert shape == [window[0], *forwards[0], window[1], *expected, *forwards[1]]


def test_a_stop_without_a_capture_waits_for_nothing(sglang: Any, tape: Tape) -> None:
    profiler = manager_of(tape)
    assert profiler._start_profile() == "started"
    profiler.profiler_activities = ["CPU"]
    assert profiler._stop_profile() == "stopped"
    assert "synchronize" not in tape.log


def test_a_stop_that_cannot_settle_still_stops(
    sglang: Any, tape: Tape, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(group: object, timeout: object) -> None:
        raise RuntimeError("a rank is gone")

    monkeypatch.setattr(sys.modules["torch"].distributed, "monitored_barrier", broken)
    shape = stop_before_a_forward(Hooks(tape, lambda: STAGE_1, lambda: "nsysk3=0"), tape, STAGE_1, False)
    assert shape[-4:-2] == ["SGLang stops", "cudaProfilerStop"]
    assert "a rank is gone" in caplog.text


def test_the_second_profiler_manager_settles_too(sglang: Any, tape: Tape) -> None:
    utils = importlib.import_module("sglang.srt.utils.profile_utils")
    manager = utils.ProfileManager()
    scheduler = sglang.Scheduler()
    scheduler.run_batch(batch(at_start=lambda: manager._do_start("prefill")))
    manager._do_stop()
    assert [line for line in tape.shape() if not line.startswith("mark")] == [
        "start nsysk3.prefill_window",
        "push nsysk3.forward 1",
        "pop nsysk3.forward 1",
        "end nsysk3.prefill_window",
        "synchronize",
    ]
    assert utils.LOG == ["capture starts", "cudaProfilerStop"]


def test_waiting_for_a_busy_gpu_ends(sglang: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(sys.modules["torch"].cuda, "synchronize", lambda device: released.wait(30))
    assert synchronize(limit_s=0.01) is False
    released.set()
    assert synchronize(limit_s=30) is True


def test_a_stop_that_nothing_started_is_sglangs_alone(sglang: Any, tape: Tape) -> None:
    profiler = manager_of(tape)
    profiler.profiler_activities = None
    hooks = Hooks(tape, lambda: Facts(pp=0, pp_size=2), lambda: "nsysk3=0")
    assert hooks.stop_profile(lambda manager: "not in progress", profiler) == "not in progress"
    assert tape.log == []


def test_a_rank_works_on_while_nsight_waits_for_the_others(sglang: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    others = threading.Event()
    monkeypatch.setattr("nsysk3.plugin.capture._profiler_stop", lambda: lambda: others.wait(30))
    stop_capture()  # returns
    waiting = [each for each in threading.enumerate() if each.name == "nsysk3-stop"]
    assert len(waiting) == 1
    others.set()
    waiting[0].join(30)
