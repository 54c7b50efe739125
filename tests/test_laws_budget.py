"""The time budget against docs/metrics.md, one nanosecond at a time."""

from __future__ import annotations

from collections import Counter

import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st
from time_sets import SPAN, arrays, moments, nanoseconds, raw_sets

from nsysk3.analysis.budget import BUCKETS, STATES, WAITS, Budget, time_budget
from nsysk3.analysis.intervals import union
from nsysk3.analysis.roles import ROLE
from nsysk3.classify import COMM_ROLES


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
    return pl.DataFrame(sorted(rows, key=lambda row: row[:2]), schema=schema, orient="row")


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
    spans = list(events.select("role", "start", "end").iter_rows())
    for name, roles in (("compute", ["compute"]), ("fused", ["fused"]), ("copy", ["copy"]), ("comm", COMM_ROLES)):
        members = {at for role, start, end in spans if role in roles for at in range(max(start, low), min(end, high))}
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
