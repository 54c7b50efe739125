"""A number stands for all stable ranks, or nearly all of every stage, which is said; else it is null."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import polars as pl
import pytest
from compare_results import MS, made, rank, row, with_forwards

from nsysk3.compare import Comparison, compare
from nsysk3.compare.samples import PER_FORWARD, WHOLE
from nsysk3.result import Result

CUT = "its window holds forwards that are not whole: analyze with --window prefill"


def cut(ranks: int, at: Collection[int], exposed: tuple[int, int] = (40, 40), pp: int = 1) -> Result:
    """Six forwards a rank, the last cut by the window on ranks ``at``; ms of exposed wait on even and on odd ranks."""
    run = with_forwards(pp, ranks // pp, np.full((ranks, 6), 8.0))
    whole = ~(pl.col("rank").is_in(list(at)) & (pl.col("forward") == 5))
    waits = pl.col("world_rank") % 2
    metrics = run.rank_metrics.with_columns(
        pl.when(waits == 0).then(exposed[0] * MS).otherwise(exposed[1] * MS).alias("exposed_wait_ns")
    )
    return Result(
        run.document, {**run.tables, "rank_metrics": metrics, "forwards": run.forwards.with_columns(whole=whole)}
    )


def of_few(comparison: Comparison, ranks: int) -> list[str]:
    """Rows that give a value of fewer ranks."""
    values = [(row.metric, value) for row in comparison.rows for value in row.values]
    return [name for name, value in values if value.value is not None and value.ranks < ranks]


def test_one_rank_of_two_does_not_speak_for_both() -> None:
    # Rank 0 alone has 27 % less; both together have more.
    comparison = compare(cut(2, [1], (40, 40)), [cut(2, [1], (29, 60))])
    per_forward = row(comparison, "exposed_wait_ns", "forward")
    assert [value.value for value in per_forward.values] == [None, None]
    assert per_forward.values[0].reason == f"1 of 2 ranks left out (rank 1): {CUT}"
    chosen = comparison.row("exposed_wait_ns")
    assert chosen is not None
    assert (chosen.scope, chosen.values[0].ranks) == ("window", 2)
    assert (chosen.deltas[0].change_share or 0) > 0
    assert not of_few(comparison, 2)


def test_wall_time_falls_back_to_whole_forwards_of_all_ranks() -> None:
    comparison = compare(cut(2, [1]), [cut(2, [])])
    wall = row(comparison, "window_ns", "forward")
    assert (wall.samples, [value.ranks for value in wall.values]) == (WHOLE, [2, 2])
    # Four calls of 8 ms and 10 ms more, and what lies between two forwards.
    assert wall.values[0].value == pytest.approx(42 * MS, rel=1e-4)
    assert "Wall time per 1,000 tokens" in comparison.verdict[0]


def test_wall_time_leaves_out_what_lies_around_a_cut_forward() -> None:
    run = cut(2, [])
    broken = run.forwards.with_columns(whole=~((pl.col("rank") == 1) & (pl.col("forward") == 3)))
    comparison = compare(Result(run.document, {**run.tables, "forwards": broken}), [run])
    wall = row(comparison, "window_ns", "forward")
    assert [value.value for value in wall.values] == [pytest.approx(42 * MS, rel=1e-4)] * 2


def test_of_many_ranks_a_few_may_lack_a_number_and_are_named() -> None:
    comparison = compare(cut(20, [7]), [cut(20, [])])
    waits = row(comparison, "exposed_wait_ns", "forward")
    assert (waits.samples, [value.ranks for value in waits.values]) == (PER_FORWARD, [19, 20])
    assert waits.note == f"base: 1 of 20 ranks left out (rank 7): {CUT}"
    # What all ranks tell goes before what nearly all tell.
    assert row(comparison, "window_ns", "forward").values[0].ranks == 20


def test_a_tenth_of_every_stage_is_the_limit() -> None:
    comparison = compare(cut(20, [7, 8], pp=2), [cut(20, [], pp=2)])
    assert row(comparison, "exposed_wait_ns", "forward").values[0].ranks == 0
    assert row(compare(cut(20, [7, 17], pp=2), [cut(20, [], pp=2)]), "exposed_wait_ns", "forward").values[0].ranks == 18


def test_a_number_of_the_window_that_one_rank_lacks() -> None:
    some = made([rank(0, allreduce_p95_ns=5.0), rank(1, allreduce_p95_ns=None)])
    value = row(compare(some, [some]), "allreduce_p95_ns").values[0]
    assert (value.value, value.reason) == (None, "1 of 2 ranks left out (rank 1): nothing tells it there")


def test_the_sentence_says_who_is_left_out() -> None:
    ranks = [rank(world, allreduce_count=9, allreduce_total_ns=9, allreduce_p50_ns=1.0) for world in range(20)]
    ranks[3] |= {"overlap_ratio": None}
    comparison = compare(made(ranks), [made(ranks)])
    assert "base: 1 of 20 ranks left out (rank 3): nothing tells it there" in comparison.verdict[0]
