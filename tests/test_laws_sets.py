"""Sets of time, nesting and the order of rows, against brute force."""

from __future__ import annotations

from collections import Counter

import numpy as np
import polars as pl
from hypothesis import given
from hypothesis import strategies as st
from time_sets import arrays, moments, nanoseconds, raw_sets

from nsysk3.analysis.intervals import Intervals, clip, covered, segments, union
from nsysk3.analysis.nesting import innermost, parents
from nsysk3.analysis.rows import by_rank, laid_over, runs, split
from nsysk3.trace.order import row_order


@given(raw_sets)
def test_union_is_the_set_of_nanoseconds(pairs: list[tuple[int, int]]) -> None:
    start, end = arrays(pairs)
    found = union(start, end)
    assert nanoseconds(*found) == nanoseconds(start, end)
    assert found.length == len(nanoseconds(start, end))
    # sorted, disjoint, not even touching, none empty
    assert (found.end > found.start).all()
    assert (found.start[1:] > found.end[:-1]).all()


@given(raw_sets, moments, moments)
def test_clip_and_covered_cut_the_same_set(pairs: list[tuple[int, int]], low: int, high: int) -> None:
    whole = union(*arrays(pairs))
    inside = nanoseconds(*whole) & set(range(low, high))
    if low < high:
        assert nanoseconds(*clip(whole, low, high)) == inside
        before = covered(whole, np.array([low, high]))
        assert before[1] - before[0] == len(inside)


@given(st.lists(raw_sets, max_size=5), moments, st.integers(0, 40))
def test_segments_tile_the_window_and_know_every_set(many: list[list[tuple[int, int]]], low: int, length: int) -> None:
    high = low + length
    sets = [union(*arrays(pairs)) for pairs in many]
    cut = segments(sets, low, high)
    tiled = [at for first, last in zip(cut.start, cut.end, strict=True) for at in range(first, last)]
    assert tiled == list(range(low, high))
    members = [nanoseconds(*each) for each in sets]
    for first, last, mask in zip(cut.start, cut.end, cut.mask, strict=True):
        for at in range(first, last):
            assert mask == sum(1 << bit for bit, each in enumerate(members) if at in each)


# --- nesting


@st.composite
def nested_ranges(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Ranges as pushes and pops on one thread give them; a tick may pass between two of them, or none."""
    steps = draw(st.lists(st.tuples(st.booleans(), st.integers(0, 2)), max_size=40))
    clock, open_ones, found = 0, [], []
    for push, ticks in steps:
        clock += ticks
        if push:
            open_ones.append(clock)
        elif open_ones:
            found.append((open_ones.pop(), clock))
    found += [(start, clock) for start in open_ones]
    return sorted(found, key=lambda pair: (pair[0], -pair[1]))


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([None, 1, 2])), max_size=12), st.booleans())
def test_runs_and_parts_hold_every_row_once(rows: list[tuple[int, int | None]], ordered: bool) -> None:
    frame = pl.DataFrame(
        sorted(rows, key=str) if ordered else rows, schema={"rank": pl.Int32, "b": pl.Int64}, orient="row"
    )
    frame = frame.with_row_index("row")
    heads, run = runs(frame.select("rank", "b"))
    assert heads[run].equals(frame.select("rank", "b"))
    assert (run.diff().drop_nulls() <= 1).all()
    parts = split(frame, "rank", "b")
    assert sorted(row for part in parts.values() for row in part["row"]) == list(range(frame.height))
    for (rank, b), part in parts.items():
        assert part["row"].is_sorted()
        assert {(rank, b)} == set(part.select("rank", "b").iter_rows())
    assert {rank: part.height for rank, part in by_rank(frame).items()} == Counter(rank for rank, _ in rows)
    values = frame.filter(pl.col("rank") > 1)
    laid = laid_over(values.select("rank"), values["row"], frame.height)["rank"].to_list()
    assert laid == [rank if rank > 1 else None for rank in frame["rank"]]


@given(st.lists(st.tuples(*[st.sampled_from([None, -2, 0, 3])] * 3), max_size=12))
def test_rows_come_in_the_order_of_their_keys(rows: list[tuple[int | None, ...]]) -> None:
    frame = pl.DataFrame(rows, schema=dict.fromkeys("abc", pl.Int64), orient="row")
    expected = sorted(range(len(rows)), key=lambda row: [-(2**63) if key is None else key for key in rows[row]])
    for ties in range(3):
        assert row_order(frame, ties).tolist() == expected


@given(nested_ranges())
def test_parents_are_the_smallest_range_around(ranges: list[tuple[int, int]]) -> None:
    start, end = (np.array([pair[side] for pair in ranges], np.int64) for side in (0, 1))
    expected = [
        max((j for j in range(i) if end[j] > start[i] and end[j] >= end[i]), default=-1) for i in range(len(ranges))
    ]
    assert parents(start, end).tolist() == expected


@given(nested_ranges(), st.lists(st.integers(-1, 82), max_size=20))
def test_innermost_is_the_last_range_that_holds_the_point(ranges: list[tuple[int, int]], points: list[int]) -> None:
    start, end = (np.array([pair[side] for pair in ranges], np.int64) for side in (0, 1))
    expected = [max((i for i, (low, high) in enumerate(ranges) if low <= at <= high), default=-1) for at in points]
    assert innermost(start, end, np.array(points, np.int64)).tolist() == expected


def test_a_hundred_thousand_ranges_and_deep_nesting_stay_exact() -> None:
    # 1000 towers of 100 ranges each, one inside the other, and a point in the middle of each tower
    towers, depth = 1000, 100
    base = np.repeat(np.arange(towers) * 1000, depth)
    level = np.tile(np.arange(depth), towers)
    start, end = base + level, base + 999 - level
    points = np.arange(towers) * 1000 + 500
    assert (innermost(start, end, points) == np.arange(towers) * depth + depth - 1).all()
    between = np.arange(towers) * 1000 + 999
    assert (innermost(start, end, between) == np.arange(towers) * depth).all()


def test_an_empty_set_is_a_set() -> None:
    nothing = union(np.empty(0, np.int64), np.empty(0, np.int64))
    assert (nothing.length, covered(nothing, np.array([1, 2])).tolist()) == (0, [0, 0])
    assert segments([nothing], 5, 5).where(np.empty(0, bool)) == 0
    assert isinstance(nothing, Intervals)
