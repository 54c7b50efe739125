"""Faults on demand, and that each shows in the analysis as what it is."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest
from simulated import make

SHAPE = {"pp": 4, "tp": 4, "nodes": 4, "layers": 12, "micro_batches": 5, "offset_ms": 5.0}


def test_lost_kernels(tmp_path: Path) -> None:
    made = make(tmp_path, "lost-kernels=0.05", **SHAPE)
    lost = 1 - made.facts["recorded"] / made.facts["kernels"]
    assert lost == pytest.approx(0.05, abs=0.01)
    kernels = made.run.events.filter(pl.col("kind") == "kernel").height
    assert kernels == made.truth.filter(pl.col("role") != "copy").height
    assert made.result.document.summary["stable_ranks"] < 16


def test_straggler(tmp_path: Path) -> None:
    made = make(tmp_path, "straggler=5:1.3", **SHAPE)
    named = made.result.tables["stragglers"].filter("straggler")
    assert set(named["rank"]) == {5}


def test_cut_window(tmp_path: Path) -> None:
    made = make(tmp_path, "cut-window=2:0.5", **SHAPE)
    ranks = made.result.tables["rank_metrics"]
    assert set(ranks.filter(~pl.col("stable"))["world_rank"]) == {8, 9, 10, 11}
    assert ranks.filter(~pl.col("stable"))["coverage"].max() < 0.7  # type: ignore[operator]


def test_a_rank_without_nvtx(tmp_path: Path) -> None:
    made = make(tmp_path, "no-nvtx-rank=6", **SHAPE)
    assert made.run.nccl_calls.select("report", "tid").unique().height == 15
    # Its collectives still find the communicator that the others' payloads name.
    alone = made.found.collectives.filter(pl.col("state") == "unmatched")
    assert alone.is_empty()


def test_imbalanced_stage(tmp_path: Path) -> None:
    made = make(tmp_path, "imbalanced-stage=2:2", **SHAPE)
    table = made.result.tables["pipeline"]
    busiest = table.sort("busy_ns", descending=True)["stage"][0]
    assert busiest == 2
    assert table["imbalance"][0] > 1.2
    even = make(tmp_path / "even", **SHAPE).result.tables["pipeline"]
    assert table["imbalance"][0] > even["imbalance"][0] + 0.2


def test_ep_change(tmp_path: Path) -> None:
    made = make(tmp_path, "ep-change=2", **SHAPE)
    assert json.loads((made.path / "run.json").read_text("utf-8"))["topology"]["ep"] == 2
    assert set(made.run.ranks["ep_rank"]) == {0, 1}


def test_sequence_parallelism_that_fell_back(tmp_path: Path) -> None:
    made = make(tmp_path, "sp-fallback", **SHAPE)
    kernels = made.kernels
    assert not kernels.filter(pl.col("true_purpose") == "attention").height
    assert kernels.filter(pl.col("role") == "reduce_scatter").height == 16 * 5 * 3
    manifest = json.loads((made.path / "run.json").read_text("utf-8"))
    assert manifest["server"]["env"] == {"SGLANG_K3_SP_COLLECTIVE": "1"}
    assert "using NCCL" in (made.path / "nodes" / "node601" / "server.log").read_text("utf-8")


def test_a_graph_replayed_rank(tmp_path: Path) -> None:
    made = make(tmp_path, "graph-rank=3", **SHAPE)
    graphs = made.run.events.filter(pl.col("kind") == "graph")
    assert graphs["rank"].to_list() == [3] * 5
    assert made.truth.filter((pl.col("rank") == 3) & (pl.col("layer") >= 0)).is_empty()
    row = made.result.tables["rank_metrics"].filter(pl.col("world_rank") == 3).row(0, named=True)
    assert row["graph_ns"] > 0


def test_corrupt_rows(tmp_path: Path) -> None:
    made = make(tmp_path, "corrupt-rows=0.05", **SHAPE)
    assert made.run.ranks["dropped_rows"].sum() > 0
    assert any("GPU rows dropped" in note for note in made.result.document.notes)
    assert made.result.document.summary["ranks"] == 16


def test_memory_and_file_do_not_depend_on_scale(tmp_path: Path) -> None:
    """Twice the micro-batches are twice the rows of the same kind."""
    shape = {"pp": 2, "tp": 2, "nodes": 2, "layers": 4, "layer_us": 300.0, "micro_batches": 3}
    one, two = make(tmp_path / "1", **shape), make(tmp_path / "2", **shape, scale=2)
    assert two.facts["kernels"] == 2 * one.facts["kernels"]
    assert two.kernels["true_forward"].n_unique() == 6
