"""Windows of stages that last differently long are no wall time of the run: no median stands for one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl
import pytest
from compare_results import MS, made, manifest, rank, row, with_forwards

from nsysk3.compare import compare
from nsysk3.compare.gate import Gate, check
from nsysk3.compare.samples import WHOLE
from nsysk3.report.catalogue import catalogue
from nsysk3.report.compare_terminal import caption, grouped
from nsysk3.report.html import render_comparison
from nsysk3.report.markdown import render_comparison as markdown
from nsysk3.result import Result

WHY = "windows of its ranks last 2,500 to 9,900 ms, so they give no wall time of the run"
EMPTY = pl.DataFrame(schema={"group": pl.String, "bucket": pl.String, "ns": pl.Float64, "share": pl.Float64})


def windows(spent_ms: Sequence[float], window: str = "capture", stages: Sequence[int] | None = None) -> Result:
    """A pipeline, one rank a stage, whose windows last so long."""
    ranks = [
        rank(world, (stages or range(len(spent_ms)))[world], window_ns=round(ms * MS))
        for world, ms in enumerate(spent_ms)
    ]
    depth = len(set(stages or spent_ms))
    return made(
        ranks, manifest=manifest(depth, len(ranks) // depth), window=window, budget_summary=EMPTY, collectives=EMPTY,
        p2p=EMPTY,
    )  # fmt: skip


def lasting(result: Result, spent_ms: Sequence[float], window: str = "capture") -> Result:
    """The same forwards in windows of another length, all from the same start on."""
    ns = [round(ms * MS) for ms in spent_ms]
    ranks = [each.model_copy(update={"window_ns": own}) for each, own in zip(result.document.ranks, ns, strict=True)]
    told = result.document.window.model_copy(update={"used": window})
    tables = {**result.tables, "rank_metrics": result.rank_metrics.with_columns(pl.Series("window_ns", ns))}
    return Result(result.document.model_copy(update={"ranks": ranks, "window": told}), tables)


def test_no_median_of_unlike_windows() -> None:
    runs = [windows([7264], stages=[0]), windows([2500, 4000, 6000, 9900])]
    comparison = compare(*runs)
    wall = row(comparison, "window_ns")
    assert (wall.values[0].value, wall.values[1].value, wall.values[1].reason) == (7264 * MS, None, WHY)
    assert (wall.deltas[0].change, wall.deltas[0].verdict) == (None, "not known")
    for gate in ("window_ns>+1%", "window_ns<+5ms", "window_ns>1s"):
        (outcome,) = check(comparison, [Gate.parse(gate)])
        assert (outcome.state, WHY in (outcome.reason or "")) == ("undecided", True)
    assert f"no Wall time of PP4: {WHY}" in (caption(comparison, "forward", [wall]) or "")
    assert f"no Wall time of PP4: {WHY}" in markdown(comparison)
    assert WHY in render_comparison(comparison, runs)
    assert "不能代表整次运行的耗时" in render_comparison(comparison, runs, lang="zh")


def test_a_row_that_no_run_has_still_says_why() -> None:
    run = windows([2500, 9900])
    (shown,) = dict(grouped(compare(run, run)))["forward"]
    assert shown.metric == "window_ns"
    assert f"no Wall time: {WHY}" in markdown(compare(run, run))


@pytest.mark.parametrize(
    ("spent", "stages"),
    [([1000.0, 1090.0], None), ([1000.0, 1200.0], [0, 0]), ([1000.0, 1180.0, 1190.0, 1010.0], [0, 0, 1, 1])],
    ids=["about as long", "one stage", "medians of the stages"],
)
def test_windows_that_last_about_as_long_are_a_wall_time(spent: list[float], stages: list[int] | None) -> None:
    run = windows(spent, stages=stages)
    assert row(compare(run, run), "window_ns").values[0].value == np.median(spent) * MS


def test_without_known_stages_each_rank_counts() -> None:
    run = made([rank(world, pp_rank=None, p2p_count=1, window_ns=ns) for world, ns in enumerate((100, 200))])
    reason = row(compare(run, run), "window_ns").values[0].reason
    assert reason == "windows of its ranks last 0.000 to 0.000 ms, so they give no wall time of the run"


def test_whole_forwards_tell_what_unlike_windows_do_not() -> None:
    run = with_forwards(2, 1, np.full((2, 6), 8.0))
    spent = (run.document.ranks[0].window_ns / MS + 1, run.document.ranks[0].window_ns / MS + 900)
    comparison = compare(run, lasting(run, spent))
    window, forward = (row(comparison, "window_ns", scope) for scope in ("window", "forward"))
    assert (window.values[1].value, "analyze with --window prefill" in (window.values[1].reason or "")) == (None, True)
    assert catalogue("zh").said(window.values[1].reason or "")[0].endswith("：请用 --window prefill 重新分析")
    assert (forward.samples, forward.values[1].value) == (WHOLE, forward.values[0].value)
    # With one forward a rank there is no row of them either.
    once = with_forwards(2, 1, np.full((2, 1), 8.0))
    alone = row(compare(run, lasting(once, (50, 90))), "window_ns", "forward").values[1]
    assert (alone.value, "no wall time of the run" in (alone.reason or "")) == (None, True)


@pytest.mark.parametrize(("window", "kept"), [("prefill", True), ("steady", True), ("capture", False)])
def test_windows_of_as_many_whole_forwards_are_a_wall_time(window: str, kept: bool) -> None:
    run = with_forwards(2, 1, np.array([[8.0] * 6, [9.5] * 6]))
    ns = [rank.window_ns / MS for rank in run.document.ranks]
    assert ns[1] > 1.1 * ns[0]
    comparison = compare(run, lasting(run, ns, window))
    assert (row(comparison, "window_ns").values[1].value is not None) == kept


def test_windows_of_more_forwards_on_one_stage_are_none() -> None:
    run = with_forwards(2, 1, np.full((2, 6), 8.0))
    forwards = run.tables["forwards"].filter((pl.col("rank") == 0) | (pl.col("forward") < 5))
    one = run.document.ranks[0].window_ns / MS
    other = Result(run.document, {**run.tables, "forwards": forwards})
    comparison = compare(run, lasting(other, (one, one * 5 / 6 + 0.01), "prefill"))
    reason = row(comparison, "window_ns").values[1].reason or ""
    assert reason.endswith("no wall time of the run")  # another window would not help
