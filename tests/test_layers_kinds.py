"""What AllReduces and AllGathers were for."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from exports import ALLREDUCE, GEMM, SENDRECV, Export
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_runs import PP2, SGLANG_TP2, TP2, attributed, real, without_nvtx

from nsysk3.analysis.allreduce_kinds import collective_kinds, moe_shares

ALLGATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<(unsigned long)4096>)"
FLASH = "void flash::FlashAttnFwdSm90<int>(int)"
EXPERTS = "fused_moe_kernel"
ATTENTION_BYTES, MOE_BYTES = 117_440_512, 176_160_768


def _counts(events: pl.DataFrame, *by: str) -> dict[tuple[object, ...], int]:
    kinds = collective_kinds(events).filter(pl.col("collective_kind").is_not_null() & (pl.col("rank") == 0))
    columns = [pl.col("collective_kind").cast(pl.String), *[pl.col(name).cast(pl.String) for name in by]]
    return {tuple(row[:-1]): row[-1] for row in kinds.group_by(columns).len().iter_rows()}


def _kinds(export: Export, folder: Path) -> list[tuple[str | None, str | None]]:
    """Kind and source of each collective, by time."""
    events = collective_kinds(attributed(export.write(folder / "a.sqlite")).events).sort("start")
    chosen = events.filter(pl.col("collective_kind").is_not_null())
    return [tuple(row) for row in chosen.select(pl.col("collective_kind", "kind_source").cast(pl.String)).iter_rows()]


def test_sglangs_kinds_by_range() -> None:
    assert _counts(real(SGLANG_TP2).events, "kind_source") == {
        ("embedding", "range"): 17,
        ("attention", "range"): 17 * 8,
        ("moe", "range"): 17 * 7,
        ("dense_mlp", "range"): 17,
        ("logits", "range"): 17,
    }


def test_kinds_agree_with_the_size_of_the_messages() -> None:
    prefill = real(SGLANG_TP2).events.filter((pl.col("forward") < 16).fill_null(True))
    moe = collective_kinds(prefill).filter(pl.col("collective_kind") == "moe")
    others = collective_kinds(prefill).filter(pl.col("collective_kind").is_in(["attention", "dense_mlp", "embedding"]))
    assert set(moe["nccl_bytes"]) == {MOE_BYTES}
    assert set(others["nccl_bytes"]) == {ATTENTION_BYTES}


def test_neighbours_tell_the_same_as_ranges(tmp_path: Path) -> None:
    with_nvtx = collective_kinds(real(SGLANG_TP2).events).sort("rank", "start", "stream")
    without = collective_kinds(attributed(without_nvtx(SGLANG_TP2, tmp_path)).events).sort("rank", "start", "stream")
    assert with_nvtx["collective_kind"].equals(without["collective_kind"], null_equal=True)
    assert set(without["kind_source"].cast(pl.String).drop_nulls()) == {"neighbours"}


def test_the_two_of_a_layer_are_told_by_position_where_nothing_else_does(tmp_path: Path) -> None:
    found = attributed(without_nvtx(TP2, tmp_path))
    assert _counts(found.events, "kind_source") == {("attention", "position"): 128, ("dense_mlp", "position"): 128}
    assert _counts(real(TP2).events, "kind_source") == {("attention", "range"): 128, ("dense_mlp", "range"): 128}


def test_bytes_tell_experts_from_attention() -> None:
    nameless = real(SGLANG_TP2).events.with_columns(
        pl.lit("GEMM", pl.Categorical).alias("category"),
        *[pl.lit(None, kind).alias(name) for name, kind in (("layer", pl.Int32), ("module", pl.Categorical))],
        pl.lit(None, pl.Int32).alias("forward"),
    )
    found = _counts(nameless, "kind_source")
    assert found[("moe", "bytes")] == 17 * 7
    assert found[("attention", "bytes")] == 17 * 7  # the dense layer's is followed by one of its own size
    assert found[("unknown", None)] == 17 * 3 + 17


def test_moe_share_is_moe_time_over_classified_time() -> None:
    kinds = collective_kinds(real(SGLANG_TP2).events)
    ns = pl.col("end") - pl.col("start")
    reduces = kinds.filter((pl.col("role") == "allreduce") & (pl.col("rank") == 0))
    moe = reduces.filter(pl.col("collective_kind") == "moe").select(ns.sum()).item()
    share = moe_shares(kinds).row(0, named=True)
    assert share["moe_share"] == pytest.approx(moe / reduces.select(ns.sum()).item())
    assert share["classified_ns"] == share["allreduce_ns"]
    assert 0.4 < share["moe_share"] < 0.6


def test_moe_share_is_null_where_nothing_is_classified(tmp_path: Path) -> None:
    export = Export().kernel(ALLREDUCE, 0, 10, launch=(0, 1))
    assert _kinds(export, tmp_path) == [("unknown", None)]
    shares = moe_shares(collective_kinds(attributed(tmp_path / "a.sqlite").events))
    assert shares["moe_share"].to_list() == [None]
    assert shares["classified_ns"].to_list() == [0]


def test_a_run_without_allreduce_has_no_kinds() -> None:
    assert collective_kinds(real(PP2).events)["collective_kind"].null_count() == real(PP2).events.height
    assert moe_shares(collective_kinds(real(PP2).events)).is_empty()


def _decoder(export: Export, number: int, at: float, *, experts: bool, deferred: bool) -> None:
    """A layer as SGLang 0.5.23 marks it, 20 us long: a dense layer's AllReduce comes at the start of the next one."""
    path = f"model.layers.{number}"
    export.nvtx(f"{{'Module': '{path}'}}", at, at + 19)
    export.nvtx(f"{{'Module': '{path}.self_attn'}}", at + 3, at + 8).nvtx(
        f"{{'Module': '{path}.mlp'}}", at + 11, at + 18
    )
    if deferred:
        export.kernel(ALLREDUCE, 1000 + at, 1001 + at, launch=(at + 1, at + 1.5))
    export.kernel(FLASH, 1004 + at, 1006 + at, launch=(at + 4, at + 4.5))
    export.kernel(ALLREDUCE, 1009 + at, 1010 + at, launch=(at + 9, at + 9.5))
    if experts:
        export.nvtx(f"{{'Module': '{path}.mlp.experts'}}", at + 12, at + 14)
        export.kernel(EXPERTS, 1012 + at, 1014 + at, launch=(at + 12.5, at + 13))
        export.kernel(ALLREDUCE, 1015 + at, 1016 + at, launch=(at + 15, at + 15.5))
    else:
        export.kernel(GEMM, 1012 + at, 1014 + at, launch=(at + 12.5, at + 13))


