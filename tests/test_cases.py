"""What people who do this job ran into: one test for each report, named after where it was reported.

Cases about layers, clocks, waits of AllReduce and P2P have tests of their own.
"""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from command import run as command
from conftest import FIXTURES
from exports import ALLREDUCE, EPOCH_NS, GEMM, SENDRECV, Export, gpid, ns, two_ranks

import nsysk3
from nsysk3.analysis.nccl_links import link_nccl
from nsysk3.result import Result
from nsysk3.result.model import RankMetrics
from nsysk3.trace.nccl import read_nccl_calls
from nsysk3.trace.nvtx import read_nvtx
from nsysk3.trace.report import open_report

US = 1000


@pytest.fixture
def analyzed(tmp_path: Path) -> Any:
    """Analyse a synthetic export."""

    def analyzed(export: Export, **options: Any) -> Result:
        path = tmp_path / "case.sqlite"
        path.unlink(missing_ok=True)
        return nsysk3.analyze(export.write(path), **options)

    return analyzed


def only(result: Result) -> RankMetrics:
    (rank,) = result.document.ranks
    return rank


def roles(result: Result) -> dict[str, int]:
    return dict(result.roles.group_by("role").agg(pl.col("count").sum()).sort("role").iter_rows())


def idle_kinds(result: Result) -> dict[str, int]:
    idle = result.budget.filter(pl.col("bucket").str.starts_with("idle_"))
    return {name.removeprefix("idle_"): length for name, length in idle.select("bucket", "ns").iter_rows()}


# --- tables and columns that may not be there


def test_case_nsys_ai_291_kernels_and_strings_alone_are_enough(tmp_path: Path) -> None:
    export = Export(epoch_ns=None).kernel(GEMM, 0, 100).kernel(ALLREDUCE, 80, 150, stream=20)
    export.without("ANALYSIS_DETAILS")
    path = export.write(tmp_path / "bare.sqlite")
    with closing(sqlite3.connect(path)) as connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    assert tables == {"StringIds", "CUPTI_ACTIVITY_KIND_KERNEL"}
    ran = command("analyze", path, "--out", tmp_path / "out")
    assert ran.code == 0
    rank = only(Result.load(tmp_path / "out"))
    assert (rank.window_ns, rank.compute_ns, rank.comm_ns, rank.overlap_ns) == (150 * US, 100 * US, 70 * US, 20 * US)
    assert (rank.host, rank.gpu_uuid, rank.pp_rank, rank.rank_source) == ("bare", None, None, "inferred")
    assert "no session start time" in ran.out


def test_case_nvprof_tools_3_no_kernel_table_is_said_and_not_a_crash(tmp_path: Path) -> None:
    path = Export().nvtx("layer_0", 0, 100).meta("EXPORT_SCHEMA_VERSION", "3.11.1").write(tmp_path / "nvtx.sqlite")
    ran = command("analyze", path)
    assert ran.code == 2
    assert ran.err.count("\n") == 1
    assert f"{path}: no GPU work in this trace" in ran.err


def test_case_nvprof_tools_3_any_other_sqlite_is_not_an_export(tmp_path: Path) -> None:
    path = Export(epoch_ns=None).without("ANALYSIS_DETAILS").row("books", title="x").write(tmp_path / "books.sqlite")
    ran = command("analyze", path)
    assert (ran.code, ran.out) == (2, "")
    assert f"{path}: not an Nsight Systems export" in ran.err


