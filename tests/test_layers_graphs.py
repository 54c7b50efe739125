"""Layers of CUDA graph replays."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import polars as pl
from hypothesis import given
from hypothesis import strategies as st
from layer_runs import FIXTURES, GRAPH, TP2, attributed, real

from nsysk3.analysis.attribution import BETWEEN, GRAPH_REPLAY
from nsysk3.analysis.graph_layers import align, attribute_graphs, captured_nodes
from nsysk3.analysis.layers import unattributed_reasons


def test_replays_without_anything_to_go_by_are_counted_and_not_attributed() -> None:
    reasons = unattributed_reasons(real(GRAPH).events).filter(pl.col("reason") == GRAPH_REPLAY)
    assert reasons.select("rank", "kernels").rows() == [(0, 352), (1, 352)]
    assert real(GRAPH).kernels["layer"].null_count() == real(GRAPH).kernels.height


def test_a_graph_traced_as_a_whole_is_a_replay_too() -> None:
    events = real(FIXTURES / "h200" / "graphwhole.sqlite").events
    whole = events.filter(pl.col("kind") == "graph")
    assert set(whole["reason"].cast(pl.String)) == {GRAPH_REPLAY}


def test_nodes_belong_to_the_layer_in_which_they_were_captured(tmp_path: Path) -> None:
    copy = tmp_path / "graph.sqlite"
    shutil.copy(GRAPH, copy)
    copy.chmod(0o644)
    with closing(sqlite3.connect(copy)) as connection:
        query = (
            "select n.globalTid, n.start, c.graphNodeId from CUDA_GRAPH_NODE_EVENTS n "
            "join CUDA_GRAPH_NODE_EVENTS c on c.originalGraphNodeId = n.graphNodeId and c.globalTid = n.globalTid "
            "where n.originalGraphNodeId is null order by n.globalTid, n.start"
        )
        made = pl.DataFrame(connection.execute(query).fetchall(), schema=["tid", "at", "node"], orient="row")
        truth = made.with_columns((pl.int_range(pl.len()).over("tid") * 4 // pl.len().over("tid")).alias("layer"))
        spans = truth.group_by("tid", "layer").agg(pl.col("at").min().alias("from"), pl.col("at").max().alias("to"))
        connection.executemany(
            "insert into NVTX_EVENTS (start, end, eventType, globalTid, text, domainId) values (?, ?, 59, ?, ?, 0)",
            [(start, end, tid, f"model.layers.{layer}") for tid, layer, start, end in spans.iter_rows()],
        )
        connection.commit()
    nodes = attributed(copy).events.filter(pl.col("graph_node").is_not_null())
    joined = nodes.join(truth, left_on=["tid", "graph_node"], right_on=["tid", "node"], how="left", suffix="_true")
    assert joined["layer_true"].null_count() == 0
    assert (joined["layer"] == joined["layer_true"]).all()
    assert set(nodes["layer_source"].cast(pl.String)) == {"graph order"}


def _replayed(events: pl.DataFrame, first: int) -> pl.DataFrame:
    """Events whose forwards from ``first`` on were replays of one graph."""
    replay = pl.col("forward") >= first
    node = 2**33 + pl.int_range(pl.len()).over("rank", "forward")
    return events.with_columns(
        pl.col("layer").alias("layer_true"),
        pl.when(replay).then(node).alias("graph_node"),
        pl.when(replay).then(pl.col("forward").cast(pl.Int64) + 10**7).otherwise("correlation").alias("correlation"),
        pl.when(replay).then(pl.lit(GRAPH_REPLAY, events.schema["reason"])).otherwise("reason").alias("reason"),
        pl.when(~replay).then("layer").alias("layer"),
        pl.when(~replay).then("module").alias("module"),
        pl.when(~replay).then("layer_source").alias("layer_source"),
    )


def test_nodes_are_lined_up_with_an_eager_forward_of_the_rank() -> None:
    found = real(TP2)
    replayed = _replayed(found.events, 4)
    events = attribute_graphs(replayed, found.ranks, found.found.marked, captured_nodes(found.run.reports))
    kernels = events.filter((pl.col("kind") == "kernel") & pl.col("graph_node").is_not_null())
    assert kernels["layer"].equals(kernels["layer_true"].alias("layer"), null_equal=True)
    assert set(kernels.filter(pl.col("layer").is_null())["reason"].cast(pl.String)) == {BETWEEN}
    assert kernels["module"].equals(found.kernels.filter(pl.col("forward") >= 4)["module"], null_equal=True)
    eager = events.filter(pl.col("graph_node").is_null())
    assert eager.equals(replayed.filter(pl.col("graph_node").is_null()))


def test_a_graph_of_other_kernels_is_not_attributed() -> None:
    found = real(TP2)
    replay = pl.col("graph_node").is_not_null()
    other = (pl.col("name_id") + pl.col("graph_node") % 3).cast(pl.UInt32)
    shuffled = _replayed(found.events, 4).with_columns(
        pl.when(replay).then(other).otherwise("name_id").alias("name_id")
    )
    after = attribute_graphs(shuffled, found.ranks, found.found.marked, captured_nodes(found.run.reports))
    replays = after.filter(pl.col("graph_node").is_not_null())
    assert replays["layer"].null_count() == replays.height
    assert set(replays["reason"].cast(pl.String)) == {GRAPH_REPLAY}


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), max_size=40))
def test_what_lines_up_agrees_and_is_in_order(left: list[int], right: list[int]) -> None:
    a, b = np.array(left, np.int64), np.array(right, np.int64)
    match = align(a, b)
    matched = match[match >= 0]
    assert (a[match >= 0] == b[matched]).all()
    assert (np.diff(matched) > 0).all()
    assert (align(a, a) == np.arange(len(a))).all()


def test_sequences_that_differ_here_and_there_line_up() -> None:
    names = np.arange(1000) % 97
    changed = np.delete(np.insert(names, [100, 400, 400], [-5, -6, -7]), [700, 701])
    match = align(changed, names)
    assert (match >= 0).sum() == 998
    assert (match[match >= 0] == np.delete(np.arange(1000), [697, 698])).all()