def test_the_dense_layers_allreduce_is_launched_by_the_next_layer(tmp_path: Path) -> None:
    export = Export().nvtx("{'Module': 'model'}", 0, 70)
    _decoder(export, 0, 1, experts=False, deferred=False)
    _decoder(export, 1, 21, experts=True, deferred=True)
    _decoder(export, 2, 41, experts=True, deferred=False)
    assert _kinds(export, tmp_path) == [
        ("attention", "range"),
        ("dense_mlp", "range"),
        ("attention", "range"),
        ("moe", "range"),
        ("attention", "range"),
        ("moe", "range"),
    ]


def test_gathers_after_a_receive_beside_the_compute_stream_are_the_boundarys(tmp_path: Path) -> None:
    export = Export()
    for forward in range(2):
        at = 100 * forward
        for tensor in range(2):
            export.nccl("ncclRecv", at + 10 * tensor, at + 10 * tensor + 2, comm=1, size=10**8, peer=0)
            start = 1000 + at + 10 * tensor
            export.kernel(SENDRECV, start, start + 4, launch=(at + 10 * tensor + 1, at + 10 * tensor + 2), stream=98)
            export.kernel(
                ALLGATHER, start + 5, start + 9, launch=(at + 10 * tensor + 4, at + 10 * tensor + 5), stream=94
            )
        export.kernel(FLASH, 1030 + at, 1070 + at, launch=(at + 30, at + 31))
        export.kernel(ALLGATHER, 1071 + at, 1075 + at, launch=(at + 40, at + 41))
        export.kernel(
            "void at::native::reduce_kernel<512, ArgMaxOps<float>>(int)",
            1076 + at,
            1077 + at,
            launch=(at + 42, at + 43),
        )
    gather = [("pp_gather", "neighbours")] * 2 + [("logits", "neighbours")]
    assert _kinds(export, tmp_path) == gather * 2


@settings(max_examples=10)
@given(st.integers(0, 2**32))
def test_the_order_of_rows_changes_nothing(seed: int) -> None:
    events = real(SGLANG_TP2).events.filter(pl.col("kind") == "kernel")
    key = ["rank", "start", "end", "stream", "collective_kind", "kind_source"]
    mixed = collective_kinds(events.sample(fraction=1, shuffle=True, seed=seed)).select(key).sort(key)
    assert mixed.equals(collective_kinds(events).select(key).sort(key))
