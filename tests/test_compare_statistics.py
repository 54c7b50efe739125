"""Intervals of medians: what they cover, and that they depend on nothing but the numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsysk3.compare.statistics import Interval, Samples, interval, judged, median, replicates


def drawn(samples: Samples, run: int = 0, group: int = 0, count: int = 1000) -> np.ndarray:
    made = replicates(samples, rank_seed=(1, 0, group), forward_seed=(1, 1, run), count=count)
    assert made is not None
    return made


def samples(values: np.ndarray, per_forward: bool = True, stages: list[int] | None = None) -> Samples:
    return Samples.of(values, range(len(values)), stages or [0] * len(values), per_forward)


def test_median_leaves_out_what_is_missing() -> None:
    values = np.array([[1.0, np.nan, 3.0], [np.nan, np.nan, 7.0], [np.nan] * 3, [4.0, 1.0, 2.0]])
    np.testing.assert_array_equal(median(values), [2.0, 7.0, np.nan, 2.0])


@pytest.mark.parametrize(("forwards", "ranks"), [(16, 4), (40, 2)])
def test_intervals_over_forwards_hold_the_true_difference(forwards: int, ranks: int) -> None:
    rng = np.random.default_rng(7)
    held = 0
    for trial in range(200):
        # What slows a forward slows it on all ranks: cells are not independent.
        base, other = (
            100 + 5 * run + rng.normal(0, 3, forwards) + rng.normal(0, 1, (ranks, forwards)) for run in (0, 1)
        )
        span = interval(drawn(samples(other), 2 * trial + 1, 1, 400) - drawn(samples(base), 2 * trial, 0, 400))
        assert span is not None
        held += span.low <= 5 <= span.high
    assert 0.90 <= held / 200 <= 0.99


def test_intervals_over_ranks_hold_the_true_difference() -> None:
    rng = np.random.default_rng(8)
    held = 0
    for trial in range(200):
        base, other = (rng.normal(50 - 2 * run, 4, (32, 1)) for run in (0, 1))
        one, two = samples(base, False), samples(other, False)
        span = interval(drawn(two, 1, 2 * trial + 1, 400) - drawn(one, 0, 2 * trial, 400))
        assert span is not None
        held += span.low <= -2 <= span.high
    assert 0.90 <= held / 200 <= 0.99


@given(st.permutations(range(6)), st.integers(3, 12))
def test_the_order_of_ranks_changes_nothing(order: list[int], forwards: int) -> None:
    values = np.random.default_rng(forwards).normal(size=(6, forwards))
    stages = [0, 0, 1, 1, 2, 2]
    straight = Samples.of(values, range(6), stages)
    mixed = Samples.of(values[order], order, [stages[i] for i in order])
    np.testing.assert_array_equal(drawn(straight), drawn(mixed))


def test_the_same_seed_gives_the_same_replicates_and_another_others() -> None:
    one = samples(np.random.default_rng(0).normal(size=(4, 10)))
    np.testing.assert_array_equal(drawn(one), drawn(one))
    assert not np.array_equal(drawn(one), drawn(one, run=1))


def test_runs_of_one_group_draw_the_same_ranks() -> None:
    # What ranks differ by is the same before and after, so pairing takes it out of the difference.
    own = np.linspace(0, 100, 16)[:, None]
    before, after = samples(own, False), samples(own + 1, False)
    paired = interval(drawn(after, 1, 0) - drawn(before, 0, 0))
    apart = interval(drawn(after, 1, 1) - drawn(before, 0, 0))
    assert paired is not None
    assert apart is not None
    assert (paired.low, paired.high) == pytest.approx((1, 1))
    assert apart.low < 0 < apart.high


def test_what_tells_stages_apart_is_no_noise() -> None:
    values = np.array([[10.0], [20.0], [30.0], [40.0]]) + np.zeros((4, 5))
    span = interval(drawn(samples(values, stages=[0, 1, 2, 3])))
    assert span == Interval(25.0, 25.0)


@pytest.mark.parametrize(("shape", "per_forward"), [((2, 1), False), ((2, 2), True), ((1, 1), False)])
def test_fewer_than_three_samples_give_no_interval(shape: tuple[int, int], per_forward: bool) -> None:
    assert replicates(samples(np.ones(shape), per_forward), rank_seed=(1,), forward_seed=(2,)) is None


def test_two_ranks_with_three_forwards_are_enough() -> None:
    assert drawn(samples(np.ones((2, 3)))).tolist() == [1.0] * 1000


def test_large_runs_are_drawn_in_pieces() -> None:
    values = np.random.default_rng(3).normal(size=(32, 400))
    assert len(drawn(samples(values))) == 1000


def test_replicates_without_a_value_give_no_interval() -> None:
    assert interval(np.array([np.nan] * 10 + [1.0] * 90)) is None
    assert interval(np.array([np.nan] * 2 + [1.0] * 98)) == Interval(1.0, 1.0)


@pytest.mark.parametrize(
    ("span", "verdict"),
    [
        (Interval(-3, -1), "lower"),
        (Interval(1, 3), "higher"),
        (Interval(-1, 1), "no difference shown"),
        (Interval(0, 0), "no difference shown"),
        (None, "not enough samples"),
    ],
)
def test_verdicts(span: Interval | None, verdict: str) -> None:
    assert judged(span) == verdict
