"""Which layer and forward launched each GPU event, by the ranges that were open on the host when it was launched."""

from __future__ import annotations

import numpy as np
import polars as pl

from nsysk3.analysis.marked_ranges import at_or_before, by_thread
from nsysk3.analysis.nesting import Ints, innermost
from nsysk3.analysis.rows import or_null, runs
from nsysk3.trace.report import pid_of

GRAPH_REPLAY = "graph replay"
BOUNDARY = "pipeline boundary"
NO_NVTX = "no NVTX"
LAUNCH_UNKNOWN = "launch unknown"
OTHER_THREAD = "launched from a thread without ranges"
BETWEEN = "between layers (embedding, norm, logits)"
OUTSIDE = "outside every layer range"
NO_PERIOD = "no NVTX, and no period found"
OUTSIDE_PERIOD = "no NVTX, and outside the layers of the period"
REASONS = pl.Enum(
    [GRAPH_REPLAY, BOUNDARY, NO_NVTX, LAUNCH_UNKNOWN, OTHER_THREAD, BETWEEN, OUTSIDE, NO_PERIOD, OUTSIDE_PERIOD]
)
LAYER_SOURCES = pl.Enum(["nvtx", "graph order", "period"])


def launched_in(
    events: pl.DataFrame, ranks: pl.DataFrame, marked: pl.DataFrame, host_forwards: pl.DataFrame
) -> pl.DataFrame:
    """Events, in their order, with ``layer``, ``module``, ``host_forward``, ``layer_source``, ``reason``.

    ``events`` need rank, report, tid, api_start, graph_node, kind and role; ``marked`` is of one stack (main_stack)
    and ``host_forwards`` are its forward_ranges.

    * ``layer`` (Int32): the innermost layer range that held the launch, on the launching thread.  Ranges run ahead of
      the GPU, so those open while a kernel ran say nothing.
    * ``module`` (Categorical): the path inside the layer, or the model's module outside one.
    * ``host_forward``: row of ``host_forwards``; how those are numbered depends on all reports, see with_numbers.
    * ``reason``: why ``layer`` is null, never null there.  The kernels of a CUDA graph replay share one launch, which
      says nothing about their layers.
    """
    replayed = pl.col("graph_node").is_not_null() | (pl.col("kind") == "graph")
    found = events.hstack(_found(events, marked, host_forwards))
    found = found.with_columns(pl.when(~replayed).then(name).alias(name) for name in ("layer", "module"))
    return found.with_columns(
        pl.when(pl.col("layer").is_not_null()).then(pl.lit("nvtx", LAYER_SOURCES)).alias("layer_source"),
        _reason(replayed, ranks, marked),
    ).drop("on_thread")


def with_numbers(found: pl.DataFrame, host_forwards: pl.DataFrame, markers: bool) -> pl.DataFrame:
    """``launched_in``'s events with ``forward`` (Int32), see _numbers; ``markers``: told_apart of the whole run."""
    keys, run = runs(found.select("rank", "host_forward"))
    numbers = _numbers(keys, host_forwards, markers)
    forward = keys.join(numbers, on=["rank", "host_forward"], how="left", maintain_order="left")["forward"]
    return found.with_columns(forward.gather(run))


def told_apart(host_forwards: pl.DataFrame) -> bool:
    """Whether all forwards have a marker's number, or can be counted on from one, and no thread repeats one."""
    told = _told(host_forwards)
    # A marker that was closed and opened again is one forward.
    again = (pl.col("told") == pl.col("told").shift(1)).over("report", "tid").fill_null(False)
    once = told.filter(~again).select("report", "tid", "told").is_unique().all()
    return told["told"].null_count() == 0 and once


def _told(host_forwards: pl.DataFrame) -> pl.DataFrame:
    index = pl.int_range(pl.len()).over("report", "tid")
    shift = (pl.col("number") - index).backward_fill().forward_fill().over("report", "tid")
    return host_forwards.with_row_index("host_forward").with_columns((shift + index).alias("told"))


