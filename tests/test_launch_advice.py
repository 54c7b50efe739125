"""What one should know about a plan before it runs: warnings and notes, and a load that is long enough."""

from __future__ import annotations

from command import run
from hypothesis import given
from hypothesis import strategies as st
from launch_plans import planned


def test_a_micro_batch_of_one_is_warned_about_loudly() -> None:
    queue = planned(4, "--pp-max-micro-batch-size", "1", load={"concurrency": 16})
    (warning,) = queue.warnings
    assert "at most 4 run and 12 wait" in warning
    ran = run("profile", "--config", "kimi-k3-6000d", "--pp", 8, "--dry-run", "--", "--pp-max-micro-batch-size", 1)
    assert "# WARNING: --pp-max-micro-batch-size 1" in ran.out
    assert planned(4, load={"concurrency": 16}).warnings == ()
    assert planned(1, "--pp-max-micro-batch-size", "1").warnings == ()


def test_deep_pipelines_get_advice_and_no_options() -> None:
    (note,) = [note for note in planned(16).notes if "watchdog" in note]
    assert "--disable-decode-cuda-graph" in note
    assert "--watchdog-timeout" not in planned(16).nodes[0].argv
    told = planned(16, "--disable-decode-cuda-graph", "--watchdog-timeout", "3600")
    assert not any("watchdog" in note for note in told.notes)
    assert not any("watchdog" in note for note in planned(8).notes)


@given(st.integers(1, 64), st.integers(1, 200), st.integers(1, 100_000), st.integers(1, 20_000))
def test_a_load_is_long_enough_for_its_window(concurrency: int, forwards: int, length: int, chunk: int) -> None:
    load = {"concurrency": concurrency, "input_len": length, "chunk": chunk}
    plan = planned(8, load=load, window={"forwards": forwards})
    assert plan.requests >= 5 * concurrency
    assert plan.requests * -(-length // chunk) >= plan.steps
    assert plan.warnings == ()


def test_a_load_that_is_too_short_is_warned_about() -> None:
    assert any("end short" in warning for warning in planned(8, load={"requests": 4}).warnings)
