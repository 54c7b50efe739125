"""What people ran into, named after where it was reported: what is busy when, in which window, and shares of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from case_results import US, only
from command import run as command
from exports import ALLREDUCE, EPOCH_NS, GEMM, SENDRECV, Export, gpid, ns

import nsysk3

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


def test_case_jax_toolbox_926_reports_are_placed_on_utc(tmp_path: Path) -> None:
    for index, epoch in enumerate((EPOCH_NS, EPOCH_NS + 151_000_000)):
        export = Export(epoch_ns=epoch).kernel(GEMM, 0, 300_000)
        export.write(tmp_path / f"node{index}" / "trace.sqlite")
    first, second = nsysk3.analyze(tmp_path).document.ranks
    assert first.window_start_utc_ns == EPOCH_NS + ns(0)
    assert second.window_start_utc_ns - first.window_start_utc_ns == 151_000_000
