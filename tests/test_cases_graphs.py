"""What people ran into, named after where it was reported: CUDA graphs, traced by node or as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
from case_results import US, only
from conftest import FIXTURES
from exports import ALLREDUCE, GEMM, Export

import nsysk3
from nsysk3.result import Result


def idle_kinds(result: Result) -> dict[str, int]:
    idle = result.budget.filter(pl.col("bucket").str.starts_with("idle_"))
    return {name.removeprefix("idle_"): length for name, length in idle.select("bucket", "ns").iter_rows()}


def test_case_pegainfer_163_whole_graphs_are_busy_and_unknown(analyzed: Any) -> None:
    result = analyzed(Export().graph(0, 1000).kernel(GEMM, 1100, 1110))
    rank = only(result)
    assert (rank.window_ns, rank.graph_ns, rank.compute_ns, rank.idle_ns) == (1110 * US, 1000 * US, 10 * US, 100 * US)
    assert rank.window_ns - rank.idle_ns == 1010 * US
    assert rank.kernel_total_ns == 10 * US
    assert any("--cuda-graph-trace=node" in note for note in result.document.notes)


def test_case_nsys_ai_236_nothing_but_whole_graphs_measures_no_class() -> None:
    result = nsysk3.analyze(FIXTURES / "h200" / "graphwhole.sqlite")
    for rank in result.document.ranks:
        unknown = (rank.compute_ns, rank.comm_ns, rank.overlap_ns, rank.overlap_ratio, rank.exposed_comm_ns)
        assert unknown == (None,) * 5
        assert (rank.allreduce_count, rank.allreduce_p50_ns, rank.unclassified_share) == (None, None, None)
        assert rank.graph_ns + rank.idle_ns == rank.window_ns
    assert "their kernels are unknown" in result.document.not_measured["compute_ns"]


def test_case_nsys_ai_236_node_rows_and_graph_rows_are_never_both_counted(analyzed: Any) -> None:
    export = Export().graph(0, 1000)
    for index in range(4):
        export.kernel(GEMM, index * 200, index * 200 + 100, node=index + 1)
    export.graph(0, 500, device=1, pid=2)  # another process that has no node rows keeps its replay
    first, second = analyzed(export).document.ranks
    assert (first.graph_ns, first.compute_ns, first.window_ns) == (0, 400 * US, 700 * US)
    assert (second.graph_ns, second.compute_ns) == (500 * US, None)


def test_case_nsys_ai_569_one_launch_of_64_kernels_counts_once(tmp_path: Path) -> None:
    # GIVEN a replay of 64 kernels under one launch call that returns 30 us before the first of them starts
    export = Export().launch(0, 70, correlation=5, name="cudaGraphLaunch_v10000").kernel(GEMM, -100, -50)
    for index in range(64):
        export.kernel(ALLREDUCE, 100 + index * 10, 105 + index * 10, correlation=5, node=index + 1)
    path = export.write(tmp_path / "r.sqlite")
    run = nsysk3.load(path)
    assert run.events.height == 65
    assert run.events.filter(pl.col("correlation") == 5)["api_start"].n_unique() == 1
    result = nsysk3.analyze(run)
    # 150 us of idle before the first node: 120 us in which the host had not launched; then 63 gaps of 5 us that the
    # launch does not explain.
    assert idle_kinds(result) == {"stage_idle": 0, "launch_gap": 120 * US, "other": 30 * US + 63 * 5 * US}
    assert only(result).allreduce_count == 64
