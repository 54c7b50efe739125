"""Forwards, layers and stable ranks are the samples of a comparison."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from compare_results import MS, made, rank, row, with_forwards

from nsysk3.compare import compare
from nsysk3.result import Result


def test_forwards_are_samples() -> None:
    rng = np.random.default_rng(1)
    base = with_forwards(1, 2, 8 + rng.normal(0, 0.2, (2, 12)), calls=6)
    other = with_forwards(2, 1, 5 + rng.normal(0, 0.2, (2, 10)), calls=3)
    comparison = compare(base, [other])
    count = row(comparison, "allreduce_count", "forward")
    assert [value.value for value in count.values] == [6, 3]
    assert [(value.ranks, value.forwards, value.n) for value in count.values] == [(2, 12, 24), (2, 10, 20)]
    assert count.deltas[0].verdict == "lower"
    total = row(comparison, "allreduce_total_ns", "forward")
    low, high = total.deltas[0].low_share, total.deltas[0].high_share
    assert low is not None
    assert high is not None
    assert low < 15 / 48 - 1 < high
    per_token = row(comparison, "allreduce_total_ns", "1k_tokens")
    assert per_token.values[0].value == pytest.approx((total.values[0].value or 0) / 8.192)
    window = row(comparison, "allreduce_total_ns", "window").deltas[0]
    assert (window.verdict, window.low) == ("not enough samples", None)
    assert "an interval needs 3" in (window.reason or "")
    assert [side.forwards for side in (comparison.base, *comparison.others)] == [12, 10]
    assert "different numbers of forwards (PP1 12, PP2 10)" in comparison.verdict[1]


def test_wait_and_transfer_add_up_in_every_scope() -> None:
    comparison = compare(with_forwards(1, 2, np.full((2, 4), 8.0)), [with_forwards(2, 1, np.full((2, 4), 5.0))])
    for scope in ("window", "forward", "1k_tokens"):
        total, wait, transfer = (
            row(comparison, f"allreduce_{part}_ns", scope).values[0].value for part in ("total", "wait", "transfer")
        )
        assert (wait or 0) + (transfer or 0) == pytest.approx(total)


def test_forward_times_and_wall_time() -> None:
    comparison = compare(with_forwards(1, 2, np.full((2, 4), 8.0)), [with_forwards(2, 1, np.full((2, 4), 5.0))])
    assert row(comparison, "forward_p50_ns", "forward").values[0].value == 42 * MS
    wall = row(comparison, "window_ns", "forward")
    assert [value.value for value in wall.values] == pytest.approx([42 * MS, 30 * MS], rel=1e-3)
    assert wall.values[0].forwards == 0  # one number a rank
    assert row(comparison, "forward_p95_ns", "forward").values[0].value == 42 * MS


def test_without_tokens_there_are_no_rows_per_token() -> None:
    base = with_forwards(1, 2, np.full((2, 4), 8.0), tokens=None)
    comparison = compare(base, [with_forwards(2, 1, np.full((2, 4), 5.0))])
    per_token = row(comparison, "allreduce_total_ns", "1k_tokens")
    assert per_token.values[0].reason == "the trace does not tell how many tokens a forward had"
    assert per_token.values[1].value is not None


def test_layers_are_samples_where_both_runs_have_them() -> None:
    def layered(run: Result, compute: int) -> Result:
        cells = run.forwards.select("rank", "stage", "forward", "start_utc_ns", "end_utc_ns")
        layers = pl.concat(
            [cells.with_columns(pl.lit(n).alias("layer"), pl.lit(compute).alias("compute_ns")) for n in (0, 1)]
        )
        return Result(run.document, {**run.tables, "layers": layers})

    base, other = with_forwards(1, 2, np.full((2, 4), 8.0)), with_forwards(2, 1, np.full((2, 4), 5.0))
    both = row(compare(layered(base, 100), [layered(other, 90)]), "compute_ns", "forward")
    assert [value.value for value in both.values] == [200, 180]
    assert "belong to a layer" in both.samples
    one = row(compare(layered(base, 100), [other]), "compute_ns", "forward")
    assert "divided by its forwards" in one.samples


def test_only_whole_forwards_of_the_window_count() -> None:
    run = with_forwards(1, 2, np.full((2, 6), 8.0))
    cut = run.forwards.with_columns(pl.col("forward") != 2).rename({"forward": "whole_"})
    table = run.forwards.with_columns(cut["whole_"].alias("whole"))
    early = pl.col("start_utc_ns") - 10**9
    table = pl.concat([table, table.filter(pl.col("forward") == 0).with_columns(early, forward=pl.lit(9, pl.Int32))])
    comparison = compare(Result(run.document, {**run.tables, "forwards": table}), [run])
    assert row(comparison, "allreduce_count", "forward").values[0].forwards == 5


def test_a_cut_forward_is_no_divisor() -> None:
    run = with_forwards(1, 2, np.full((2, 6), 8.0))
    table = run.forwards.with_columns(pl.col("forward") < 5, whole=pl.col("forward") < 5).drop("forward")
    table = run.forwards.with_columns(table["whole"])
    cut = Result(run.document, {**run.tables, "forwards": table})
    comparison = compare(cut, [run])
    wall = row(comparison, "window_ns", "forward")
    assert wall.values[0].value is None
    assert "--window prefill" in (wall.values[0].reason or "")
    assert wall.values[1].value is not None
    # What is sampled inside forwards needs no divisor.
    assert row(comparison, "allreduce_total_ns", "forward").values[0].value == 32 * MS


def test_some_stages_do_not_speak_for_all() -> None:
    run = with_forwards(2, 1, np.full((2, 6), 8.0))
    tokens = pl.when(pl.col("stage") == 0).then("tokens").alias("tokens")
    half = Result(run.document, {**run.tables, "forwards": run.forwards.with_columns(tokens)})
    per_token = row(compare(half, [run]), "allreduce_total_ns", "1k_tokens")
    assert per_token.values[0].reason == "only some of the stages tell it"


def test_forwards_that_hold_little_of_the_window_are_doubted() -> None:
    run = with_forwards(1, 2, np.full((2, 10), 8.0))
    few = Result(run.document, {**run.tables, "forwards": run.forwards.filter(pl.col("forward") < 4)})
    note = row(compare(few, [run]), "allreduce_total_ns", "forward").note
    assert note == "whole forwards hold only 40% of the AllReduce calls of base"


def test_what_is_hardly_any_of_the_window_is_no_forward() -> None:
    run = with_forwards(1, 2, np.full((2, 10), 8.0))
    few = Result(run.document, {**run.tables, "forwards": run.forwards.filter(pl.col("forward") < 1)})
    values = row(compare(few, [run]), "allreduce_total_ns", "forward").values
    assert values[0].reason == "what was taken for forwards holds only 10% of the window's AllReduce calls"
    assert values[1].value == 32 * MS


def test_unstable_ranks_are_left_out_and_named() -> None:
    ranks = [rank(world, allreduce_count=10) for world in range(4)] + [
        rank(4, allreduce_count=99, stable=False, reason="recorded 12 % of the run")
    ]
    comparison = compare(made(ranks), [made(ranks[:4])])
    assert row(comparison, "allreduce_count").values[0].n == 4
    assert comparison.base.left_out == ["rank 4: recorded 12 % of the run"]
    assert any("not in medians: rank 4" in note for note in comparison.notes)


def test_a_run_without_stable_ranks_has_no_numbers() -> None:
    bad = made([rank(world, stable=False, reason="cut") for world in range(4)])
    comparison = compare(bad, [made([rank(world) for world in range(4)])])
    assert row(comparison, "window_ns").values[0].reason == "no rank is stable"
