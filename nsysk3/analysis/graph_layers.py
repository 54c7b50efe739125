"""Layers of the kernels that CUDA graph replays run, from where their nodes come from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl

from nsysk3.analysis.attribution import BETWEEN, GRAPH_REPLAY, LAYER_SOURCES, REASONS
from nsysk3.analysis.marked_ranges import by_thread
from nsysk3.analysis.nesting import Ints, innermost
from nsysk3.trace.report import Report, pid_of

# A graph is the same pass as an eager forward when this share of its kernels lines up with it.
_MIN_MATCHED = 0.9
# Two sequences are in step again when so many names in a row agree, within so many kernels.
_IN_STEP = 4
_REACH = 64
_CLONES = 4
CAPTURED_SCHEMA = pl.Schema(
    {"report": pl.Int64(), "pid": pl.Int64(), "graph_node": pl.Int64(), "tid": pl.Int64(), "at": pl.Int64()}
)
_NODE_SCHEMA = pl.Schema(
    {
        "rank": pl.Int32(),
        "graph_node": pl.Int64(),
        "layer": pl.Int32(),
        "module": pl.Categorical(),
        "between": pl.Boolean(),
    }
)


def attribute_graphs(
    events: pl.DataFrame, ranks: pl.DataFrame, marked: pl.DataFrame, captured: pl.DataFrame
) -> pl.DataFrame:
    """Fill in ``layer``, ``module``, ``layer_source`` and ``reason`` of graph kernels where their nodes can be placed.

    ``events`` are those of launched_in, ``captured`` captured_nodes's.  A node belongs to the layer range that was
    open when it was captured, if the capture is in the trace.  Otherwise a graph's nodes, in node order, are lined up
    by kernel name with the eager forwards of the same rank that have layers; a graph that does not line up keeps the
    reason ``graph replay``.  All replays of a graph have the same nodes, so one is placed for all.
    """
    replayed = (pl.col("reason") == GRAPH_REPLAY) & pl.col("graph_node").is_not_null() & (pl.col("kind") != "graph")
    nodes = events.filter(replayed)
    if nodes.is_empty():
        return events
    known = _from_capture(nodes, ranks, marked, captured)
    rest = nodes.filter(pl.col("kind") == "kernel").join(known, on=["rank", "graph_node"], how="anti")
    read = ("rank", "forward", "api_start", "start", "name_id", "layer", "module")
    plain = (pl.col("kind") == "kernel") & pl.col("graph_node").is_null() & pl.col("forward").is_not_null()
    from_ranges = (pl.col("layer_source") == "nvtx").any().over("rank", "forward")
    eager = events.filter(from_ranges & plain).select(read)
    found = pl.concat([known, _from_order(rest, eager)])
    keys = events.select("rank", "graph_node")
    placed = keys.join(found, on=["rank", "graph_node"], how="left", maintain_order="left").drop("rank", "graph_node")
    joined = events.hstack(placed.rename({"layer": "layer_found", "module": "module_found"}))
    hit = replayed & pl.col("layer_found").is_not_null()
    between = replayed & pl.col("between").fill_null(False)
    return joined.with_columns(
        pl.when(hit).then("layer_found").otherwise("layer").alias("layer"),
        pl.when(hit | between).then("module_found").otherwise("module").alias("module"),
        pl.when(hit).then(pl.lit("graph order", LAYER_SOURCES)).otherwise("layer_source").alias("layer_source"),
        pl.when(hit).then(None).when(between).then(pl.lit(BETWEEN, REASONS)).otherwise("reason").alias("reason"),
    ).drop("layer_found", "module_found", "between")  # fmt: skip


def captured_nodes(reports: Sequence[Report]) -> pl.DataFrame:
    """When and where graph nodes were made: ``report``, ``pid``, ``graph_node``, ``tid``, ``at`` (UTC ns).

    The nodes a replay runs are clones; their row is the one of the node first captured.  Empty where Nsight did not
    trace graph nodes.
    """
    parts = [pl.DataFrame(schema=CAPTURED_SCHEMA)]
    for index, report in enumerate(reports):
        for table in ("CUDA_GRAPH_NODE_EVENTS", "CUDA_GRAPH_EVENTS"):  # which of them has nodes depends on the version
            rows = report.source.read(table, ("start", "globalTid", "graphNodeId", "originalGraphNodeId"))
            rows = rows.filter(pl.col("graphNodeId").is_not_null() & pl.col("globalTid").is_not_null())
            made = rows.select(
                pl.lit(index, pl.Int64).alias("report"),
                pid_of(pl.col("globalTid")).alias("pid"),
                pl.col("graphNodeId").alias("graph_node"),
                pl.col("originalGraphNodeId").alias("original"),
                pl.col("globalTid").alias("tid"),
                (pl.col("start") + report.to_utc_ns).alias("at"),
            )
            # A clone has a second row, without its original.
            made = made.sort(pl.col("original").is_null(), "at").unique(["pid", "graph_node"], keep="first")
            parts.append(_originals(made.sort("pid", "graph_node")).select(list(CAPTURED_SCHEMA)))
    return pl.concat(parts)


def _originals(made: pl.DataFrame) -> pl.DataFrame:
    """Each node with thread and time of the node that it is a clone of, clones of clones too."""
    firsts = made.select("pid", pl.col("graph_node").alias("original"), "tid", "at", pl.col("original").alias("next"))
    for _ in range(_CLONES):
        if made["original"].null_count() == made.height:
            break
        joined = made.join(firsts, on=["pid", "original"], how="left", suffix="_first", maintain_order="left")
        cloned = pl.col("tid_first").is_not_null()
        made = joined.with_columns(
            pl.when(cloned).then("tid_first").otherwise("tid").alias("tid"),
            pl.when(cloned).then("at_first").otherwise("at").alias("at"),
            pl.when(cloned).then("next").alias("original"),
        ).drop("tid_first", "at_first", "next")
    return made


def _from_capture(
    nodes: pl.DataFrame, ranks: pl.DataFrame, marked: pl.DataFrame, captured: pl.DataFrame
) -> pl.DataFrame:
    wanted = nodes.select("rank", "graph_node").unique().join(ranks.select("rank", "report", "pid"), on="rank")
    made = wanted.join(captured, on=["report", "pid", "graph_node"], nulls_equal=True)
    layers = by_thread(marked.filter(pl.col("kind") == "layer"))
    parts = [pl.DataFrame(schema=_NODE_SCHEMA)]
    for key, part in by_thread(made).items():
        ranges = layers.get(key)
        if ranges is None:
            continue
        at = innermost(ranges["start"].to_numpy(), ranges["end"].to_numpy(), part["at"].to_numpy())
        inside = pl.Series(at >= 0)
        where = ranges.select("layer", "module")[at[at >= 0]]
        parts.append(
            part.filter(inside).select("rank", "graph_node").hstack(where).with_columns(pl.lit(False).alias("between"))
        )
    return pl.concat(parts)


def _from_order(nodes: pl.DataFrame, eager: pl.DataFrame) -> pl.DataFrame:
    """Nodes lined up with eager forwards of their rank."""
    parts = [pl.DataFrame(schema=_NODE_SCHEMA)]
    models = {rank: _models(part) for (rank,), part in eager.partition_by("rank", as_dict=True).items()}
    for (rank, *_), graph in _graphs(nodes).items():
        aligned = [_lined_up(graph, model) for model in models.get(rank, [])]
        best = max((each for each in aligned if each is not None), key=lambda each: each[0], default=None)
        if best is not None:
            parts.append(best[1])
    return pl.concat(parts)


def _graphs(nodes: pl.DataFrame) -> dict[tuple[object, ...], pl.DataFrame]:
    """One replay of each graph, its nodes in order, by (rank, lowest node)."""
    replays = nodes.with_columns(pl.col("graph_node").min().over("rank", "correlation").alias("graph"))
    first = replays.group_by("rank", "graph").agg(pl.col("correlation").sort_by("start").first())
    chosen = replays.join(first, on=["rank", "graph", "correlation"], how="semi").sort("rank", "graph_node")
    return chosen.partition_by("rank", "graph", as_dict=True, maintain_order=True)


def _models(eager: pl.DataFrame) -> list[pl.DataFrame]:
    """The forwards of a rank in launch order, one of each kernel sequence."""
    forwards = eager.sort("api_start", "start", "name_id").partition_by("forward", maintain_order=True)
    return list({part["name_id"].to_numpy().tobytes(): part for part in forwards}.values())


def _lined_up(graph: pl.DataFrame, model: pl.DataFrame) -> tuple[float, pl.DataFrame] | None:
    """(share of the graph's nodes that line up, _NODE_SCHEMA rows), None below _MIN_MATCHED."""
    match = align(graph["name_id"].to_numpy().astype(np.int64), model["name_id"].to_numpy().astype(np.int64))
    share = float((match >= 0).mean())
    if share < _MIN_MATCHED:
        return None
    where = model.select(pl.col("layer", "module").gather(pl.Series(match).replace(-1, None)))
    rows = graph.select("rank", "graph_node").hstack(where)
    # A kernel that only the graph has lies in a layer when both neighbours do.
    lone = pl.Series(match < 0)
    enclosed = pl.col("layer").forward_fill() == pl.col("layer").backward_fill()
    return share, rows.with_columns(
        pl.when(lone & enclosed).then(pl.col("layer").forward_fill()).otherwise("layer").alias("layer"),
    ).with_columns((pl.col("layer").is_null() & ~lone).alias("between"))


def align(left: Ints, right: Ints) -> Ints:
    """For each symbol of ``left`` the position in ``right`` it lines up with, -1 for none.

    Walks both in step and, where they differ, skips the fewest symbols after which they agree again.  Linear for
    sequences that differ here and there; once nothing near agrees, the rest stays unmatched.
    """
    match = np.full(len(left), -1, np.int64)
    at, other = 0, 0
    while at < len(left) and other < len(right):
        length = min(len(left) - at, len(right) - other)
        differ = left[at : at + length] != right[other : other + length]
        run = int(np.argmax(differ)) if differ.any() else length
        match[at : at + run] = np.arange(other, other + run)
        at, other = at + run, other + run
        skip = _skip(left[at : at + _REACH], right[other : other + _REACH]) if run < length else None
        if skip is None:
            break
        at, other = at + skip[0], other + skip[1]
    return match


def _skip(left: Ints, right: Ints) -> tuple[int, int] | None:
    if min(len(left), len(right)) < _IN_STEP:
        return None
    a, b = (np.lib.stride_tricks.sliding_window_view(each, _IN_STEP) for each in (left, right))
    agree = (a[:, None, :] == b[None, :, :]).all(axis=2)
    if not agree.any():
        return None
    cost = np.add.outer(np.arange(len(a)), np.arange(len(b)))
    row, column = np.unravel_index(np.argmin(np.where(agree, cost, len(a) + len(b))), cost.shape)
    return int(row), int(column)
