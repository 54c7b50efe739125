"""Where each nanosecond of one rank's window went: buckets that sum to the window exactly."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from nsysk3.analysis.intervals import Intervals, Segments, segments, union
from nsysk3.classify import COMM_ROLES

Ints = NDArray[np.int64]

# What a stretch of a communication kernel was: see METRICS section 6.
WAITS = ("wait_collective", "wait_upstream", "wait_downstream")
STATES = ("transfer", "unresolved", *WAITS)
WAIT_STATES = pl.Enum(STATES)
IDLE_KINDS = ("stage_idle", "launch_gap", "other")
EXPOSED_BUCKETS = (*(f"exposed_{role}" for role in COMM_ROLES), *(f"exposed_{state}" for state in STATES[1:]))
BUCKETS = ("overlap", "compute", "fused", *EXPOSED_BUCKETS, "graph", "copy", *(f"idle_{kind}" for kind in IDLE_KINDS))


@dataclass(frozen=True)
class Budget:
    """One rank's window.

    ``buckets``: ns by bucket, all of them, summing to ``window_ns``.  The unions of docs/metrics.md section 4 come from
    the same segments, so no two numbers can disagree about the window.
    """

    window_ns: int
    buckets: dict[str, int]
    compute_ns: int
    comm_ns: int
    fused_ns: int
    copy_ns: int
    graph_ns: int
    overlap_ns: int
    overlap_wait_ns: int
    overlap_transfer_ns: int
    exposed_comm_ns: int
    exposed_wait_ns: int
    exposed_transfer_ns: int
    exposed_unresolved_ns: int
    idle_ns: int
    stage_idle_ns: int


def time_budget(events: pl.DataFrame, low: int, high: int, *, stage_gaps: Intervals | None = None) -> Budget:
    """The budget of one rank over [low, high) (UTC ns).

    ``events``: the rank's events with ``start``, ``end``, ``role`` and ``api_end`` (null where the launch is unknown).
    A communication event with ``wait_ns`` and ``wait_state`` (one of STATES) is so long in that state first and a
    transfer after; without those columns all of it is ``unresolved``.  ``stage_gaps``: idle time spent waiting for
    another stage.
    """
    sets, states = _sets(events, low, high)
    cut = segments(list(sets.values()), low, high)
    idle = Intervals(*_merge(cut, cut.mask == 0))
    cut = cut.by_mask()
    bit = {name: 1 << position for position, name in enumerate(sets)}

    def has(name: str) -> NDArray[np.bool_]:
        chosen: NDArray[np.bool_] = (cut.mask & bit.get(name, 0)) != 0
        return chosen

    comm_bits = sum(value for name, value in bit.items() if name in states)
    comm = (cut.mask & comm_bits) != 0
    compute, fused = has("compute"), has("fused")
    exposed = comm & ~compute & ~fused
    in_state = {state: np.zeros(len(cut.mask), bool) for state in ("transfer", "unresolved", "wait")}
    for name, state in states.items():
        in_state["wait" if state in WAITS else state] |= has(name)
    # Where several communications run at once, moving data outranks not knowing, and that outranks waiting.
    transfer = in_state["transfer"]
    unresolved = in_state["unresolved"] & ~transfer
    waiting = in_state["wait"] & ~transfer & ~unresolved
    buckets = dict.fromkeys(BUCKETS, 0)
    buckets["overlap"] = cut.where(comm & compute)
    buckets["compute"] = cut.where(compute & ~comm)
    buckets["fused"] = cut.where(fused & ~compute)
    left = exposed.copy()
    for name in _precedence(states):
        state, role = states[name], name.rpartition(":")[0]
        bucket = f"exposed_{role}" if state == "transfer" else f"exposed_{state}"
        taken = left & has(name)
        buckets[bucket] += cut.where(taken)
        left &= ~taken
    busy = compute | fused | comm
    buckets["graph"] = cut.where(has("graph") & ~busy)
    busy |= has("graph")
    buckets["copy"] = cut.where(has("copy") & ~busy)
    buckets |= {f"idle_{kind}": ns for kind, ns in _idle_kinds(events, idle, stage_gaps).items()}
    return Budget(
        window_ns=high - low,
        buckets=buckets,
        compute_ns=cut.where(compute),
        comm_ns=cut.where(comm),
        fused_ns=cut.where(fused),
        copy_ns=cut.where(has("copy")),
        graph_ns=cut.where(has("graph")),
        overlap_ns=buckets["overlap"],
        overlap_wait_ns=cut.where(comm & compute & waiting),
        overlap_transfer_ns=cut.where(comm & compute & transfer),
        exposed_comm_ns=cut.where(exposed),
        exposed_wait_ns=cut.where(exposed & waiting),
        exposed_transfer_ns=cut.where(exposed & transfer),
        exposed_unresolved_ns=cut.where(exposed & unresolved),
        idle_ns=idle.length,
        stage_idle_ns=buckets["idle_stage_idle"],
    )


def _sets(events: pl.DataFrame, low: int, high: int) -> tuple[dict[str, Intervals], dict[str, str]]:
    """Union of every class, and for the communication classes (``role:state``) their state."""
    inside = events.filter((pl.col("end") > low) & (pl.col("start") < high))
    split = "wait_ns" in events.columns
    sets: dict[str, Intervals] = {}
    states: dict[str, str] = {}
    for (role,), rows in inside.group_by("role"):
        start, end = rows["start"].to_numpy(), rows["end"].to_numpy()
        if role not in COMM_ROLES:
            sets[str(role)] = union(start, end)
            continue
        state = (
            rows["wait_state"].fill_null("unresolved") if split else pl.repeat("unresolved", rows.height, eager=True)
        )
        wait = rows["wait_ns"].fill_null(end - start).to_numpy() if split else end - start
        wait = np.where((state == "transfer").to_numpy(), 0, wait)
        for kind in ("transfer", *state.unique().to_list()):
            mine = np.full(len(start), True) if kind == "transfer" else (state == kind).to_numpy()
            first, last = ((start + wait), end) if kind == "transfer" else (start, start + wait)
            whole = union(first[mine], last[mine])
            if len(whole.start):
                sets[f"{role}:{kind}"] = whole
                states[f"{role}:{kind}"] = kind
    return sets, states


def _precedence(states: dict[str, str]) -> list[str]:
    """Transfer before wait; among roles, the order of COMM_ROLES."""

    def rank(name: str) -> tuple[int, int]:
        return STATES.index(states[name]), COMM_ROLES.index(name.rpartition(":")[0])

    return sorted(states, key=rank)


def _merge(cut: Segments, chosen: NDArray[np.bool_]) -> Intervals:
    return union(cut.start[chosen], cut.end[chosen])


def _idle_kinds(events: pl.DataFrame, idle: Intervals, stage_gaps: Intervals | None) -> dict[str, int]:
    """Split idle time: waiting for a stage, waiting for the host to launch the next work, and the rest."""
    kinds = dict.fromkeys(IDLE_KINDS, 0)
    if stage_gaps is not None and len(stage_gaps.start) and len(idle.start):
        cut = segments([idle, stage_gaps], int(idle.start[0]), int(idle.end[-1]))
        kinds["stage_idle"] = cut.where(cut.mask == 3)
        idle = _merge(cut, cut.mask == 1)
    if "api_end" in events.columns and len(idle.start):
        # The next work's launch call had not returned: the host, not the GPU, was late.
        starts = events["start"].to_numpy()
        unknown = int(idle.start[0])  # returned before any of it: no gap to lay at the host's door
        launched = events["api_end"].fill_null(unknown).to_numpy()
        order = np.argsort(starts, kind="stable")
        following = np.searchsorted(starts[order], idle.end, side="left")
        known = following < len(starts)
        returned = np.full(len(idle.start), unknown, np.int64)
        returned[known] = launched[order][following[known]]
        kinds["launch_gap"] = int(np.clip(returned - idle.start, 0, idle.end - idle.start).sum())
    kinds["other"] = idle.length - kinds["launch_gap"]
    return kinds
