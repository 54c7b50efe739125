"""The pipeline as a whole: stages, phases, Stage wait and bubble (METRICS section 7)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from nsysk3.analysis.budget import Budget
from nsysk3.analysis.intervals import EMPTY, Intervals, clip, segments, union
from nsysk3.analysis.partnerless import where_split
from nsysk3.analysis.rows import by_rank
from nsysk3.classify import COMM_ROLES

Ints = NDArray[np.int64]

# A stage is busy when it computes or works with its own tensor-parallel group; its boundary is not its work.
BUSY_ROLES = ("compute", "fused", *(role for role in COMM_ROLES if role != "p2p"))
PHASES = ("fill", "steady", "drain")


def infer_stages(ranks: pl.DataFrame, pairs: pl.DataFrame) -> pl.DataFrame:
    """``rank``, ``stage``, ``stage_source``.

    The stage a source named, else how many activation hand-overs lie before the rank (activations flow one way only),
    else null.  One source serves the whole run: mixing would number some stages twice.
    """
    named = ranks.select("rank", pl.col("pp_rank").alias("stage"))
    if named["stage"].null_count() == 0:
        return named.with_columns(pl.lit("rank source").alias("stage_source"))
    links = pairs.filter(pl.col("kind") == "activation").select("src_rank", "dst_rank").unique()
    depth = dict.fromkeys(ranks["rank"].to_list(), 0)
    hops = links.rows()
    for _ in range(len(depth)):
        deeper = {dst: depth[src] + 1 for src, dst in hops if depth[src] + 1 > depth[dst]}
        if not deeper:
            break
        depth |= deeper
    else:
        hops = []  # a ring: whatever flows, it is not a pipeline
    linked = {rank for hop in hops for rank in hop}
    stages = [depth[rank] if rank in linked else None for rank in ranks["rank"].to_list()]
    source = [None if stage is None else "direction of activations" for stage in stages]
    return pl.DataFrame(
        {"rank": ranks["rank"], "stage": stages, "stage_source": source},
        schema={"rank": pl.Int32, "stage": pl.Int64, "stage_source": pl.String},
    )


def stage_gaps(events: pl.DataFrame) -> dict[int, Intervals]:
    """Per rank, the gaps in which nothing ran because a boundary receive was not even launched, or had just ended.

    ``events`` need ``receive`` (see Matched).  A gap counts when the work that ends it is a receive, or when the work
    before it was the receive of an activation (the first layer starts late).
    """
    if events["receive"].null_count() == events.height:
        return {}
    gaps = {}
    for rank, rows in by_rank(events.select("rank", "start", "end", "receive")).items():
        rows = rows[np.argsort(rows["start"].to_numpy(), kind="stable")]
        kind = rows["receive"].cast(pl.String)
        gaps[rank] = _gaps(
            rows["start"].to_numpy(), rows["end"].to_numpy(), kind.is_not_null().to_numpy(),
            (kind == "activation").fill_null(False).to_numpy(),
        )  # fmt: skip
    return gaps


def _gaps(start: Ints, end: Ints, receive: NDArray[np.bool_], activation: NDArray[np.bool_]) -> Intervals:
    if len(start) < 2:
        return EMPTY
    reach = np.maximum.accumulate(end)
    # Whose end is the last so far: the work that ran until the gap began.
    owner = np.maximum.accumulate(np.where(end == reach, np.arange(len(end)), 0))
    idle = start[1:] > reach[:-1]
    chosen = idle & (receive[1:] | activation[owner[:-1]])
    return Intervals(reach[:-1][chosen], start[1:][chosen])


def phase_bounds(pairs: pl.DataFrame, windows: pl.DataFrame) -> tuple[int, int] | None:
    """When filling ends and draining begins (common clock, ns), None without activations.

    The pipeline is full once every receiving stage has its first activation, and drains from when the first of the
    sending stages has handed over its last.
    """
    activations = pairs.filter(pl.col("kind") == "activation")
    if activations.is_empty() or windows.is_empty():
        return None
    full = activations.group_by("dst_rank").agg(pl.col("recv_end_utc_ns").min())["recv_end_utc_ns"].max()
    empty = activations.group_by("src_rank").agg(pl.col("send_end_utc_ns").max())["send_end_utc_ns"].min()
    assert isinstance(full, int)
    assert isinstance(empty, int)
    return (full, max(full, empty))


@dataclass(frozen=True)
class StageTime:
    """What one rank spent: ``busy_ns``, and exposed waits for other stages by phase (null without phases)."""

    busy_ns: int
    phases: dict[str, int | None]


def stage_times(events: pl.DataFrame, windows: pl.DataFrame, bounds: tuple[int, int] | None) -> dict[int, StageTime]:
    """By rank of ``windows``; ``bounds``: phase_bounds of the run."""
    own = by_rank(events.select("rank", "start", "end", "role", "wait_ns", "wait_state"))
    return {
        rank: StageTime(_busy(own[rank], low, high), _by_phase(_exposed_stage_wait(own[rank], low, high), bounds))
        for rank, low, high in windows.select("rank", "start", "end").iter_rows()
    }


def pipeline_table(
    stages: pl.DataFrame,
    times: Mapping[int, StageTime],
    budgets: Mapping[int, Budget],
    forwards: pl.DataFrame | None,
    unsplit: pl.DataFrame,
    known_stages: int = 0,
) -> pl.DataFrame:
    """One row a rank that has a stage.

    ``busy_ns`` = compute, fused and tensor-parallel communication; ``stage_wait_ns`` = the exposed waits for the stages
    before and behind plus ``stage_idle_ns``, by phase ``fill``/``steady``/``drain``; ``bubble_ns`` = exposed Stage wait
    plus all idle time; ``micro_batches`` = whole forwards of the rank;
    ``ideal_bubble_share`` = (S-1)/(M+S-1), M the most of any rank; ``imbalance`` = busiest stage over
    mean; forward times null where no forwards were found.  Only the exposed part of a wait counts: a receive that spins
    beside compute holds nothing up.  Waits, and what they are part of, are null where ``unsplit`` (partnerless) says
    so; ``known_stages``: how many there are, seen or not.
    """
    known = stages.filter(pl.col("stage").is_not_null())
    number = max(known["stage"].n_unique(), known_stages)
    batches = _micro_batches(forwards)
    # What the pipeline was given: a stage whose capture lost a forward still had it.
    given = max(batches.values(), default=0)
    rows = []
    for rank, stage in known.select("rank", "stage").iter_rows():
        budget = budgets[rank]
        up, down = budget.buckets["exposed_wait_upstream"], budget.buckets["exposed_wait_downstream"]
        stage_idle = budget.buckets["idle_stage_idle"]
        bubble = up + down + budget.idle_ns
        count = batches.get(rank)
        rows.append(
            {
                "rank": rank, "stage": stage, "window_ns": budget.window_ns, "busy_ns": times[rank].busy_ns,
                "exposed_wait_upstream_ns": up, "exposed_wait_downstream_ns": down, "stage_idle_ns": stage_idle,
                "stage_wait_ns": up + down + stage_idle, **times[rank].phases,
                "idle_ns": budget.idle_ns, "bubble_ns": bubble,
                "bubble_share": bubble / budget.window_ns if budget.window_ns else None,
                "micro_batches": count,
                "ideal_bubble_share": (number - 1) / (given + number - 1) if given else None,
            }
        )  # fmt: skip
    integer = (
        "window_ns", "busy_ns", "exposed_wait_upstream_ns", "exposed_wait_downstream_ns", "stage_idle_ns",
        "stage_wait_ns",
    )  # fmt: skip
    schema = {
        "rank": pl.Int32, "stage": pl.Int64, **dict.fromkeys(integer, pl.Int64),
        **{f"wait_{phase}_ns": pl.Int64 for phase in PHASES}, "idle_ns": pl.Int64, "bubble_ns": pl.Int64,
        "bubble_share": pl.Float64, "micro_batches": pl.Int64, "ideal_bubble_share": pl.Float64,
    }  # fmt: skip
    table = _unknown_left_out(pl.DataFrame(rows, schema=schema, orient="row"), unsplit)
    per_stage = table.group_by("stage").agg(pl.col("busy_ns").median())["busy_ns"]
    mean = per_stage.mean()
    imbalance = per_stage.max() / mean if isinstance(mean, float) and mean > 0 else None  # type: ignore[operator]
    return _with_forwards(table.with_columns(pl.lit(imbalance, pl.Float64).alias("imbalance")), forwards)


def _unknown_left_out(table: pl.DataFrame, unsplit: pl.DataFrame) -> pl.DataFrame:
    stage_wait = ("wait_upstream", "wait_downstream")
    sums = ("stage_wait_ns", *(f"wait_{phase}_ns" for phase in PHASES), "bubble_ns", "bubble_share")
    split = [where_split(f"exposed_{wait}_ns", wait) for wait in stage_wait]
    split += [where_split(name, *stage_wait) for name in sums]
    return table.join(unsplit, on="rank", how="left", maintain_order="left").with_columns(split).select(table.columns)


def _busy(events: pl.DataFrame, low: int, high: int) -> int:
    mine = events.filter(pl.col("role").is_in(BUSY_ROLES))
    return clip(union(mine["start"].to_numpy(), mine["end"].to_numpy()), low, high).length


def _exposed_stage_wait(events: pl.DataFrame, low: int, high: int) -> Intervals:
    """When a rank was waiting for another stage with nothing else running."""
    mine = events.filter((pl.col("end") > low) & (pl.col("start") < high))
    waits = mine.filter(pl.col("wait_state").is_in(["wait_upstream", "wait_downstream"]) & (pl.col("wait_ns") > 0))
    others = mine.filter((pl.col("role") != "p2p") & (pl.col("role") != "copy"))
    waited = union(waits["start"].to_numpy(), (waits["start"] + waits["wait_ns"]).to_numpy())
    return clip(_minus(waited, union(others["start"].to_numpy(), others["end"].to_numpy())), low, high)


def _minus(a: Intervals, b: Intervals) -> Intervals:
    if not len(a.start):
        return EMPTY
    cut = segments([a, b], int(a.start[0]), int(a.end[-1]))
    alone = cut.mask == 1
    return union(cut.start[alone], cut.end[alone])


def _by_phase(waits: Intervals, bounds: tuple[int, int] | None) -> dict[str, int | None]:
    if bounds is None:
        return {f"wait_{phase}_ns": None for phase in PHASES}
    full, empty = bounds
    far = np.iinfo(np.int64).max
    parts = ((-far, full), (full, empty), (empty, far))
    return {f"wait_{phase}_ns": clip(waits, *part).length for phase, part in zip(PHASES, parts, strict=True)}


def _micro_batches(forwards: pl.DataFrame | None) -> dict[int, int]:
    """Forwards per rank; without forwards nobody can tell how many tensors make one hand-over."""
    if forwards is not None and forwards.height:
        counted = forwards.group_by("rank").len()
        return dict(counted.iter_rows())
    return {}


def _with_forwards(table: pl.DataFrame, forwards: pl.DataFrame | None) -> pl.DataFrame:
    if forwards is None or forwards.is_empty():
        return table.with_columns(
            pl.lit(None, pl.Float64).alias("forward_p50_ns"), pl.lit(None, pl.Float64).alias("forward_p95_ns")
        )
    spent = pl.col("end_utc_ns") - pl.col("start_utc_ns")
    times = forwards.group_by("rank").agg(
        spent.median().alias("forward_p50_ns"), spent.quantile(0.95, "linear").alias("forward_p95_ns")
    )
    return table.join(times, on="rank", how="left", maintain_order="left")
