"""Layers, forwards and kinds of a simulated Kimi-K3 on many GPUs, against what really happened in it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from layer_runs import Layered, attributed

from nsysk3.analysis.allreduce_kinds import collective_kinds
from nsysk3.simulate.presets import preset
from nsysk3.simulate.run import simulate

# Ranks of one tensor-parallel group run the same kernels: a quarter of the 32 of PP1, still on more than one host, is
# told apart no more easily.
SMALLER: dict[str, dict[str, Any]] = {"kimi-k3-6000d-pp1": {"tp": 8, "nodes": 2}, "kimi-k3-6000d-pp8": {}}


@pytest.fixture(scope="module", params=SMALLER)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = replace(preset(request.param), **SMALLER[request.param])
    return simulate(config, tmp_path_factory.mktemp("simulated") / request.param).directory


def _with_truth(found: Layered, run: Path) -> pl.DataFrame:
    truth = pl.read_parquet(run / "truth.parquet").filter("recorded")
    named = found.ranks.select("rank", "world_rank")
    events = collective_kinds(found.kernels).join(named, on="rank")
    wanted = truth.select(
        pl.col("rank").cast(pl.Int64).alias("world_rank"),
        "correlation",
        pl.col("layer").alias("true_layer"),
        pl.col("forward").alias("true_forward"),
        pl.col("purpose").cast(pl.String),
    )
    return events.join(wanted, on=["world_rank", "correlation"], validate="1:1")


def _check(rows: pl.DataFrame, least: float) -> None:
    ns = pl.col("end") - pl.col("start")
    in_layer = rows.filter(pl.col("true_layer") >= 0)
    right = (pl.col("layer") == pl.col("true_layer")).fill_null(False)
    assert in_layer.select(ns.filter(right).sum() / ns.sum()).item() >= least
    wrong = rows.filter(pl.col("layer").is_not_null() & (pl.col("layer") != pl.col("true_layer")))
    assert wrong.select(ns.sum()).item() <= (1 - least) * rows.select(ns.sum()).item()
    collectives = rows.filter(pl.col("role").is_in(["allreduce", "all_gather"]))
    assert collectives.filter(pl.col("collective_kind").cast(pl.String) != pl.col("purpose")).is_empty()


def test_with_sglangs_markers_everything_is_where_it_was(run: Path) -> None:
    _check(_with_truth(attributed(run), run), least=1)


def test_without_markers_the_period_tells_nearly_as_much(run: Path) -> None:
    for trace in run.rglob("trace.sqlite"):
        with closing(sqlite3.connect(trace)) as connection:
            connection.text_factory = bytes
            connection.execute(
                "delete from NVTX_EVENTS where eventType = 59 and coalesce(text, "
                "(select value from StringIds where id = textId), '') not like 'nccl%'"
            )
            connection.commit()
    found = attributed(run)
    rows = _with_truth(found, run)
    _check(rows, least=0.999)
    told = rows.filter(pl.col("forward").is_not_null())
    assert (told["forward"] == told["true_forward"]).all()
    forwards = found.forwards()
    # The capture lost the last layers of the last forward, on most ranks.
    assert set(forwards.filter(~pl.col("whole"))["forward"]) == {2}
    assert found.found.fits["reason"].null_count() == found.ranks.height