@pytest.mark.parametrize(
    "table", ["NVTX_EVENTS", "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "StringIds"]
)
def test_case_nsys_ai_294_versioned_table_names(tmp_path: Path, table: str) -> None:
    plain = nsysk3.load(two_ranks().write(tmp_path / "plain" / "r.sqlite"))
    other = nsysk3.load(two_ranks().renamed(table, f"{table}_V2").write(tmp_path / "v2" / "r.sqlite"))
    for frame in ("ranks", "events", "names", "nccl_calls"):
        assert getattr(plain, frame).equals(getattr(other, frame))
    assert plain.nccl_calls.height == 8
    assert plain.events["api_start"].null_count() == 0


def test_case_nsys_ai_101_nvtx_without_text_ids(tmp_path: Path) -> None:
    export = Export().nvtx("ncclAllReduce", 0, 10).nvtx("layer_0", 0, 20).without("NVTX_EVENTS", "textId")
    export.string("ncclAllReduce")  # among the strings for another reason
    report = open_report(export.write(tmp_path / "r.sqlite"), "r")
    assert read_nvtx(report)["name"].to_list() == ["layer_0", "ncclAllReduce"]
    assert read_nccl_calls(report)["op"].to_list() == ["ncclAllReduce"]


def test_case_trimmed_exports_unknown_names_are_shown_as_unknown(analyzed: Any) -> None:
    # GIVEN a kernel whose name is not among the strings, and one without any name
    export = Export().kernel(GEMM, 0, 100).kernel(None, 100, 150).kernel(None, 150, 160)
    export.rows["CUPTI_ACTIVITY_KIND_KERNEL"][1]["shortName"] = 999
    result = analyzed(export)
    assert set(result.kernels["name"].to_list()) == {GEMM, "[unknown #999]", "[unknown]"}
    assert only(result).unclassified_share == 60 / 160


# --- names


def test_case_hta_208_four_nccl_generations(analyzed: Any) -> None:
    names = [
        "ncclKernel_AllReduce_RING_LL_Sum_half",
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL",
        "ncclSymDevKernel_AllReduce_AGxLL_R_Sum_bf16",
        "ncclSymkDevKernel_AllReduce_RSxLD_AGxST_Sum_bf16",
    ]
    export = Export()
    for index, name in enumerate(names):
        export.kernel(name, index * 100, index * 100 + 50)
    rank = only(analyzed(export))
    assert (rank.allreduce_count, rank.allreduce_total_ns, rank.comm_ns, rank.compute_ns) == (4, 200 * US, 200 * US, 0)


def test_case_nccl_739_a_generic_kernel_is_named_by_its_call(analyzed: Any) -> None:
    generic = "ncclDevKernel_Generic(ncclDevKernelArgsStorage<(unsigned long)4096>)"
    export = Export().nccl("ncclAllGather", 0, 20).kernel(generic, 30, 130, launch=(5, 10))
    export.kernel(generic, 130, 200, launch=(50, 55))
    result = analyzed(export)
    assert roles(result) == {"all_gather": 1, "comm_other": 1}
    assert only(result).comm_ns == 170 * US


def test_case_nccl_2196_algorithm_and_protocol_are_never_reported() -> None:
    result = nsysk3.analyze(FIXTURES / "h200" / "tp2.sqlite")
    words = {column for table in result.tables.values() for column in table.columns} | set(RankMetrics.model_fields)
    assert not [word for word in words if "proto" in word or "algo" in word]
    categories = set(result.categories["category"].to_list())
    assert not [name for name in categories if "RING" in name or "LL" in name.split("_")]


def test_case_tracelens_547_custom_collectives_are_communication(analyzed: Any) -> None:
    name = "void sglang::cross_device_reduce_2stage<__nv_bfloat16, 8>(sglang::RankData*, int)"
    result = analyzed(Export().kernel(name, 0, 50).kernel(GEMM, 50, 100))
    rank = only(result)
    assert (rank.comm_ns, rank.compute_ns, rank.allreduce_count) == (50 * US, 50 * US, 1)


def test_case_tracelens_15_what_no_rule_names_is_listed_and_warned_of(analyzed: Any, tmp_path: Path) -> None:
    mine = "void my_team::mystery_collective<8>(int)"
    export = Export().kernel(mine, 0, 60).kernel(GEMM, 60, 100)
    result = analyzed(export)
    assert only(result).unclassified_share == 0.6
    assert result.unclassified.select("name", "count", "total_ns").rows() == [(mine, 1, 60 * US)]
    (warning,) = [note for note in result.document.notes if "no rule names" in note]
    assert "60%" in warning
    assert "mystery_collective" in warning
    # AND a rule of the user's settles it
    rules = tmp_path / "mine.toml"
    rules.write_text('[[rule]]\npattern = "mystery_collective"\ncategory = "MINE"\nrole = "allreduce"\n')
    settled = analyzed(export, rules=rules)
    assert (only(settled).allreduce_count, only(settled).unclassified_share) == (1, 0)
    assert not [note for note in settled.document.notes if "no rule names" in note]


# --- intervals


def test_case_marin_8053_concurrent_streams_are_a_union(analyzed: Any) -> None:
    export = Export().kernel(GEMM, 0, 100, stream=7).kernel(GEMM, 50, 150, stream=8)
    export.kernel(ALLREDUCE, 140, 200, stream=20)
    rank = only(analyzed(export))
    assert (rank.window_ns, rank.compute_ns, rank.comm_ns) == (200 * US, 150 * US, 60 * US)
    assert (rank.idle_ns, rank.overlap_ns, rank.exposed_comm_ns) == (0, 10 * US, 50 * US)


def test_case_hta_162_synchronization_is_not_work(analyzed: Any) -> None:
    export = Export().kernel(ALLREDUCE, 0, 200, stream=20).sync(0, 200).kernel(GEMM, 300, 310)
    export.row("CUPTI_ACTIVITY_KIND_CUDA_EVENT", deviceId=0, contextId=1, streamId=7, globalPid=gpid(1), eventId=4)
    rank = only(analyzed(export))
    assert (rank.overlap_ns, rank.overlap_ratio, rank.idle_ns) == (0, 0, 100 * US)


def test_case_chakra_181_gpu_times_only(analyzed: Any) -> None:
    # The AllReduce is launched while the GEMM runs, and runs after it.
    export = Export().kernel(GEMM, 0, 400).kernel(ALLREDUCE, 400, 500, stream=20, launch=(0, 20))
    rank = only(analyzed(export))
    assert (rank.overlap_ns, rank.comm_ns, rank.window_ns) == (0, 100 * US, 500 * US)


def test_case_nccl_980_a_call_on_the_host_is_not_gpu_time(analyzed: Any) -> None:
    export = Export().nccl("ncclSend", 0, 500, comm=1, size=8, peer=1)
    export.kernel(SENDRECV, 480, 500, launch=(470, 475)).kernel(GEMM, 0, 100)
    assert only(analyzed(export)).comm_ns == 20 * US


def test_case_hta_317_less_than_a_microsecond(analyzed: Any) -> None:
    result = analyzed(Export().kernel(GEMM, 100.7, 100.9).kernel(ALLREDUCE, 100.95, 101))
    rank = only(result)
    assert (rank.window_ns, rank.compute_ns, rank.comm_ns, rank.idle_ns) == (300, 200, 50, 50)


def test_case_quent_473_impossible_times_are_dropped_and_said(analyzed: Any, tmp_path: Path) -> None:
    export = Export().kernel(GEMM, 0, 100).kernel(GEMM, 50, 40).kernel(GEMM, 1, 1).memcpy(30, 20)
    kernels = export.rows["CUPTI_ACTIVITY_KIND_KERNEL"]
    kernels.append({**kernels[0], "end": 0})
    kernels.append({**kernels[0], "start": 0})
    kernels.append({**kernels[0], "start": None})
    export.nvtx("fine", 0, 100).nvtx("backwards", 100, 90)
    result = analyzed(export)
    rank = only(result)
    assert (rank.dropped_rows, rank.kernel_count, rank.compute_ns, rank.copy_ns) == (5, 2, 100 * US, 0)
    assert any("5 GPU rows dropped" in note for note in result.document.notes)
    ranges = read_nvtx(open_report(tmp_path / "case.sqlite", "r"))
    assert ranges["name"].to_list() == ["fine"]


def test_percentiles_lie_between_the_two_nearest_durations(analyzed: Any) -> None:
    export = Export()
    for length in range(1, 11):
        export.kernel(ALLREDUCE, length * 100, length * 100 + length)
    result = analyzed(export)
    rank = only(result)
    assert (rank.allreduce_p50_ns, rank.allreduce_p95_ns, rank.allreduce_p99_ns) == pytest.approx((5500, 9550, 9910))
    for table in (result.roles, result.categories, result.kernels):
        (row,) = table.select("count", "total_ns", "p50_ns", "p95_ns", "p99_ns", "max_ns").rows()
        assert row == pytest.approx((10, 55_000, 5500, 9550, 9910, 10_000))


def test_case_nsys_ai_278_exposed_communication_is_always_shown(analyzed: Any, tmp_path: Path) -> None:
    export = Export().kernel(GEMM, 0, 40).kernel(ALLREDUCE, 0, 100, stream=20)
    rank = only(analyzed(export))
    assert (rank.overlap_ratio, rank.exposed_comm_share) == (0.4, 0.6)
    out = command("analyze", tmp_path / "case.sqlite").out
    assert "60.0" in next(line for line in out.splitlines() if "case:0" in line)


# --- CUDA graphs


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


# --- which processes are in the trace


def test_case_vllm_5132_workers_without_kernels_are_named(analyzed: Any) -> None:
    export = Export().kernel(GEMM, 0, 100, pid=11)
    for rank, pid in enumerate((11, 12, 13, 14)):
        export.gpu(rank, cuda=rank, uuid=f"uuid-{rank}").cuda_device(pid, rank, rank)
    (note,) = [note for note in analyzed(export).document.notes if "trace-fork-before-exec" in note]
    assert "GPUs 1, 2, 3" in note
    assert "(12, 13, 14)" in note


def test_case_sglang_2776_processes_that_launch_but_have_no_kernels_are_named(analyzed: Any) -> None:
    export = Export().kernel(GEMM, 0, 100, pid=11, launch=(0, 1)).launch(0, 5, correlation=9, pid=12)
    export.nccl("ncclAllReduce", 0, 5, pid=13)
    (note,) = [note for note in analyzed(export).document.notes if "trace-fork-before-exec" in note]
    assert "processes 12, 13 launched" in note


def test_case_vllm_5132_a_whole_trace_has_no_such_note() -> None:
    for trace in ("h200/tp2", "h200/pp2", "h200/graph", "sglang-h200/pp2-lw"):
        notes = nsysk3.analyze(FIXTURES / f"{trace}.sqlite").document.notes
        assert not [note for note in notes if "trace-fork-before-exec" in note], trace


def test_case_nemo_rl_4090_raw_captures_are_named_and_the_others_go_on(tmp_path: Path) -> None:
    (tmp_path / "a.qdstrm").write_bytes(b"raw")
    two_ranks().write(tmp_path / "b.sqlite")
    ran = command("analyze", tmp_path, "--out", tmp_path / "out")
    assert ran.code == 2
    (line,) = [line for line in ran.err.splitlines() if "a.qdstrm" in line]
    assert "QdstrmImporter -i a.qdstrm" in line
    assert len(Result.load(tmp_path / "out").document.ranks) == 2


def test_case_nvtx_101_a_call_of_another_thread_does_not_hold_the_launch(analyzed: Any) -> None:
    generic = "ncclDevKernel_Generic"
    export = Export().nccl("ncclAllReduce", 0, 20, tid=1).kernel(generic, 30, 40, launch=(5, 10), tid=2)
    export.nccl("ncclAllGather", 0, 20, tid=3).kernel(generic, 50, 60, launch=(6, 10), tid=3)
    assert roles(analyzed(export)) == {"all_gather": 1, "comm_other": 1}


# --- windows and ratios


def test_case_nsys_ai_614_windows_are_per_device_and_never_longer_than_the_capture(analyzed: Any) -> None:
    second = 1_000_000
    export = Export()
    for device, seconds in ((0, 6), (1, 60)):
        export.kernel(GEMM, 0, second, device=device, pid=1 + device)
        export.kernel(GEMM, (seconds - 1) * second, seconds * second, device=device, pid=1 + device)
    windows = {rank.device_id: rank.window_ns for rank in analyzed(export, window="0:60").document.ranks}
    assert windows == {0: 6_000_000_000, 1: 60_000_000_000}
    assert windows == {rank.device_id: rank.window_ns for rank in analyzed(export).document.ranks}
    past = {rank.device_id: rank.window_ns for rank in analyzed(export, window="-5:600").document.ranks}
    assert past == windows


def test_case_nsys_ai_493_one_window_for_numerator_and_denominator(analyzed: Any, tmp_path: Path) -> None:
    export = Export().kernel(GEMM, 0, 100).kernel(ALLREDUCE, 5, 60, stream=20).kernel(GEMM, 900, 1000)
    export.kernel(GEMM, 0, 1000, device=1, pid=2)
    # A window between the kernels of the first rank: nothing runs in it, so there is nothing to divide by.
    empty, busy = analyzed(export, window="200us:300us").document.ranks
    assert (empty.window_ns, empty.compute_ns, empty.comm_ns, empty.idle_ns) == (100 * US, 0, 0, 100 * US)
    assert (empty.overlap_ratio, empty.allreduce_p50_ns, empty.unclassified_share) == (None, None, None)
    assert (empty.stable, empty.reason) == (False, "no GPU work in the window")
    assert (busy.window_ns, busy.compute_ns) == (100 * US, 100 * US)
    outside, _ = analyzed(export.kernel(GEMM, 2000, 3000, device=1, pid=2), window="2ms:3ms").document.ranks
    assert (outside.window_ns, outside.exposed_comm_share, outside.overlap_ratio) == (0, None, None)
    shown = command("analyze", tmp_path / "case.sqlite", "--window", "2ms:3ms").out
    row = next(line for line in shown.splitlines() if "case:0" in line)
    assert row.split()[:8] == ["0*", "-", "case:0", "0.0", "-", "-", "-", "-"]


def test_case_nsys_ai_418_unknown_is_null_and_said_never_zero(analyzed: Any) -> None:
    result = analyzed(Export().kernel(GEMM, 0, 100))
    rank = only(result)
    assert (rank.allreduce_count, rank.allreduce_p50_ns, rank.overlap_ratio) == (0, None, None)
    assert (rank.gpu_uuid, rank.pp_rank) == (None, None)
    unknown = {name for name, value in rank.model_dump().items() if value is None} - {"reason"}
    assert unknown <= set(result.document.not_measured)


# --- NCCL payloads


def test_case_schema_rows_of_every_process_do_not_multiply_bytes(tmp_path: Path) -> None:
    export = two_ranks()
    export.rows["NVTX_PAYLOAD_SCHEMA_ENTRIES"] *= 2
    calls = nsysk3.load(export.write(tmp_path / "r.sqlite")).nccl_calls
    assert (calls.height, calls["bytes"].sum()) == (8, 8 * 4096)
    assert calls["comm"].unique().to_list() == [77]


def test_case_nsys_ai_98_payloads_are_blobs_in_a_text_column(tmp_path: Path) -> None:
    with_blobs = (
        Export().kernel(ALLREDUCE, 30, 50, launch=(5, 10)).nccl("ncclAllReduce", 0, 20, comm=2**63 + 5, size=64)
    )
    without = Export().kernel(ALLREDUCE, 30, 50, launch=(5, 10))
    without.nccl("ncclAllReduce", 0, 20, comm=1, size=64, blob=False)
    known = nsysk3.load(with_blobs.write(tmp_path / "with.sqlite"))
    assert known.nccl_calls.select("bytes", "comm").rows() == [(64, 2**63 + 5 - 2**64)]  # the same bits, signed
    assert not [note for note in known.notes if "payloads" in note]
    unknown = nsysk3.load(without.write(tmp_path / "without.sqlite"))
    assert unknown.nccl_calls.select("op", "bytes", "comm").rows() == [("ncclAllReduce", None, None)]
    assert any("--include-blobs=true" in note for note in unknown.notes)


def test_case_nsys_ai_mfu_sendrecv_of_several_peers_is_an_all_to_all(analyzed: Any) -> None:
    export = Export()
    for index, peers in enumerate(([1], [0, 1])):
        at = index * 1000
        export.nccl("ncclGroupStart", at, at + 1)
        for number, peer in enumerate(peers):
            export.nccl("ncclSend", at + 10 * number + 2, at + 10 * number + 4, comm=1, size=100, peer=peer)
            export.nccl("ncclRecv", at + 10 * number + 5, at + 10 * number + 7, comm=1, size=100, peer=peer)
        export.nccl("ncclGroupEnd", at + 30, at + 60)
        export.kernel(SENDRECV, at + 100, at + 200, launch=(at + 40, at + 45))
    result = analyzed(export)
    assert roles(result) == {"p2p": 1, "all_to_all": 1}
    assert only(result).p2p_count == 1


def test_case_nsys_ai_mfu_sendrecv_without_evidence_is_not_called_p2p(analyzed: Any) -> None:
    # On a stream with other collectives, and no NCCL range: nothing says that it is pipeline P2P.
    mixed = Export().kernel(SENDRECV, 0, 50, stream=20).kernel(ALLREDUCE, 50, 100, stream=20)
    assert roles(analyzed(mixed)) == {"allreduce": 1, "comm_other": 1}
    # A stream that carries nothing else is what a peer pair has.
    own = Export().kernel(SENDRECV, 0, 50, stream=20).kernel(ALLREDUCE, 50, 100, stream=21)
    assert roles(analyzed(own)) == {"allreduce": 1, "p2p": 1}


def test_case_nccl_228_copy_engine_collectives_are_communication(analyzed: Any) -> None:
    export = Export().nccl("ncclAllGather", 0, 20, comm=1, size=64).memcpy(30, 130, launch=(5, 10))
    export.memcpy(200, 210, launch=(190, 195)).kernel(GEMM, 0, 300)
    rank = only(analyzed(export))
    assert (rank.comm_ns, rank.copy_ns, rank.overlap_ns) == (100 * US, 10 * US, 100 * US)


def test_case_nsys_ai_300_links_of_many_calls_are_exact() -> None:
    """The join of launches and ranges as a sweep gives what holding each against each would."""
    generator = np.random.default_rng(7)
    start = np.sort(generator.integers(0, 10**7, 300)) * 10
    calls = pl.DataFrame(
        {
            "report": 0,
            "tid": generator.integers(1, 3, 300),
            "start": start,
            "end": start + 9,
            "op": "ncclAllReduce",
            "comm": np.arange(300),
            "bytes": 1,
            "peer": pl.Series([None] * 300, dtype=pl.Int64),
        }
    ).unique(["tid", "start"])
    at = np.concatenate([generator.integers(0, 10**8, 500), start[:200] + 4])
    events = pl.DataFrame({"report": 0, "tid": generator.integers(1, 3, 700), "api_start": at})
    linked = link_nccl(events, calls)
    expected = []
    for _, tid, launched in events.iter_rows():
        held = calls.filter((pl.col("tid") == tid) & (pl.col("start") <= launched) & (pl.col("end") >= launched))
        expected.append(held["comm"].item() if held.height else None)
    assert linked["comm"].to_list() == expected
    assert 50 < sum(comm is not None for comm in expected) < 700


# --- damaged files and warnings


@pytest.mark.parametrize("length", [0, 7, 16, 100, 4096, 300_000])
def test_case_truncated_files_are_one_line_and_the_others_go_on(tmp_path: Path, length: int) -> None:
    bad = tmp_path / "bad.sqlite"
    bad.write_bytes((FIXTURES / "h200" / "graph.sqlite").read_bytes()[:length])
    alone = command("analyze", bad)
    assert (alone.code, alone.out, alone.err.count("\n")) == (2, "", 1)
    assert str(bad) in alone.err
    good = two_ranks().write(tmp_path / "good.sqlite")
    both = command("analyze", bad, good, "--out", tmp_path / "out")
    assert both.code == 2
    document = Result.load(tmp_path / "out").document
    assert [problem.path for problem in document.problems] == [str(bad)]
    assert [rank.report for rank in document.ranks] == ["good", "good"]


def test_case_truncated_files_a_wal_beside_is_left_alone_and_said(tmp_path: Path) -> None:
    # A writer that is killed leaves its last rows in a -wal file; read-only cannot merge it, and must not try.
    path = two_ranks().write(tmp_path / "r.sqlite")
    writer = (
        f"import os, sqlite3; c = sqlite3.connect({str(path)!r}); c.execute('pragma journal_mode=wal');"
        "c.execute('delete from CUPTI_ACTIVITY_KIND_KERNEL'); c.commit(); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", writer], check=True)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert "r.sqlite-wal" in before
    result = nsysk3.analyze(path)
    assert any("r.sqlite-wal lies beside the file" in note and "not merged" in note for note in result.document.notes)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_case_nvtx_0x0104_the_warning_in_the_report_is_shown(tmp_path: Path) -> None:
    text = "NVTX payload extension is incompatible. Provided compatibility ID 260 != 259"
    export = Export().kernel(GEMM, 0, 100).diagnostic(text).diagnostic("harmless", severity=1)
    export.diagnostic("Not all NVTX events might have been collected.").diagnostic("No CUDA events collected. Really?")
    ran = command("analyze", export.write(tmp_path / "r.sqlite"))
    notes = [line for line in ran.out.splitlines() if line.startswith("note:")]
    assert [note for note in notes if text in note]
    assert not [note for note in notes if "harmless" in note or "collected" in note]


