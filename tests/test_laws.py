"""What must hold of any trace: the arithmetic against brute force, and what may not change a number."""

from __future__ import annotations

import copy
import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from conftest import FIXTURES
from exports import ALLREDUCE, GEMM, SENDRECV, Export, two_ranks
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import nsysk3
from nsysk3.analysis.budget import BUCKETS, STATES, WAITS, Budget, time_budget
from nsysk3.analysis.intervals import Intervals, clip, covered, segments, union
from nsysk3.analysis.nesting import innermost, parents
from nsysk3.analysis.roles import ROLE
from nsysk3.analysis.rows import by_rank, laid_over, runs, split
from nsysk3.analysis.windows import capture_windows, explicit_windows, parse_window
from nsysk3.classify import COMM_ROLES
from nsysk3.errors import InputError
from nsysk3.result import Result
from nsysk3.result.model import RankMetrics
from nsysk3.trace.order import row_order

# --- sets of time against one bit a nanosecond

SPAN = 60
moments = st.integers(0, SPAN)
raw_sets = st.lists(st.tuples(moments, st.integers(-3, 20)), max_size=12)


def arrays(pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """(start, length) to starts and ends; a negative length is an end before its start."""
    start = np.array([start for start, _ in pairs], np.int64)
    return start, start + np.array([length for _, length in pairs], np.int64)


def nanoseconds(start: Any, end: Any) -> set[int]:
    return {at for low, high in zip(start, end, strict=True) for at in range(int(low), int(high))}


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


# --- the time budget


@st.composite
def gpu_events(draw: st.DrawFn) -> pl.DataFrame:
    """Events of one rank with every role, and communication that waited in every way."""
    roles = st.sampled_from([*COMM_ROLES, *["compute"] * 4, "fused", "copy", "graph"])
    rows = []
    for start, length, role in draw(st.lists(st.tuples(moments, st.integers(0, 20), roles), max_size=14)):
        wait, state = None, None
        if role in COMM_ROLES:
            wait = draw(st.none() | st.integers(0, length))
            state = draw(st.sampled_from([None, *STATES]))
        api_end = draw(st.none() | st.integers(0, SPAN + 10))
        rows.append((start, start + length, role, wait, state, api_end))
    schema = {
        "start": pl.Int64, "end": pl.Int64, "role": ROLE, "wait_ns": pl.Int64, "wait_state": pl.String,
        "api_end": pl.Int64,
    }  # fmt: skip
    return pl.DataFrame(rows, schema=schema, orient="row").sort("start", "end", maintain_order=True)


def plain_budget(events: pl.DataFrame, low: int, high: int, stage: set[int]) -> Counter[str]:
    """Each nanosecond in its bucket, by docs/metrics.md section 4 word by word."""
    rows = [
        (start, end, role, end - start if wait is None else wait, state or "unresolved", api_end)
        for start, end, role, wait, state, api_end in events.iter_rows()
    ]
    buckets = []
    for at in range(low, high):
        running = [row for row in rows if row[0] <= at < row[1]]
        roles = {role for _, _, role, *_ in running}
        comm = [
            ("transfer" if state == "transfer" or at >= start + wait else state, role)
            for start, _, role, wait, state, _ in running
            if role in COMM_ROLES
        ]
        if comm and "compute" in roles:
            buckets.append("overlap")
        elif "compute" in roles or "fused" in roles:
            buckets.append("compute" if "compute" in roles else "fused")
        elif comm:
            state, role = min(comm, key=lambda each: (STATES.index(each[0]), COMM_ROLES.index(each[1])))
            buckets.append(f"exposed_{role if state == 'transfer' else state}")
        elif roles:
            buckets.append("graph" if "graph" in roles else "copy")
        else:
            buckets.append("idle_stage_idle" if at in stage else "idle_other")
    # An idle stretch ends with the next work; until the call that launched it had returned, the host was late.
    returned = None
    for at in reversed(range(low, high)):
        if buckets[at - low] != "idle_other":
            returned = None
            continue
        if returned is None:
            launched = next((row[5] for row in rows if row[0] > at), None)
            returned = low if launched is None else launched
        if at < returned:
            buckets[at - low] = "idle_launch_gap"
    return Counter(buckets)


@settings(max_examples=400)
@given(gpu_events(), st.integers(-5, 50), st.integers(0, 60), raw_sets, st.booleans())
def test_every_nanosecond_of_the_window_is_in_one_bucket(
    events: pl.DataFrame, low: int, length: int, gaps: list[tuple[int, int]], staged: bool
) -> None:
    high = low + length
    stage = union(*arrays(gaps)) if staged else None
    budget = time_budget(events, low, high, stage_gaps=stage)
    expected = plain_budget(events, low, high, nanoseconds(*stage) if stage else set())
    assert budget.buckets == {bucket: expected[bucket] for bucket in BUCKETS}
    assert sum(budget.buckets.values()) == budget.window_ns == length
    hold_together(budget)
    # the unions are those of the events, whatever the waits
    for name, roles in (("compute", ["compute"]), ("fused", ["fused"]), ("copy", ["copy"]), ("comm", COMM_ROLES)):
        chosen = events.filter(pl.col("role").is_in(roles))
        members = nanoseconds(chosen["start"], chosen["end"]) & set(range(low, high))
        assert getattr(budget, f"{name}_ns") == len(members), name


def hold_together(budget: Budget) -> None:
    b = budget
    assert all(ns >= 0 for ns in b.buckets.values())
    assert b.idle_ns == sum(ns for name, ns in b.buckets.items() if name.startswith("idle_"))
    assert b.exposed_comm_ns == sum(ns for name, ns in b.buckets.items() if name.startswith("exposed_"))
    assert b.exposed_comm_ns == b.exposed_wait_ns + b.exposed_transfer_ns + b.exposed_unresolved_ns
    assert b.exposed_wait_ns == sum(b.buckets[f"exposed_{state}"] for state in WAITS)
    assert b.overlap_wait_ns + b.overlap_transfer_ns <= b.overlap_ns <= min(b.compute_ns, b.comm_ns)
    assert b.exposed_comm_ns + b.overlap_ns <= b.comm_ns


@given(gpu_events(), st.integers(0, 50), st.integers(1, 60))
def test_without_waits_known_all_exposed_communication_is_unresolved(
    events: pl.DataFrame, low: int, length: int
) -> None:
    budget = time_budget(events.drop("wait_ns", "wait_state"), low, low + length)
    assert budget.exposed_unresolved_ns == budget.exposed_comm_ns
    assert (budget.exposed_wait_ns, budget.exposed_transfer_ns) == (0, 0)


@given(gpu_events(), st.integers(0, 40), st.integers(0, 30), st.integers(0, 30))
def test_two_halves_of_a_window_add_up(events: pl.DataFrame, low: int, first: int, second: int) -> None:
    whole = time_budget(events, low, low + first + second)
    left, right = time_budget(events, low, low + first), time_budget(events, low + first, low + first + second)
    for bucket in BUCKETS:
        assert whole.buckets[bucket] == left.buckets[bucket] + right.buckets[bucket]


# --- whole traces

# Each example is a file written and analysed: no minutes of making a failing one smaller.
TRACES = settings(phases=[Phase.explicit, Phase.reuse, Phase.generate])
NAMES = [
    GEMM,
    ALLREDUCE,
    SENDRECV,
    "ncclDevKernel_Generic",
    "void sglang::attn_res_fused_pull_rs_kernel<8>(sglang::Params)",
    "void my_team::mystery_kernel<8>(int)",
]
PROCESSES = ((11, 0), (12, 1))
# Numbers of one rank that say nothing of its clock or of other ranks.
SECTION_4 = [
    "pid",
    "device_id",
    "gpu_uuid",
    "window_ns",
    "compute_ns",
    "comm_ns",
    "fused_ns",
    "copy_ns",
    "overlap_ns",
    "overlap_ratio",
    "exposed_comm_ns",
    "exposed_comm_share",
    "idle_ns",
    "allreduce_count",
    "allreduce_total_ns",
    "allreduce_p50_ns",
    "allreduce_p95_ns",
    "allreduce_p99_ns",
    "p2p_count",
    "p2p_total_ns",
    "unclassified_share",
    "graph_ns",
    "kernel_count",
    "kernel_total_ns",
]


@st.composite
def traces(draw: st.DrawFn) -> Export:
    """A small export of two processes with everything in it, and a kernel at both ends of each."""
    export = Export()
    for (pid, device), uuid in zip(PROCESSES, ("uuid-0", "uuid-1"), strict=True):
        export.gpu(device, cuda=device, uuid=uuid).cuda_device(pid, device, device)
        export.kernel(GEMM, 0, 1, pid=pid, device=device).kernel(GEMM, 260, 261, pid=pid, device=device)
    place = st.sampled_from(PROCESSES)
    when = st.integers(1, 190)
    for (pid, device), name, start, length, stream, launched in draw(
        st.lists(
            st.tuples(
                place, st.sampled_from(NAMES), when, st.integers(1, 60), st.sampled_from((7, 20, 21)), st.booleans()
            ),
            max_size=10,
        )
    ):
        launch = (start - 0.7, start - 0.2) if launched else None
        export.kernel(name, start, start + length, pid=pid, device=device, stream=stream, launch=launch)
    for (pid, device), start, length in draw(st.lists(st.tuples(place, when, st.integers(1, 40)), max_size=3)):
        export.memcpy(start, start + length, pid=pid, device=device, stream=9)
    for (pid, _), op, start in draw(
        st.lists(st.tuples(place, st.sampled_from(("ncclAllGather", "ncclSend", "ncclRecv")), when), max_size=4)
    ):
        export.nccl(op, start - 0.9, start - 0.1, pid=pid, comm=5, size=64, peer=1)
    return export


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def analyzed(export: Export, **options: Any) -> Result:
    with folder() as place:
        return nsysk3.analyze(export.write(place / "r.sqlite"), **options)


@settings(TRACES, max_examples=10)
@given(traces())
def test_numbers_of_a_trace_hold_together(export: Export) -> None:
    result = analyzed(export)
    spent = dict(result.budget.group_by("rank").agg(pl.col("ns").sum()).iter_rows())
    kernels = result.kernels.group_by("rank").agg(pl.col("count").sum(), pl.col("total_ns").sum())
    counted = {rank: rest for rank, *rest in kernels.iter_rows()}
    by_role = {(rank, role): count for rank, role, count in result.roles.select("rank", "role", "count").iter_rows()}
    for index, rank in enumerate(result.document.ranks):
        assert spent[index] == rank.window_ns == 261_000
        for name in ("overlap_ratio", "exposed_comm_share", "unclassified_share", "coverage"):
            value = getattr(rank, name)
            assert value is None or 0 <= value <= 1
        assert rank.overlap_ns <= min(rank.compute_ns, rank.comm_ns)
        assert rank.exposed_comm_ns + rank.overlap_ns <= rank.comm_ns
        assert [rank.kernel_count, rank.kernel_total_ns] == counted[index]
        assert rank.allreduce_count == by_role.get((index, "allreduce"), 0)
        assert rank.p2p_count == by_role.get((index, "p2p"), 0)
    shares = result.budget.group_by("rank").agg(pl.col("share").sum())
    assert shares["share"].to_list() == pytest.approx([1, 1])


def same_tables(one: Result, other: Result, *, but: tuple[str, ...] = ()) -> None:
    assert set(one.tables) == set(other.tables)
    for name, table in one.tables.items():
        left = table.select(c for c in table.columns if c not in but)
        right = other.tables[name].select(c for c in table.columns if c not in but)
        assert left.equals(right), name


@settings(TRACES, max_examples=12)
@given(traces(), st.randoms(use_true_random=False))
def test_the_order_of_rows_in_the_file_changes_nothing(export: Export, shuffle: random.Random) -> None:
    before = analyzed(export)
    for rows in export.rows.values():
        shuffle.shuffle(rows)
    after = analyzed(export)
    same_tables(before, after)
    left, right = (result.document.model_dump(exclude={"reports": {"__all__": {"path"}}}) for result in (before, after))
    assert left == right


def moved(export: Export, nanoseconds: int) -> Export:
    other = copy.deepcopy(export)
    for table, rows in other.rows.items():
        for row in rows:
            for column in ("start", "end"):
                if table != "StringIds" and row.get(column) is not None:
                    row[column] += nanoseconds
    return other


@settings(TRACES, max_examples=10)
@given(traces(), st.integers(-900_000_000, 10**15))
def test_when_it_all_happened_changes_nothing_but_the_date(export: Export, by: int) -> None:
    before, after = analyzed(export), analyzed(moved(export, by))
    dates = tuple({name for table in before.tables.values() for name in table.columns if name.endswith("_utc_ns")})
    # What is at a moment carries the word utc in its name; everything else is a length, a count or a share.
    same_tables(before, after, but=(*dates, "coverage"))
    started = [result.rank_metrics["window_start_utc_ns"] for result in (before, after)]
    assert (started[1] - started[0]).to_list() == [by, by]


def per_process(export: Export, pid: int) -> Export:
    """What the report would be if only that process had been traced."""
    other = copy.deepcopy(export)
    for table, rows in other.rows.items():
        kept = []
        for row in rows:
            owner = row.get("globalPid") or row.get("globalTid")
            mine = row.get("pid") if table == "TARGET_INFO_CUDA_DEVICE" else owner and (owner >> 24) & 0xFFFFFF
            if not mine or mine == pid:
                kept.append(row)
        other.rows[table] = kept
    return other


@settings(TRACES, max_examples=10)
@given(traces())
def test_one_report_or_one_for_each_process_gives_the_same_ranks(export: Export) -> None:
    together = analyzed(export).rank_metrics.select(SECTION_4)
    with folder() as place:
        for pid, _ in PROCESSES:
            per_process(export, pid).write(place / f"process{pid}.sqlite")
        apart = nsysk3.analyze(place).rank_metrics.select(SECTION_4)
    assert together.equals(apart)


@pytest.mark.parametrize("trace", ["h200/tp2", "sglang-h200/pp2-lw"])
def test_a_real_report_cut_by_process_gives_the_same_ranks(trace: str, tmp_path: Path) -> None:
    import shutil
    import sqlite3

    source = FIXTURES / f"{trace}.sqlite"
    whole = nsysk3.analyze(source)
    pids = whole.rank_metrics["pid"].to_list()
    for index, pid in enumerate(pids):
        part = Path(shutil.copy(source, tmp_path / f"part{index}.sqlite"))
        connection = sqlite3.connect(part)
        for table, column in (("CUPTI_ACTIVITY_KIND_KERNEL", "globalPid"), ("CUPTI_ACTIVITY_KIND_MEMCPY", "globalPid"),
                              ("CUPTI_ACTIVITY_KIND_MEMSET", "globalPid"), ("CUPTI_ACTIVITY_KIND_RUNTIME", "globalTid"),
                              ("NVTX_EVENTS", "globalTid")):  # fmt: skip
            if connection.execute("SELECT 1 FROM sqlite_master WHERE name = ?", [table]).fetchone():
                connection.execute(f"DELETE FROM {table} WHERE ({column} >> 24) & 16777215 <> {pid}")
        connection.commit()
        connection.close()
    apart = nsysk3.analyze(tmp_path)
    assert apart.rank_metrics.select(SECTION_4).equals(whole.rank_metrics.select(SECTION_4))


@settings(TRACES, max_examples=10)
@given(traces(), st.integers(1, 260_999))
def test_two_windows_that_meet_add_up_to_the_capture(export: Export, cut: int) -> None:
    with folder() as place:
        run = nsysk3.load(export.write(place / "r.sqlite"))
        whole = nsysk3.analyze(run).rank_metrics
        halves = [nsysk3.analyze(run, window=w).rank_metrics for w in (f"0ns:{cut}ns", f"{cut}ns:261000ns")]
    sums = [name for name in SECTION_4 if name.endswith(("_ns", "_count")) and name[-6:-3] not in ("p50", "p95", "p99")]
    for name in sums:
        assert (halves[0][name] + halves[1][name]).to_list() == whole[name].to_list(), name


@settings(TRACES, max_examples=10)
@given(traces())
def test_a_result_saved_and_loaded_is_the_same(export: Export) -> None:
    result = analyzed(export)
    with folder() as place:
        assert result.save(place / "deep" / "out") == place / "deep" / "out"
        again = Result.load(place / "deep" / "out")
        files = {file.name for file in (place / "deep" / "out").iterdir()}
    same_tables(result, again)
    assert again.document == result.document
    assert again.to_json() == result.to_json()
    assert not [name for name in files if name.startswith(".")]


@pytest.mark.parametrize("trace", ["h200/tp2", "h200/pp2", "h200/graphwhole", "sglang-h200/pp2-lw"])
def test_a_real_result_saved_and_loaded_is_the_same(trace: str, tmp_path: Path) -> None:
    result = nsysk3.analyze(FIXTURES / f"{trace}.sqlite")
    again = Result.load(result.save(tmp_path))
    same_tables(result, again)
    assert again.document == result.document


# --- windows


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("0:1", 0, 10**9),
        ("0.5s:2s", 5 * 10**8, 2 * 10**9),
        ("100ms:1.5s", 10**8, 15 * 10**8),
        (" 1us : 7 ns ", None, None),
        ("7ns:1us", 7, 1000),
        ("-1ms:0.25", -(10**6), 25 * 10**7),
        ("-3:-1", -3 * 10**9, -(10**9)),
    ],
)
def test_windows_are_read_with_their_units(text: str, low: int | None, high: int | None) -> None:
    if low is None:
        with pytest.raises(InputError, match="end must come after"):
            parse_window(text)
        return
    spec = parse_window(text)
    assert (spec.start_ns, spec.end_ns) == (low, high)