def _found(events: pl.DataFrame, marked: pl.DataFrame, host_forwards: pl.DataFrame) -> pl.DataFrame:
    """``layer``, ``module``, ``host_forward`` of each event, and ``on_thread``: its thread has ranges of the model."""
    ranges, forwards = by_thread(_numbered(marked)), by_thread(_numbered(host_forwards))
    layer, other, forward = (np.full(events.height, -1) for _ in range(3))  # rows of `marked`, `host_forwards`
    on_thread = np.zeros(events.height, bool)
    launched = events.select("report", "tid", "api_start").with_row_index("row")
    launched = launched.filter(pl.col("tid").is_in([tid for _, tid in ranges]) & pl.col("api_start").is_not_null())
    for key, points in by_thread(launched).items():
        if key not in ranges:
            continue
        mine, row, at = ranges[key], points["row"].to_numpy(), points["api_start"].to_numpy()
        layers = mine.filter(pl.col("kind") == "layer")
        others = mine.filter(pl.col("kind").is_in(["model", "boundary"]))
        layer[row], other[row] = _innermost_row(layers, at), _innermost_row(others, at)
        on_thread[row] = mine["kind"].is_in(["layer", "forward", "model"]).any()
        if key in forwards:
            begun = at_or_before(forwards[key]["start"].to_numpy(), at)
            inside = (begun >= 0) & (forwards[key]["end"].to_numpy()[begun] >= at)
            forward[row] = np.where(inside, forwards[key]["at"].to_numpy()[begun], -1)
    in_layer, elsewhere = or_null(layer), or_null(np.where(layer < 0, other, layer))
    return pl.DataFrame(
        [
            marked["layer"].gather(in_layer),
            marked["module"].gather(elsewhere),
            or_null(forward).cast(pl.UInt32).alias("host_forward"),
            pl.Series("on_thread", on_thread),
        ]
    )


def _innermost_row(ranges: pl.DataFrame, at: Ints) -> Ints:
    if ranges.is_empty():
        return np.full(len(at), -1)
    held = innermost(ranges["start"].to_numpy(), ranges["end"].to_numpy(), at)
    return np.where(held >= 0, ranges["at"].to_numpy()[held], -1)


def _numbered(rows: pl.DataFrame) -> pl.DataFrame:
    return rows.with_columns(pl.int_range(pl.len(), dtype=pl.Int64).alias("at"))


def _numbers(launched: pl.DataFrame, host_forwards: pl.DataFrame, markers: bool) -> pl.DataFrame:
    """``rank``, ``host_forward``, ``forward``: the number of each forward that a rank launched work in.

    The ``markers``' own numbers, which mean the same micro-batch on every rank, when no thread repeats one; a forward
    whose marker the capture missed counts on from its neighbours.  Otherwise each rank counts its forwards from 0.
    """
    seen = launched.drop_nulls().unique()
    seen = seen.join(_told(host_forwards), on="host_forward").sort("rank", "start", "host_forward")
    number = pl.col("told") if markers else pl.int_range(pl.len()).over("rank")
    return seen.select("rank", "host_forward", number.cast(pl.Int32).alias("forward"))


def _reason(replayed: pl.Expr, ranks: pl.DataFrame, marked: pl.DataFrame) -> pl.Expr:
    layers = marked.filter(pl.col("kind") == "layer")
    processes = layers.select("report", pid_of(pl.col("tid")).alias("pid")).unique()
    with_layers = ranks.join(processes, on=["report", "pid"], how="semi", nulls_equal=True)["rank"]
    reason = (
        pl.when(pl.col("layer").is_not_null()).then(None)
        .when(replayed).then(pl.lit(GRAPH_REPLAY, REASONS))
        .when(pl.col("role") == "p2p").then(pl.lit(BOUNDARY, REASONS))
        .when(~pl.col("rank").is_in(with_layers.implode())).then(pl.lit(NO_NVTX, REASONS))
        .when(pl.col("api_start").is_null() | pl.col("tid").is_null()).then(pl.lit(LAUNCH_UNKNOWN, REASONS))
        .when(~pl.col("on_thread")).then(pl.lit(OTHER_THREAD, REASONS))
        .when(pl.col("host_forward").is_not_null()).then(pl.lit(BETWEEN, REASONS))
        .otherwise(pl.lit(OUTSIDE, REASONS))
    )  # fmt: skip
    return reason.alias("reason")