def test_case_jax_toolbox_926_reports_are_placed_on_utc(tmp_path: Path) -> None:
    for index, epoch in enumerate((EPOCH_NS, EPOCH_NS + 151_000_000)):
        export = Export(epoch_ns=epoch).kernel(GEMM, 0, 300_000)
        export.write(tmp_path / f"node{index}" / "trace.sqlite")
    first, second = nsysk3.analyze(tmp_path).document.ranks
    assert first.window_start_utc_ns == EPOCH_NS + ns(0)
    assert second.window_start_utc_ns - first.window_start_utc_ns == 151_000_000


def test_ranks_whose_capture_was_cut_are_not_counted_in_medians(tmp_path: Path) -> None:
    # GIVEN three nodes that worked for 1000 us, one of which was recorded for 400 us and one for 950 us
    for node, recorded in enumerate((1000, 400, 950)):
        export = Export(duration_us=recorded).kernel(GEMM, 0, 300).kernel(GEMM, recorded - 10, recorded)
        export.write(tmp_path / f"node{node}.sqlite")
    result = nsysk3.analyze(tmp_path)
    ranks = result.document.ranks
    assert [rank.coverage for rank in ranks] == pytest.approx([1, 0.4, 0.95])
    assert [(rank.stable, rank.reason) for rank in ranks] == [
        (True, None), (False, "recorded 40.0 % of the run"), (True, None),
    ]  # fmt: skip
    assert result.document.summary["stable_ranks"] == 2
    assert result.document.summary["median"]["window_ns"] == 975 * US


def test_real_copies_of_one_fixture_are_told_apart(tmp_path: Path) -> None:
    """Two nodes can have files of the same name: both are ranks, neither hides the other."""
    for node in ("node0", "node1"):
        (tmp_path / node).mkdir()
        shutil.copy(FIXTURES / "h200" / "graph.sqlite", tmp_path / node / "trace.sqlite")
    ranks = nsysk3.analyze(tmp_path).document.ranks
    assert [(rank.report, rank.host) for rank in ranks].count(("node0/trace", "node0")) == 2
    assert len(ranks) == 4