@pytest.mark.parametrize(
    "text", ["", ":", "1:", ":2", "1", "a:b", "1:1", "2:1", ".:1", "1.2.3:4", "1h:2h", "nan:1", "1e3:1e4", "Capture",
             "99999999999999999999s:999999999999999999999s"]
)  # fmt: skip
def test_other_windows_are_one_line(text: str) -> None:
    with pytest.raises(InputError) as error:
        nsysk3.analyze(FIXTURES / "h200" / "graph.sqlite", window=text)
    assert f"--window {text!r}" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["0:99999999999", "-99999999999999999999:99999999999999999999"])
def test_a_window_far_beyond_the_trace_is_all_of_it(text: str) -> None:
    trace = FIXTURES / "h200" / "graph.sqlite"
    assert nsysk3.analyze(trace, window=text).rank_metrics.equals(nsysk3.analyze(trace).rank_metrics)


@given(
    st.lists(st.tuples(st.integers(10**6, 10**6 + 100), st.integers(1, 50)), min_size=1, max_size=5),
    st.integers(-50, 200),
    st.integers(1, 200),
)
def test_a_window_is_never_longer_than_asked_nor_than_the_capture(
    captures: list[tuple[int, int]], low: int, length: int
) -> None:
    events = pl.DataFrame(
        {
            "rank": range(len(captures)),
            "start": [start for start, _ in captures],
            "end": [start + size for start, size in captures],
            "kind": "kernel",
        }
    )
    origin = min(start for start, _ in captures)
    asked = parse_window(f"{low}ns:{low + length}ns")
    found = explicit_windows(capture_windows(events), asked)
    for (start, size), (_, begin, end) in zip(captures, found.iter_rows(), strict=True):
        expected = set(range(start, start + size)) & set(range(origin + low, origin + low + length))
        assert nanoseconds([begin], [end]) == expected
        assert begin <= end


def test_metrics_of_the_model_are_the_columns_of_the_table() -> None:
    result = analyzed(two_ranks())
    assert result.rank_metrics.columns == list(RankMetrics.model_fields)
    assert [rank.model_dump() for rank in result.document.ranks] == result.rank_metrics.to_dicts()


def test_an_empty_set_is_a_set() -> None:
    nothing = union(np.empty(0, np.int64), np.empty(0, np.int64))
    assert (nothing.length, covered(nothing, np.array([1, 2])).tolist()) == (0, [0, 0])
    assert segments([nothing], 5, 5).where(np.empty(0, bool)) == 0
    assert isinstance(nothing, Intervals)
