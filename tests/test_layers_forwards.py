"""Forwards on the GPU, and the windows that hold whole ones."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from exports import EPOCH_NS, GEMM, SENDRECV, Export, ns
from layer_runs import GRAPH, PP2, SGLANG_PP2, SGLANG_TP2, TP2, Layered, attributed, real, without_nvtx

from nsysk3.analysis.forward_windows import prefill_windows, steady_windows
from nsysk3.analysis.windows import capture_windows


def _windows(found: Layered) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    captures = capture_windows(found.events)
    forwards = found.forwards()
    return (
        captures,
        prefill_windows(forwards, captures, found.ranks, found.found.marked),
        steady_windows(forwards, captures),
    )


def _utc(microseconds: float) -> int:
    return EPOCH_NS + ns(microseconds)


def test_tp2_has_eight_whole_forwards_a_rank() -> None:
    forwards = real(TP2).forwards()
    assert forwards.select("rank", "forward").rows() == [(rank, forward) for rank in (0, 1) for forward in range(8)]
    assert forwards["whole"].all()
    assert forwards["reason"].null_count() == forwards.height
    assert set(forwards["source"].cast(pl.String)) == {"marker"}
    assert set(forwards["kernels"]) == {177}
    assert forwards["stage"].to_list() == [0] * 16
    assert forwards["tokens"].null_count() == 16


def test_the_forward_whose_kernels_the_capture_lost_is_not_whole() -> None:
    forwards = real(PP2).forwards()
    assert forwards.filter(~pl.col("whole")).select("rank", "forward", "reason").rows() == [
        (1, 7, "4 of 6 layers missing")
    ]


def test_sglangs_decode_step_is_no_prefill_forward() -> None:
    forwards = real(SGLANG_TP2).forwards().filter(pl.col("rank") == 0)
    assert forwards["whole"].to_list() == [True] * 16 + [False]
    assert forwards["tokens"].to_list() == [8192] * 16 + [1]
    assert forwards["reason"][16] == "another kind of pass: 1 tokens, usually 8192"
    assert set(forwards["source"].cast(pl.String)) == {"model range"}


def test_without_nvtx_the_decode_step_is_told_by_its_kernels(tmp_path: Path) -> None:
    forwards = attributed(without_nvtx(SGLANG_TP2, tmp_path)).forwards()
    assert forwards.filter(~pl.col("whole")).select("rank", "forward", "reason").rows() == [
        (rank, 16, "another kind of pass: other kernels than usual") for rank in (0, 1)
    ]
    assert forwards["tokens"].null_count() == forwards.height
    assert forwards["launched_utc_ns"].null_count() == forwards.height
    assert set(forwards["source"].cast(pl.String)) == {"period"}


def test_forwards_of_graph_replays_are_told_by_their_markers() -> None:
    forwards = real(GRAPH).forwards()
    assert forwards.group_by("rank").len().sort("rank").rows() == [(0, 8), (1, 8)]
    assert set(forwards["kernels"]) == {44}


def test_forwards_follow_each_other_on_the_gpu() -> None:
    for path in (TP2, PP2, SGLANG_TP2, SGLANG_PP2):
        forwards = real(path).forwards()
        gap = forwards.select((pl.col("start_utc_ns") - pl.col("end_utc_ns").shift(1)).over("rank")).to_series()
        assert gap.drop_nulls().min() >= 0  # type: ignore[operator]


def test_a_pipeline_receive_is_no_part_of_the_forward(tmp_path: Path) -> None:
    export = Export().nvtx("nsysk3.forward 0", 0, 50).nvtx("model.layers.3", 10, 40)
    export.nccl("ncclRecv", 2, 4, comm=1, size=100, peer=0)
    export.kernel(SENDRECV, 100, 200, launch=(3, 3.5), stream=9).kernel(GEMM, 200, 220, launch=(12, 13))
    forward = attributed(export.write(tmp_path / "a.sqlite")).forwards()
    assert forward.select("start_utc_ns", "end_utc_ns", "kernels").rows() == [(_utc(200), _utc(220), 2)]


def test_a_range_open_at_the_end_of_the_capture_makes_no_whole_forward(tmp_path: Path) -> None:
    export = Export(duration_us=10_000)
    for number, (start, end) in enumerate([(0, 20), (20, 40), (40, None)]):
        export.nvtx(f"nsysk3.forward {number}", start, end).nvtx("model.layers.0", start + 1, start + 9)
        export.kernel(GEMM, 100 + start, 110 + start, launch=(start + 2, start + 3))
    forwards = attributed(export.write(tmp_path / "a.sqlite")).forwards()
    assert forwards["whole"].to_list() == [True, True, False]
    assert forwards["reason"][2] == "its range was cut by the capture"


def test_the_prefill_window_is_the_marked_range_cut_to_whole_forwards(tmp_path: Path) -> None:
    export = Export().nvtx("nsysk3.prefill_window", 18, 62)
    for number in range(4):
        start = 20 * number
        export.nvtx(f"nsysk3.forward {number}", start, start + 15).nvtx("model.layers.0", start + 1, start + 9)
        export.kernel(GEMM, 100 + start, 110 + start, launch=(start + 2, start + 3))
    captures, prefill, steady = _windows(attributed(export.write(tmp_path / "a.sqlite")))
    assert captures.rows() == [(0, _utc(100), _utc(170))]
    assert prefill.rows() == [(0, _utc(120), _utc(170), None)]
    assert steady.rows() == [(0, _utc(120), _utc(170), None)]


def test_the_steady_window_leaves_out_fill_and_what_is_not_whole_on_every_rank() -> None:
    found = real(PP2)
    forwards = found.forwards()
    _, prefill, steady = _windows(found)
    expected = forwards.filter(pl.col("forward").is_between(1, 6)).group_by("rank").agg(
        pl.min("start_utc_ns"), pl.max("end_utc_ns")
    )  # fmt: skip
    assert steady.drop("reason").rows() == expected.sort("rank").rows()
    assert (steady["start"] > prefill["start"]).all()
    _, prefill, steady = _windows(real(SGLANG_TP2))
    decode = real(SGLANG_TP2).forwards().filter(pl.col("forward") == 16)
    assert (prefill["end"] < decode["start_utc_ns"]).all()
    assert (steady["end"] == prefill["end"]).all()


def test_without_whole_forwards_the_window_is_the_capture_and_says_so(tmp_path: Path) -> None:
    export = Export().kernel(GEMM, 0, 10, launch=(0, 1)).kernel(GEMM, 20, 30, launch=(2, 3))
    captures, prefill, steady = _windows(attributed(export.write(tmp_path / "a.sqlite")))
    for window in (prefill, steady):
        assert window.drop("reason").equals(captures)
        assert "no whole forward" in window["reason"][0]


@pytest.mark.parametrize("path", [TP2, PP2, SGLANG_TP2, SGLANG_PP2], ids=["tp2", "pp2", "sglang tp2", "sglang pp2"])
def test_windows_lie_inside_each_other(path: Path) -> None:
    captures, prefill, steady = _windows(real(path))
    for outer, inner in ((captures, prefill), (prefill, steady)):
        assert (outer["start"] <= inner["start"]).all()
        assert (inner["end"] <= outer["end"]).all()
        assert (inner["start"] < inner["end"]).all()
