"""Waiting told from transfer across ranks and reports, on real traces and on small ones with a known answer."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import polars as pl
import pytest
from conftest import FIXTURES
from exports import ALLREDUCE, EPOCH_NS, GEMM, SENDRECV, Export
from fixture_results import result_of
from hypothesis import given, settings
from hypothesis import strategies as st

import nsysk3
from nsysk3.analysis.collectives import match_collectives
from nsysk3.analysis.comm_events import SYNCHRONISING
from nsysk3.result import Result

MS = 1_000_000
TIMED = ("NVTX_EVENTS", "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_MEMSET")


def analyze(*paths: Path) -> Result:
    return nsysk3.analyze(list(paths))


# --- real SGLang, PP2 on two H200


@pytest.fixture(scope="module")
def sglang_pp2() -> Result:
    return result_of("sglang-h200/pp2-lw")


def test_every_message_of_real_sglang_is_paired(sglang_pp2: Result) -> None:
    counts = sglang_pp2.p2p.group_by("src_rank", "dst_rank", "kind", "bytes").len().sort("src_rank", "bytes").rows()
    assert counts == [(0, 1, "result", 8, 16), (0, 1, "activation", 117_440_512, 32), (1, 0, "result", 8, 16)]
    assert sglang_pp2.p2p_unmatched.is_empty()
    assert sglang_pp2.p2p["confidence"].unique().to_list() == ["high"]


def test_results_that_stage_0_receives_are_waiting(sglang_pp2: Result) -> None:
    results = sglang_pp2.p2p.filter((pl.col("dst_rank") == 0) & (pl.col("kind") == "result"))
    assert (results["recv_wait_ns"] + results["recv_transfer_ns"]).sum() == pytest.approx(1_777.1 * MS, abs=0.05 * MS)
    assert results["recv_wait_ns"].sum() == pytest.approx(1_774.1 * MS, abs=0.05 * MS)


def test_the_first_activation_is_the_pipeline_filling(sglang_pp2: Result) -> None:
    received = sglang_pp2.p2p.filter(pl.col("dst_rank") == 1)
    assert (received["recv_wait_ns"] + received["recv_transfer_ns"]).sum() == pytest.approx(109.7 * MS, abs=0.05 * MS)
    assert received.sort("recv_start_utc_ns")["recv_wait_ns"][0] == pytest.approx(100.0 * MS, abs=0.05 * MS)
    assert received["recv_wait_ns"].sum() == pytest.approx(100.0 * MS, abs=0.05 * MS)
    words = " ".join(sglang_pp2.document.sentences)
    assert (
        "100.0 ms waiting for stage 0 + 8.3 ms transfer (100.0 ms of it for the first one: the pipeline filling)"
        in words
    )


def test_waiting_beside_compute_is_not_called_communication(sglang_pp2: Result) -> None:
    first = sglang_pp2.document.ranks[0]
    assert first.comm_ns is not None
    assert first.comm_ns / first.window_ns > 0.65  # the trap
    assert first.overlap_wait_ns is not None
    assert first.overlap_transfer_ns is not None
    assert first.overlap_wait_ns > 1_380 * MS
    assert first.overlap_transfer_ns < 1 * MS
    assert first.exposed_transfer_ns is not None
    assert first.exposed_transfer_ns / first.window_ns < 0.01
    words = " ".join(sglang_pp2.document.sentences)
    assert "stage 0: 1,777.1 ms receiving 16 results of 8 bytes = 1,774.1 ms waiting for stage 1 + 3.0 ms" in words
    assert "1,383.7 ms of the waiting ran beside compute and cost nothing" in words


def test_stages_come_from_the_direction_of_activations(sglang_pp2: Result) -> None:
    assert sglang_pp2.pipeline.select("rank", "stage").rows() == [(0, 0), (1, 1)]


# --- the K3-shaped workload on two H200


def test_pp2_transfer_is_a_hundredth_of_the_wait() -> None:
    result = result_of("h200/pp2")
    assert result.p2p.height == 8
    assert result.p2p["bytes"].unique().to_list() == [58_720_256]
    transfer = result.p2p["recv_transfer_ns"]
    assert transfer.median() == pytest.approx(0.19 * MS, rel=0.05)
    words = "stage 1: 161.9 ms receiving 8 activations of 56 MiB = 160.2 ms waiting for stage 0 + 1.7 ms transfer"
    assert words in result.document.sentences


def test_tp2_every_allreduce_is_matched() -> None:
    result = result_of("h200/tp2")
    table = result.collectives
    assert table.height == 512
    assert table["seq"].n_unique() == 256
    assert table["state"].unique().to_list() == ["resolved"]
    assert (table["wait_ns"] + table["transfer_ns"] == table["duration_ns"]).all()
    assert (table["transfer_ns"] >= 0).all()
    assert (table["wait_ns"] >= 0).all()
    # busbw of 56 MiB over two NVLink GPUs: n = 2, so busbw = algbw, and nothing beats the 300 GB/s measured there
    assert 200 < table["busbw_gbs"].median() < 300


@pytest.mark.parametrize("name", ["h200/pp2", "h200/tp2"])
def test_without_nvtx_pairs_and_instances_are_still_found(name: str, tmp_path: Path) -> None:
    source = FIXTURES / f"{name}.sqlite"
    bare = tmp_path / "bare.sqlite"
    shutil.copy(source, bare)
    with closing(sqlite3.connect(bare)) as connection:
        connection.execute("drop table NVTX_EVENTS")
        connection.commit()
    full, less = result_of(name), analyze(bare)
    assert less.p2p.height == full.p2p.height
    assert less.p2p["recv_wait_ns"].to_list() == full.p2p["recv_wait_ns"].to_list()
    assert less.collectives["wait_ns"].to_list() == full.collectives["wait_ns"].to_list()
    confidence = {*less.p2p["confidence"], *less.collectives["confidence"]}
    assert confidence <= {"low", "medium"}  # less is known, and it is said
    assert "-" not in [row.role for row in less.document.matched]


# --- two reports, two clocks


def bend_clock(source: Path, target: Path, offset_ns: int = 0, drift_ppm: float = 0.0) -> Path:
    """A copy of a report whose clock is off."""
    shutil.copy(source, target)
    with closing(sqlite3.connect(target)) as connection:
        connection.execute("update TARGET_INFO_SESSION_START_TIME set utcEpochNs = utcEpochNs + ?", (offset_ns,))
        for table in TIMED if drift_ppm else ():
            for column in ("start", "end"):
                connection.execute(
                    f'update "{table}" set "{column}" = "{column}" + cast("{column}" * ? as integer)',
                    (drift_ppm * 1e-6,),
                )
        connection.commit()
    return target


@pytest.fixture(scope="module")
def two_reports() -> Result:
    return analyze(FIXTURES / "h200" / "pp2-two-reports")


def test_two_sessions_on_one_host_need_no_correction(two_reports: Result) -> None:
    second = two_reports.document.clock.reports[1]
    assert abs(second.offset_ns) < 50_000
    assert second.uncertainty_ns is not None
    assert abs(second.offset_ns) <= second.uncertainty_ns
    edge = two_reports.document.clock.edges[0]
    assert (edge.count, edge.kind) == (8, "ends")
    assert edge.residual_p95_ns < 1_000


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(
    ("offset_ns", "drift_ppm"),
    [(5 * MS, 0.0), (-5 * MS, 0.0), (200 * MS, 0.0), (-200 * MS, 0.0), (3_000 * MS, 0.0), (0, 50.0)],
)
def test_a_clock_that_is_off_is_found(
    two_reports: Result, which: int, offset_ns: int, drift_ppm: float, tmp_path: Path
) -> None:
    source = FIXTURES / "h200" / "pp2-two-reports"
    paths = [shutil.copy(source / f"node{i}.sqlite", tmp_path / f"node{i}.sqlite") for i in (0, 1)]
    bend_clock(source / f"node{which}.sqlite", Path(paths[which]), offset_ns, drift_ppm)
    bent = analyze(tmp_path)
    clock = bent.document.clock.reports[1]
    assert clock.uncertainty_ns is not None
    sign = 1 if which else -1
    # 50 ppm over the third of a second of the capture is 16 us in all
    drifted = drift_ppm * 1e-6 * 0.35e9
    assert abs(clock.offset_ns - sign * offset_ns) <= clock.uncertainty_ns + drifted
    for column in ("recv_wait_ns", "recv_transfer_ns", "send_wait_ns"):
        before, after = two_reports.p2p[column], bent.p2p[column]
        assert (before - after).abs().max() <= clock.uncertainty_ns + drifted  # type: ignore[operator]
    assert bent.rank_metrics["comm_ns"].to_list() == pytest.approx(
        two_reports.rank_metrics["comm_ns"].to_list(), rel=1e-4
    )


def test_a_constant_offset_changes_no_split(two_reports: Result, tmp_path: Path) -> None:
    source = FIXTURES / "h200" / "pp2-two-reports"
    shutil.copy(source / "node0.sqlite", tmp_path / "node0.sqlite")
    bend_clock(source / "node1.sqlite", tmp_path / "node1.sqlite", 123_456_789)
    bent = analyze(tmp_path)
    assert bent.budget.equals(two_reports.budget)
    assert bent.rank_metrics.drop("window_start_utc_ns").equals(two_reports.rank_metrics.drop("window_start_utc_ns"))


# --- small runs with a known answer


def two_ranks(a: list[tuple[float, float]], b: list[tuple[float, float]], **where: int) -> Export:
    """AllReduce kernels of two ranks, with payloads."""
    export = Export()
    for pid, spans in ((1, a), (2, b)):
        export.kernel(GEMM, 0, 1, pid=pid, device=pid - 1)
        for start, end in spans:
            export.nccl("ncclAllReduce", start - 9, start - 7, pid=pid, comm=77, size=1 << 20)
            export.kernel(
                ALLREDUCE, start, end, pid=pid, device=pid - 1, stream=20, launch=(start - 8.5, start - 8), **where
            )
    return export


def test_case_vllm_52777_rank_skew_is_not_network_time(tmp_path: Path) -> None:
    result = analyze(two_ranks([(10, 210)], [(190, 210)]).write(tmp_path / "a.sqlite"))
    rows = result.collectives.sort("rank").select("wait_ns", "transfer_ns", "min_duration_ns", "last_rank").rows()
    assert rows == [(180_000, 20_000, 20_000, 1), (0, 20_000, 20_000, 1)]


def test_case_nccl_1025_a_send_that_waits_for_its_peer(tmp_path: Path) -> None:
    export = Export()
    for pid, op, start in ((1, "ncclSend", 10), (2, "ncclRecv", 910)):
        export.kernel(GEMM, 0, 1, pid=pid, device=pid - 1)
        for step in range(4):
            at = start + step * 2_000
            export.nccl("ncclGroupStart", at - 9, at - 8.9, pid=pid)
            export.nccl(op, at - 8.8, at - 8.6, pid=pid, comm=5, size=2 << 20, peer=2 - pid)
            export.nccl("ncclGroupEnd", at - 8.5, at - 7, pid=pid)
            export.kernel(
                SENDRECV, at, 1_010 + step * 2_000, pid=pid, device=pid - 1, stream=30, launch=(at - 8, at - 7.5)
            )
    result = analyze(export.write(tmp_path / "a.sqlite"))
    splits = result.p2p.select("send_wait_ns", "send_transfer_ns", "recv_wait_ns", "recv_transfer_ns").unique().rows()
    assert splits == [(900_000, 100_000, 0, 100_000)]
    assert result.rank_metrics["wait_downstream_ns"].to_list() == [3_600_000, 0]


def test_case_tracelens_22_ends_that_do_not_meet_are_a_finding(tmp_path: Path) -> None:
    together = analyze(two_ranks([(10, 210)], [(20, 215)]).write(tmp_path / "good.sqlite"))
    apart = analyze(two_ranks([(10, 210)], [(20, 270)]).write(tmp_path / "bad.sqlite"))
    assert not [note for note in together.document.notes if "end together" in note]
    assert [note for note in apart.document.notes if "1 of 1 allreduce instances" in note and "60 us apart" in note]


def test_one_rank_alone_gives_no_split_and_says_why(tmp_path: Path) -> None:
    export = Export().kernel(GEMM, 0, 100).kernel(ALLREDUCE, 100, 200, stream=20)
    result = analyze(export.write(tmp_path / "a.sqlite"))
    rank = result.document.ranks[0]
    assert (rank.wait_collective_ns, rank.transfer_ns, rank.exposed_wait_ns) == (None, None, None)
    assert "wait_collective_ns" in result.document.not_measured
    assert result.collectives.select("state", "wait_ns", "transfer_ns", "min_duration_ns").rows() == [
        ("unmatched", None, None, 100_000)
    ]
    unresolved = result.budget.filter(pl.col("bucket") == "exposed_unresolved")["ns"].to_list()
    assert unresolved == [100_000]


def test_a_lost_kernel_costs_one_instance_and_no_more(tmp_path: Path) -> None:
    spans = [(10 + i * 500 + (i % 3) * 20, 210 + i * 500) for i in range(40)]
    whole = analyze(two_ranks(spans, spans).write(tmp_path / "whole.sqlite"))
    lost = analyze(two_ranks(spans, spans[:13] + spans[14:]).write(tmp_path / "lost.sqlite"))
    assert whole.collectives.filter(pl.col("state") == "resolved").height == 80
    assert lost.collectives.filter(pl.col("state") == "resolved").height == 78
    assert lost.collectives.filter(pl.col("state") == "unmatched")["rank"].to_list() == [0]


def test_windows_cut_differently_on_each_rank(tmp_path: Path) -> None:
    spans = [(10 + i * 500, 210 + i * 500 + (i % 7) * 30) for i in range(60)]
    cut = analyze(two_ranks(spans[9:50], spans[:57]).write(tmp_path / "cut.sqlite"))
    assert cut.collectives.filter(pl.col("state") == "resolved").height == 2 * 41
    assert (cut.collectives.filter(pl.col("state") == "resolved")["wait_ns"] == 0).all()


def test_cut_windows_on_two_clocks(tmp_path: Path) -> None:
    spans = [(10 + i * 5_000 + (i * i % 17) * 100, 1_510 + i * 5_000 + (i * i % 17) * 110) for i in range(80)]
    for node, (pid, mine, off) in enumerate(((1, spans[:70], 0), (2, spans[12:], 40 * MS))):
        export = Export(epoch_ns=EPOCH_NS + off).kernel(GEMM, 0, 1, pid=pid)
        for start, end in mine:
            export.nccl("ncclAllReduce", start - 9, start - 7, pid=pid, comm=77, size=1 << 20)
            export.kernel(ALLREDUCE, start, end, pid=pid, stream=20, launch=(start - 8.5, start - 8))
        export.write(tmp_path / f"node{node}.sqlite")
    result = analyze(tmp_path)
    clock = result.document.clock.reports[1]
    assert clock.offset_ns == 40 * MS
    assert result.collectives.filter(pl.col("state") != "unmatched").height == 2 * 58


def test_reports_that_nothing_ties_keep_utc_and_say_so(tmp_path: Path) -> None:
    for node in (0, 1):
        Export().kernel(GEMM, 0, 100 + node).kernel(ALLREDUCE, 100 + node, 300).write(tmp_path / f"node{node}.sqlite")
    result = analyze(tmp_path)
    assert [entry.uncertainty_ns for entry in result.document.clock.reports] == [None, None]
    assert [note for note in result.document.notes if "it keeps UTC" in note]
    assert result.collectives["state"].unique().to_list() == ["unmatched"]


def test_a_straggler_is_named(tmp_path: Path) -> None:
    late = [(60 + i * 500, 210 + i * 500) for i in range(20)]
    early = [(10 + i * 500, 210 + i * 500) for i in range(20)]
    result = analyze(two_ranks(early, late).write(tmp_path / "a.sqlite"))
    worst = result.stragglers.filter("straggler").select("rank", "last_share", "late_p50_ns", "caused_wait_ns").rows()
    assert worst == [(1, 1.0, 50_000.0, 1_000_000)]
    assert any("rank 1 arrives last in 100%" in sentence for sentence in result.document.sentences)


def test_reduce_scatter_and_gather_bytes_are_of_the_whole_operation(tmp_path: Path) -> None:
    export = Export()
    for pid in (1, 2):
        export.kernel(GEMM, 0, 1, pid=pid, device=pid - 1)
        export.nccl("ncclAllGather", 2, 4, pid=pid, comm=9, size=1 << 20)
        export.kernel("ncclDevKernel_AllGather_RING_LL(x)", 10, 110, pid=pid, device=pid - 1, launch=(3, 3.5))
    table = analyze(export.write(tmp_path / "a.sqlite")).collectives
    assert table["bytes"].to_list() == [2 << 20, 2 << 20]
    assert table["busbw_gbs"].to_list() == pytest.approx([(2 << 20) / 100_000 / 2] * 2)


# --- laws


Span = st.tuples(st.integers(0, 300), st.integers(30, 200))


@settings(max_examples=8)  # two analyses each, whose time depends on the number of instances hardly at all
@given(st.lists(st.lists(Span, min_size=2, max_size=2), min_size=1, max_size=24), st.randoms(use_true_random=False))
def test_wait_and_transfer_add_up_whatever_the_arrivals(
    tmp_path_factory: pytest.TempPathFactory, instances: list[list[tuple[int, int]]], shuffle: st.DataObject
) -> None:
    spans: tuple[list[tuple[float, float]], list[tuple[float, float]]] = ([], [])
    for index, arrivals in enumerate(instances):
        base = 20 + index * 1_000
        last = max(late for late, _ in arrivals)
        for rank, (late, length) in enumerate(arrivals):
            spans[rank].append((base + late, base + last + min(length for _, length in arrivals) + rank))
    folder = tmp_path_factory.mktemp("law")
    export = two_ranks(*spans)
    result = analyze(export.write(folder / "a.sqlite"))
    table = result.collectives
    assert (table["wait_ns"] + table["transfer_ns"] == table["duration_ns"]).all()
    assert (table["wait_ns"] >= 0).all()
    assert (table["transfer_ns"] >= 0).all()
    truth = [max(a, b) - mine for (a, _), (b, _) in instances for mine in (a, b)]
    assert table.sort("seq", "rank")["wait_ns"].to_list() == [late * 1_000 for late in truth]
    for rows in export.rows.values():
        shuffle.shuffle(rows)  # type: ignore[attr-defined]
    again = analyze(export.write(folder / "b.sqlite"))
    assert again.collectives.equals(table)


def test_one_report_or_one_per_process_is_the_same(tmp_path: Path) -> None:
    source = FIXTURES / "h200" / "tp2.sqlite"
    whole = result_of("h200/tp2")
    with closing(sqlite3.connect(f"file:{source}?mode=ro&immutable=1", uri=True)) as connection:
        pids = [
            pid for (pid,) in connection.execute("select distinct globalPid from CUPTI_ACTIVITY_KIND_KERNEL order by 1")
        ]
    for index, pid in enumerate(pids):
        part = tmp_path / f"node{index}.sqlite"
        shutil.copy(source, part)
        with closing(sqlite3.connect(part)) as connection:
            for table in TIMED:
                column = "globalPid" if "KERNEL" in table or "MEMSET" in table else "globalTid"
                connection.execute(f'delete from "{table}" where "{column}" / 16777216 <> ? / 16777216', (pid,))
            connection.commit()
    split = analyze(tmp_path)
    uncertainty = split.document.clock.reports[1].uncertainty_ns
    assert uncertainty is not None
    assert abs(split.document.clock.reports[1].offset_ns) <= uncertainty
    assert split.collectives.height == whole.collectives.height
    gap = (split.collectives["wait_ns"] - whole.collectives["wait_ns"]).abs().max()
    assert isinstance(gap, int)
    assert gap <= uncertainty
    same = ["compute_ns", "comm_ns", "exposed_comm_ns", "allreduce_count", "allreduce_total_ns", "window_ns", "idle_ns"]
    assert split.rank_metrics.select(same).equals(whole.rank_metrics.select(same))


def test_collectives_that_synchronise_are_the_ones_matched() -> None:
    # Broadcast and Reduce have a root that need not wait: their ends say nothing.
    assert not {"broadcast", "comm_other", "p2p"} & set(SYNCHRONISING)
    assert match_collectives.__doc__


def test_small_messages_bound_the_clock_by_causality(tmp_path: Path) -> None:
    # Tokens go both ways between two hosts 20 ms apart; nothing is large enough for its ends to coincide.
    for node, off in ((0, 0), (1, 20 * MS)):
        export = Export(epoch_ns=EPOCH_NS + off).kernel(GEMM, 0, 1)
        for step in range(12):
            at = 100 + step * 1_000 + step * step
            for op, begin in (("ncclSend", at + node * 400), ("ncclRecv", at + (1 - node) * 400)):
                start, end = (begin, begin + 5) if op == "ncclSend" else (begin - 50, begin + 60)
                export.nccl("ncclGroupStart", start - 9, start - 8.9)
                export.nccl(op, start - 8.8, start - 8.6, comm=5, size=8, peer=1 - node)
                export.nccl("ncclGroupEnd", start - 8.5, start - 7)
                export.kernel(SENDRECV, start, end, stream=30, launch=(start - 8, start - 7.5))
        export.write(tmp_path / f"node{node}.sqlite")
    result = analyze(tmp_path)
    edge, clock = result.document.clock.edges[0], result.document.clock.reports[1]
    assert edge.kind == "causality"
    assert clock.uncertainty_ns is not None
    assert abs(clock.offset_ns - 20 * MS) <= clock.uncertainty_ns < 200_000
    assert result.p2p["kind"].unique().to_list() == ["result"]
    assert result.p2p.height == 24
    assert (result.p2p["recv_end_utc_ns"] + clock.uncertainty_ns >= result.p2p["send_start_utc_ns"]).all()
