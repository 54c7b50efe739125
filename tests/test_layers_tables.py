"""Tables by layer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from exports import ALLREDUCE, GEMM, SENDRECV, Export
from growth import growth
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_runs import PP2, SGLANG_PP2, SGLANG_TP2, TP2, attributed, kimi, real

from nsysk3.analysis.layer_summary import layer_rows, layer_summary, outlier_sentences
from nsysk3.analysis.layers import (
    LAYER_SCHEMA,
    attributed_shares,
    layer_categories,
    layer_kinds,
    layer_table,
    unattributed_reasons,
)
from nsysk3.analysis.windows import capture_windows
from nsysk3.classify import COMM_ROLES

ALL = [TP2, PP2, SGLANG_TP2, SGLANG_PP2]
NAMES = ["tp2", "pp2", "sglang tp2", "sglang pp2"]


def _length(intervals: list[tuple[int, int]]) -> int:
    """Length of a union, one nanosecond range after the other."""
    total, reach = 0, None
    for start, end in sorted(intervals):
        low = start if reach is None else max(start, reach)
        total += max(end - low, 0)
        reach = end if reach is None else max(reach, end)
    return total


@pytest.mark.parametrize("path", ALL, ids=NAMES)
def test_one_row_a_rank_forward_and_layer(path: Path) -> None:
    table = layer_table(real(path).events, real(path).ranks)
    key = ["rank", "forward", "layer"]
    assert table.schema == LAYER_SCHEMA
    assert table.select(key).is_unique().all()
    assert table.equals(table.sort(key))
    seen = real(path).kernels.filter(pl.col("layer").is_not_null()).select(key).unique()
    assert table.height == seen.height


def test_the_numbers_of_a_layer_worked_out_by_hand() -> None:
    events = real(SGLANG_TP2).events
    mine = events.filter((pl.col("rank") == 1) & (pl.col("forward") == 3) & (pl.col("layer") == 5))
    kernels = mine.filter(pl.col("kind") == "kernel")
    row = layer_table(events, real(SGLANG_TP2).ranks).filter(
        (pl.col("rank") == 1) & (pl.col("forward") == 3) & (pl.col("layer") == 5)
    ).row(0, named=True)  # fmt: skip
    compute = kernels.filter(pl.col("role") == "compute").select("start", "end").rows()
    reduces = kernels.filter(pl.col("role") == "allreduce").select("start", "end").rows()
    assert row["kernel_count"] == kernels.height
    assert row["compute_ns"] == _length(compute)
    assert row["allreduce_ns"] == sum(end - start for start, end in reduces)
    busy = events.filter((pl.col("rank") == 1) & (pl.col("role") == "compute")).select("start", "end").rows()
    assert row["exposed_comm_ns"] == _length(reduces + busy) - _length(busy)
    assert (row["start_utc_ns"], row["end_utc_ns"]) == (kernels["start"].min(), kernels["end"].max())
    assert row["allreduce_wait_ns"] is None
    assert row["layer_kind"] == "KDA+MoE"


def test_kinds_of_layers() -> None:
    kinds = {layer: kind for rank, layer, kind in layer_kinds(real(SGLANG_TP2).events).iter_rows() if rank == 0}
    assert kinds == {
        0: "KDA+dense",
        **dict.fromkeys((1, 2, 4, 5, 6), "KDA+MoE"),
        **dict.fromkeys((3, 7), "MLA+MoE"),
    }
    assert set(layer_kinds(real(TP2).events)["layer_kind"]) == {"dense"}


def test_a_layer_that_shows_nothing_has_no_kind(tmp_path: Path) -> None:
    export = Export().nvtx("model.layers.0", 0, 10).kernel(GEMM, 20, 30, launch=(1, 2))
    assert layer_kinds(attributed(export.write(tmp_path / "a.sqlite")).events)["layer_kind"].to_list() == [None]


def test_wait_and_transfer_add_up_to_the_allreduce_time(tmp_path: Path) -> None:
    export = Export().nvtx("nsysk3.forward 0", 0, 40)
    for layer in range(3):
        export.nvtx(f"model.layers.{layer}", 10 * layer, 10 * layer + 9)
        for place in range(2):
            at = 100 + 20 * layer + 8 * place
            export.kernel(ALLREDUCE, at, at + 6, launch=(10 * layer + place + 1, 10 * layer + place + 1.5))
    found = attributed(export.write(tmp_path / "a.sqlite"))
    split = found.events.sort("start").with_columns(
        pl.Series("wait_ns", [1000, 2000, 3000, None, None, 500], pl.Int64),
        pl.Series("wait_state", ["wait_collective"] * 3 + ["unresolved"] * 3),
    )
    table = layer_table(split, found.ranks)
    parts = ["allreduce_ns", "allreduce_wait_ns", "allreduce_transfer_ns", "allreduce_unresolved_ns"]
    assert table.select(parts).rows() == [
        (12_000, 3000, 9000, 0),
        (12_000, 3000, 3000, 6000),  # one of the two without a partner
        (12_000, 0, 5500, 6500),  # below the clock's uncertainty
    ]


def test_work_of_another_layer_hides_communication(tmp_path: Path) -> None:
    export = Export().nvtx("nsysk3.forward 0", 0, 40).nvtx("model.layers.0", 0, 9).nvtx("model.layers.1", 10, 19)
    export.kernel(ALLREDUCE, 100, 110, launch=(1, 2)).kernel(GEMM, 104, 107, launch=(11, 12), stream=8)
    found = attributed(export.write(tmp_path / "a.sqlite"))
    assert layer_table(found.events, found.ranks)["exposed_comm_ns"].to_list() == [7000, 0]


def test_shares_count_the_boundary_apart(tmp_path: Path) -> None:
    export = Export().nvtx("model.layers.0", 0, 9)
    export.kernel(GEMM, 100, 130, launch=(1, 2)).kernel(SENDRECV, 130, 190, launch=(12, 13), stream=9)
    export.kernel(GEMM, 200, 210, launch=(20, 21))
    found = attributed(export.write(tmp_path / "a.sqlite"))
    share = attributed_shares(found.events).row(0, named=True)
    assert (share["kernel_ns"], share["attributed_ns"], share["boundary_ns"]) == (100_000, 30_000, 60_000)
    assert (share["attributed_share"], share["boundary_share"]) == (0.3, 0.6)
    assert unattributed_reasons(found.events).select("reason", "ns").rows() == [
        ("pipeline boundary", 60_000),
        ("outside every layer range", 10_000),
    ]


@pytest.mark.parametrize("path", ALL, ids=NAMES)
def test_reasons_make_up_what_is_not_attributed(path: Path) -> None:
    shares = attributed_shares(real(path).events)
    lost = unattributed_reasons(real(path).events).group_by("rank").agg(pl.col("ns").sum()).sort("rank")
    assert (shares["kernel_ns"] - shares["attributed_ns"]).to_list() == lost["ns"].to_list()


def test_categories_of_a_layer_add_up_to_its_kernels() -> None:
    table = layer_categories(real(SGLANG_TP2).events).group_by("rank").agg(pl.col("ns").sum()).sort("rank")
    assert table["ns"].to_list() == attributed_shares(real(SGLANG_TP2).events)["attributed_ns"].to_list()


def _summary(path: Path) -> pl.DataFrame:
    found = real(path)
    layers = layer_table(found.events, found.ranks)
    return layer_summary(layers, capture_windows(found.events), found.forwards())


def test_a_summary_is_over_whole_forwards() -> None:
    summary = _summary(SGLANG_TP2)
    assert set(summary["forwards"]) == {16}
    spent = layer_table(real(SGLANG_TP2).events, real(SGLANG_TP2).ranks).filter(
        (pl.col("rank") == 0) & (pl.col("layer") == 3) & (pl.col("forward") < 16)
    )
    spans = (spent["end_utc_ns"] - spent["start_utc_ns"]).to_numpy()
    row = summary.filter((pl.col("rank") == 0) & (pl.col("layer") == 3)).row(0, named=True)
    assert row["p50_ns"] == np.median(spans)
    assert row["p95_ns"] == pytest.approx(np.quantile(spans, 0.95))
    window = real(SGLANG_TP2).kernels.filter(pl.col("rank") == 0).select(pl.col("end").max() - pl.col("start").min())
    assert row["window_share"] == pytest.approx(spans.sum() / window.item())
    assert row["allreduce_wait_ns"] is None


@pytest.mark.parametrize("path", ALL, ids=NAMES)
def test_layers_of_a_healthy_run_do_not_stand_out_and_shares_stay_below_one(path: Path) -> None:
    summary = _summary(path)
    assert not summary["outlier"].any()
    assert summary.group_by("rank").agg(pl.col("window_share").sum())["window_share"].max() <= 1  # type: ignore[operator]
    rows = layer_rows(summary)
    assert rows["layer"].to_list() == sorted(set(summary["layer"]))
    assert outlier_sentences(rows) == []


def test_a_slow_layer_is_named() -> None:
    truth, ranks = kimi(1, forwards=3, layers=24)
    slow = (pl.col("layer") == 17) & (pl.col("role") == "compute")
    stretched = truth.with_columns(
        pl.when(slow).then(pl.col("start") + (pl.col("end") - pl.col("start")) * 3).otherwise("end").alias("end")
    )
    for events, expected in ((truth, []), (stretched, [17])):
        table = layer_table(events, ranks)
        rows = layer_rows(layer_summary(table, capture_windows(events)))
        assert rows.filter(pl.col("outlier_ranks") > 0)["layer"].to_list() == expected
        assert [sentence.split(" (")[0] for sentence in outlier_sentences(rows)] == [f"layer {n}" for n in expected]


def test_fused_kernels_are_a_class_of_their_own() -> None:
    events = real(TP2).events
    norm = pl.col("category").cast(pl.String) == "NORM"
    role = pl.when(norm).then(pl.lit("fused", events.schema["role"])).otherwise("role")
    fused = events.with_columns(role.alias("role"))
    before, after = (layer_table(each, real(TP2).ranks) for each in (events, fused))
    assert (after["fused_ns"] > 0).all()
    assert (before["compute_ns"] - after["compute_ns"]).to_list() == after["fused_ns"].to_list()
    assert after["exposed_comm_ns"].equals(before["exposed_comm_ns"])


def test_no_layers_make_an_empty_table() -> None:
    events = real(TP2).events.with_columns(pl.lit(None, pl.Int32).alias("layer"))
    table = layer_table(events, real(TP2).ranks)
    assert table.is_empty()
    assert layer_rows(layer_summary(table, capture_windows(events))).is_empty()


@st.composite
def _events(draw: st.DrawFn) -> pl.DataFrame:
    row = st.tuples(
        st.integers(0, 1), st.integers(0, 2), st.integers(0, 2), st.integers(0, 60), st.integers(0, 30),
        st.sampled_from(["compute", "fused", "allreduce", "p2p"]),
    )  # fmt: skip
    rows = draw(st.lists(row, min_size=1, max_size=25))
    base = real(TP2).events.head(len(rows))
    columns = [list(column) for column in zip(*rows, strict=True)]
    start = np.array(columns[3]) + draw(st.integers(-(10**17), 10**17))
    values = {"rank": columns[0], "forward": columns[1], "layer": columns[2], "start": start, "end": start + columns[4]}
    return base.with_columns(
        *[pl.Series(name, value).cast(base.schema[name]) for name, value in values.items()],
        pl.Series("role", columns[5]).cast(base.schema["role"]),
        pl.lit("kernel", base.schema["kind"]).alias("kind"),
    )


@given(_events(), st.integers(0, 2**32))
def test_one_sweep_agrees_with_layer_by_layer(events: pl.DataFrame, seed: int) -> None:
    ranks = real(TP2).ranks
    table = layer_table(events, ranks)
    rows = events.select("rank", "forward", "layer", pl.col("role").cast(pl.String), "start", "end").rows()
    for row in table.iter_rows(named=True):
        rank = [each for each in rows if each[0] == row["rank"]]
        mine = [each for each in rank if each[1:3] == (row["forward"], row["layer"])]
        compute, fused, reduced = (
            [each[4:] for each in mine if each[3] == role] for role in ("compute", "fused", "allreduce")
        )
        comm = [each[4:] for each in mine if each[3] in COMM_ROLES]
        busy = [each[4:] for each in rank if each[3] in ("compute", "fused")]
        assert row["compute_ns"] == _length(compute)
        assert row["fused_ns"] == _length(fused)
        assert row["allreduce_ns"] == sum(end - start for start, end in reduced)
        assert row["exposed_comm_ns"] == _length(comm + busy) - _length(busy)
    assert layer_table(events.sample(fraction=1, shuffle=True, seed=seed), ranks).equals(table)


@settings(max_examples=5)
@given(st.integers(-(10**15), 10**15))
def test_time_moves_only_start_and_end(shift: int) -> None:
    events, ranks = real(PP2).events, real(PP2).ranks
    moved = layer_table(events.with_columns(pl.col("start") + shift, pl.col("end") + shift), ranks)
    back = moved.with_columns(pl.col("start_utc_ns") - shift, pl.col("end_utc_ns") - shift)
    assert back.equals(layer_table(events, ranks))


def test_a_long_run_is_one_sweep() -> None:
    events, ranks = kimi(8, forwards=50)
    assert layer_table(events, ranks).height == 93 * 50

    def tabulate(forwards: int) -> None:
        layer_table(events.filter(pl.col("forward") < forwards), ranks)

    assert growth(tabulate, 5) < 30  # 10 in one sweep, 100 where each forward looks at all
