"""Not like for like at one layout too: unresolved communication, forwards told in two ways; one run is one sample."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from compare_results import MS, made, manifest, rank, row, with_forwards

from nsysk3.compare import Comparison, compare
from nsysk3.compare.gate import Gate, check
from nsysk3.compare.verdict import verdict
from nsysk3.errors import InputError
from nsysk3.report.catalogue import catalogue
from nsysk3.report.compare_terminal import grouped, short, why_apart
from nsysk3.result import Result


def split(transfer: float, wait: float, unresolved: float) -> Result:
    """Eight ranks with this much exposed communication, ms, a little more on each."""
    parts = {"transfer": transfer, "wait": wait, "unresolved": unresolved, "comm": transfer + wait + unresolved}
    return made(
        [
            rank(world, **{f"exposed_{name}_ns": round(ms * MS) + world for name, ms in parts.items()})
            for world in range(8)
        ],
        manifest=manifest(1, 8),
    )


def forwards_from(result: Result, source: str) -> Result:
    """The same with forwards told from ``source``."""
    forwards = result.tables["forwards"].with_columns(pl.lit(source).alias("source"))
    return Result(result.document, {**result.tables, "forwards": forwards})


def state(comparison: Comparison, gate: str) -> str:
    (outcome,) = check(comparison, [Gate.parse(gate)])
    return outcome.state


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("metric", ["exposed_transfer_ns", "exposed_wait_ns"])
def test_time_that_only_moved_is_no_change(metric: str, swapped: bool) -> None:
    runs = [split(2554, 6, 3), split(64, 0, 2499)]
    comparison = compare(*(reversed(runs) if swapped else runs))
    found = row(comparison, metric)
    assert (found.group, found.deltas[0].like_for_like, found.deltas[0].verdict) == ("apart", False, "not known")
    assert short(found.deltas[0]) == "-"
    assert "98% of the exposed communication of" in (found.why_apart or "")
    assert row(comparison, "exposed_unresolved_ns").deltas[0].verdict == ("lower" if swapped else "higher")
    assert state(comparison, f"{metric}>+1%") == state(comparison, f"{metric}<-1%") == "undecided"
    for text in (found.why_apart, *why_apart([found, row(comparison, "kernel_count")])):
        said, lang = catalogue("zh").said(text or "")
        assert (lang, "transfer" in said) == ("zh", False)


def test_an_unresolved_part_that_grows_with_a_small_change_decides_nothing() -> None:
    comparison = compare(split(100, 6, 4), split(96, 6, 8))
    assert "more than a tenth of the change" in (row(comparison, "exposed_transfer_ns").why_apart or "")
    assert row(comparison, "exposed_wait_ns").deltas[0].verdict == "no difference shown"


def test_changes_beyond_the_unresolved_part_keep_their_verdict() -> None:
    comparison = compare(split(200, 6, 4), split(160, 3, 4))
    for metric in ("exposed_transfer_ns", "exposed_wait_ns"):
        found = row(comparison, metric)
        assert (found.group, found.deltas[0].verdict) == ("time", "lower")
    assert state(comparison, "exposed_transfer_ns<-1%") == "failed"


@pytest.mark.parametrize("source", ["period", "layer order", "model range"])
def test_forwards_of_two_sources_are_not_held_against_each_other(source: str) -> None:
    run = with_forwards(1, 4, 5 + np.random.default_rng(2).normal(0, 1, (4, 10)))
    comparison = compare(run, forwards_from(with_forwards(1, 4, np.full((4, 10), 3.0)), source))
    rows = [each for each in comparison.rows if each.scope != "window" and each.deltas[0].change is not None]
    assert {"allreduce_total_ns", "forward_p50_ns", "window_ns"} <= {each.metric for each in rows}
    assert all(each.group == "apart" and each.doubted and each.why_apart for each in rows)
    assert not [each for each in comparison.rows if each.scope == "window" and each.group == "apart"]
    # What is shown and gated instead is the window.
    chosen = comparison.row("allreduce_total_ns")
    assert (chosen and chosen.scope, state(comparison, "allreduce_total_ns<-1%")) == ("window", "failed")
    assert state(comparison, "forward_p50_ns>+1%") == "undecided"
    assert "forward_p50_ns" in [each.metric for each in dict(grouped(comparison))["apart"]]
    changed, limits = verdict(comparison)
    assert "per 1,000 tokens" not in changed
    assert "forwards are told from nsysk3's marker in base, from the " in limits
    said, _ = catalogue("zh").said(limits)
    assert not [word for word in ("forwards", "marker", "kernels", " in ", "range", "order") if word in said], said


def test_forwards_of_one_source_are_like_for_like() -> None:
    run = forwards_from(with_forwards(1, 4, np.full((4, 10), 3.0)), "period")
    assert not [each for each in compare(run, run).rows if each.doubted]


def test_forwards_of_a_deeper_pipeline_are_shorter_by_layout() -> None:
    comparison = compare(with_forwards(1, 4, np.full((4, 10), 8.0)), with_forwards(2, 2, np.full((4, 10), 4.0)))
    for metric in ("forward_p50_ns", "forward_p95_ns"):
        found = row(comparison, metric, "forward")
        assert (found.group, found.deltas[0].like_for_like) == ("apart", False)
        assert "shorter forward on it is the layout itself" in (found.why_apart or "")
        assert catalogue("zh").said(found.why_apart or "")[1] == "zh"
    assert row(comparison, "window_ns", "forward").group == "forward"


@pytest.mark.parametrize("scope", ["window", "forward", "1k_tokens"])
def test_wall_time_of_a_run_is_one_sample(scope: str) -> None:
    comparison = compare(*(with_forwards(1, 8, np.full((8, 10), ms)) for ms in (3.0, 2.9)))
    wall = row(comparison, "window_ns", scope)
    assert [(value.low, value.high) for value in wall.values] == [(None, None)] * 2
    assert wall.deltas[0].verdict == "not enough samples"
    assert "the ranks of a run share it" in (wall.values[0].reason or "")
    assert catalogue("zh").said(f"Wall time: {wall.values[0].reason}")[1] == "zh"


@pytest.mark.parametrize("text", ["forward_p50_ns>+2", "window_ns/forward<400", "exposed_wait_ns > 0"])
def test_a_time_without_a_unit_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="is a time: write ns, us, ms or s, or % for a change"):
        Gate.parse(text)
