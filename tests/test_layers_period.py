"""Layers and forwards without NVTX."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from functools import cache
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_runs import (
    PP2,
    SGLANG_PP2,
    SGLANG_TP2,
    TP2,
    agreement,
    attributed,
    kimi,
    kimi_stages,
    real,
    without_layers,
    without_nvtx,
)
from layered import attribute_by_period

from nsysk3.analysis.attribution import NO_PERIOD, OUTSIDE_PERIOD
from nsysk3.analysis.layers import attributed_shares
from nsysk3.analysis.period import MIN_CONFIDENCE


@pytest.mark.parametrize(
    ("path", "stages", "forwards", "layers", "least"),
    [
        (TP2, [0, 0], 8, [16, 16], 1.0),
        (PP2, [0, 1], 8, [10, 6], 1.0),
        (SGLANG_TP2, [0, 0], 17, [8, 8], 0.998),
        (SGLANG_PP2, [0, 1], 16, [4, 4], 1.0),
    ],
    ids=["tp2", "pp2", "sglang tp2", "sglang pp2"],
)
def test_a_copy_without_nvtx_agrees_with_the_original(
    path: Path, stages: list[int], forwards: int, layers: list[int], least: float, tmp_path: Path
) -> None:
    found = attributed(without_nvtx(path, tmp_path), stages=stages)
    fits = found.found.fits.sort("rank")
    assert fits["forwards"].to_list() == [forwards, forwards]
    assert fits["layers"].to_list() == layers
    assert fits["confidence"].min() > 0.98  # type: ignore[operator]
    assert fits["reason"].null_count() == 2
    assert agreement(real(path).kernels, found.kernels) >= least
    assert set(found.kernels.filter(pl.col("layer").is_not_null())["layer_source"].cast(pl.String)) == {"period"}
    assert any("period" in note for note in found.found.notes)


def test_kernels_outside_the_period_say_so_and_the_share_is_that_of_nvtx(tmp_path: Path) -> None:
    found = attributed(without_nvtx(SGLANG_TP2, tmp_path))
    lost = found.kernels.filter(pl.col("layer").is_null())
    assert set(lost["reason"].cast(pl.String)) == {OUTSIDE_PERIOD}
    with_nvtx, without = (attributed_shares(each.events)["attributed_share"] for each in (real(SGLANG_TP2), found))
    assert (with_nvtx - without).abs().max() < 0.002  # type: ignore[operator]


def test_forward_markers_stay_where_only_layers_are_missing(tmp_path: Path) -> None:
    copy = tmp_path / "a.sqlite"
    shutil.copy(TP2, copy)
    copy.chmod(0o644)
    with closing(sqlite3.connect(copy)) as connection:
        connection.execute("delete from NVTX_EVENTS where text like 'model.layers.%'")
        connection.commit()
    found = attributed(copy)
    assert agreement(real(TP2).kernels, found.kernels) == 1
    forwards = found.forwards()
    assert set(forwards["source"].cast(pl.String)) == {"marker"}
    assert set(forwards["kernels"]) == {177}


def test_without_stages_layers_count_from_0_and_a_note_says_so(tmp_path: Path) -> None:
    found = attributed(without_nvtx(SGLANG_PP2, tmp_path))
    assert found.found.fits["first_layer"].to_list() == [None, None]
    assert found.kernels.group_by("rank").agg(pl.col("layer").max()).sort("rank")["layer"].to_list() == [3, 3]
    assert any("stages are unknown" in note for note in found.found.notes)


@pytest.mark.parametrize("stages", [1, 2, 4, 8, 16, 31])
def test_all_layers_of_a_kimi_k3_in_every_pipeline(stages: int) -> None:
    truth, ranks = kimi(stages, forwards=3)
    found, fits = attribute_by_period(without_layers(truth), ranks)
    fits = fits.sort("rank")
    spans = kimi_stages(stages)
    assert fits["layers"].to_list() == [last - first for first, last in spans]
    assert fits["first_layer"].to_list() == [first for first, _ in spans]
    assert set(fits["forwards"]) == {3}
    assert agreement(truth, found) > 0.999


@cache
def _blank(path: Path) -> pl.DataFrame:
    return without_layers(real(path).kernels)


def _guess(events: pl.DataFrame, path: Path) -> tuple[pl.DataFrame, pl.DataFrame]:
    ranks = real(path).ranks.with_columns(pl.col("rank").cast(pl.Int64).alias("pp_rank"))
    return attribute_by_period(events, ranks if path in (PP2, SGLANG_PP2) else real(path).ranks)


def _right_and_wrong(found: pl.DataFrame, path: Path) -> tuple[float, float]:
    """Shares of the kernel time in layers that is in its own layer, and in another one."""
    key = ["rank", "start", "end", "stream"]
    truth = real(path).kernels.filter(pl.col("layer").is_not_null()).select(*key, pl.col("layer").alias("true"))
    both = found.join(truth, on=key)
    ns = pl.col("end") - pl.col("start")
    same = pl.col("layer") == pl.col("true")
    shares = both.select(
        (ns.filter(each).sum() / ns.sum()).alias(name) for name, each in {"a": same, "b": ~same}.items()
    )
    return shares.row(0)


@pytest.mark.parametrize("path", [TP2, PP2, SGLANG_TP2, SGLANG_PP2], ids=["tp2", "pp2", "sglang tp2", "sglang pp2"])
def test_launches_are_not_needed(path: Path) -> None:
    found, _ = _guess(_blank(path).with_columns(pl.lit(None, pl.Int64).alias("api_start")), path)
    right, wrong = _right_and_wrong(found, path)
    assert right > 0.6
    assert wrong == 0


@pytest.mark.parametrize("path", [TP2, PP2, SGLANG_TP2, SGLANG_PP2], ids=["tp2", "pp2", "sglang tp2", "sglang pp2"])
@pytest.mark.parametrize(("low", "high"), [(0.3, 1.0), (0.22, 0.81), (0.0, 0.47)])
def test_a_cut_window(path: Path, low: float, high: float) -> None:
    events = _blank(path)
    first, last = events["start"].min(), events["end"].max()
    span = last - first  # type: ignore[operator]
    cut = events.filter((pl.col("start") >= first + low * span) & (pl.col("end") <= first + high * span))
    found, _ = _guess(cut, path)
    right, wrong = _right_and_wrong(found, path)
    assert right > 0.98
    assert wrong == 0


def _with_noise(events: pl.DataFrame, share: float, seed: int) -> pl.DataFrame:
    """Short kernels of other names, launched at random places, that belong to no layer."""
    random = np.random.default_rng(seed)
    extra = events.filter(pl.Series(random.random(events.height) < share)).with_columns(
        (pl.int_range(pl.len()) % 3 + 100_000).cast(pl.UInt32).alias("name_id"),
        (pl.col("api_start") + 1).alias("api_start"),
        (pl.col("end") + 1).alias("start"),
        (pl.col("end") + 2).alias("end"),
        pl.lit("ELEMENTWISE", pl.Categorical).alias("category"),
        pl.lit("compute", events.schema["role"]).alias("role"),
    )
    return pl.concat([events, extra])


@pytest.mark.parametrize("path", [TP2, PP2, SGLANG_TP2, SGLANG_PP2], ids=["tp2", "pp2", "sglang tp2", "sglang pp2"])
@pytest.mark.parametrize("seed", range(3))
def test_noise_kernels(path: Path, seed: int) -> None:
    found, fits = _guess(_with_noise(_blank(path), 0.01, seed), path)
    assert fits["reason"].null_count() == 2
    assert agreement(real(path).kernels, found) > 0.98


def test_a_sequence_without_a_period_is_refused() -> None:
    events = _blank(TP2)
    random = np.random.default_rng(1)
    scrambled = events.with_columns(
        pl.Series("name_id", random.integers(0, 12, events.height).astype(np.uint32)),
        pl.lit("GEMM", pl.Categorical).alias("category"),
        pl.lit("compute", events.schema["role"]).alias("role"),
    )
    found, fits = _guess(scrambled, TP2)
    assert found["layer"].null_count() == found.height
    assert set(found["reason"].cast(pl.String)) == {NO_PERIOD}
    assert fits["reason"].null_count() == 0


def test_one_forward_shows_no_period() -> None:
    one = _blank(TP2).filter(pl.Series((real(TP2).kernels["forward"] == 3).fill_null(False)))
    found, fits = _guess(one, TP2)
    assert found["layer"].null_count() == found.height
    assert fits["layers"].null_count() == fits.height


def test_below_the_confidence_nothing_is_reported() -> None:
    events = _blank(SGLANG_TP2)
    # Every other forward from here on computes something else.
    busy = events.with_columns(
        pl.when(pl.col("category").cast(pl.String) == "SAMPLING")
        .then(pl.col("end") + 10**9)
        .otherwise("end")
        .alias("end")
    )
    found, fits = _guess(busy, SGLANG_TP2)
    assert fits["confidence"].max() < MIN_CONFIDENCE  # type: ignore[operator]
    assert found["layer"].null_count() == found.height
    assert all("of kernel time repeats" in reason for reason in fits["reason"])


def test_no_kernels_at_all() -> None:
    found, fits = _guess(_blank(TP2).clear(), TP2)
    assert found.height == fits.height == 0


@settings(max_examples=15)
@given(st.integers(0, 2**32), st.integers(-(10**15), 10**15))
def test_the_order_of_rows_and_the_time_change_nothing(seed: int, shift: int) -> None:
    events = _blank(SGLANG_PP2)
    moved = events.with_columns(pl.col(name) + shift for name in ("start", "end", "api_start", "api_end"))
    found, fits = _guess(moved.sample(fraction=1, shuffle=True, seed=seed), SGLANG_PP2)
    usual, usual_fits = _guess(events, SGLANG_PP2)
    columns = ["rank", "start", "end", "stream", "layer", "forward"]
    back = found.with_columns(pl.col("start") - shift, pl.col("end") - shift).select(columns).sort(columns)
    assert back.equals(usual.select(columns).sort(columns))
    assert fits.sort("rank").equals(usual_fits.sort("rank"))


@settings(max_examples=10)
@given(st.data())
def test_removing_nvtx_agrees_or_abstains(data: st.DataObject) -> None:
    """Whatever part of the run is seen, a layer that is reported is nearly always the right one."""
    path = data.draw(st.sampled_from([TP2, PP2, SGLANG_TP2, SGLANG_PP2]))
    events = _blank(path)
    first, last = events["start"].min(), events["end"].max()
    low = data.draw(st.floats(0, 0.6))
    high = data.draw(st.floats(low + 0.35, 1))
    span = last - first  # type: ignore[operator]
    cut = events.filter((pl.col("start") >= first + low * span) & (pl.col("end") <= first + high * span))
    found, _ = _guess(cut, path)
    assert _right_and_wrong(found, path)[1] < 0.02
