"""Runs that nsysk3 itself launched, captured and measured on two H200s."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import polars as pl
import pytest
from command import run
from conftest import FIXTURES

import nsysk3
from nsysk3.run.manifest import read_manifest

RUNS = FIXTURES / "torch-h200"
SGLANG = FIXTURES / "sglang-h200"
LAUNCHED = [RUNS / "pp1", RUNS / "pp2", SGLANG / "pp1", SGLANG / "pp2"]
SP = [RUNS / f"sp-{kind}" for kind in ("off", "sglang", "nsysk3")]


def analysed(run_dir: Path, **options: str) -> nsysk3.Result:
    return nsysk3.analyze(nsysk3.load([run_dir]), **options)


def test_tensor_parallel_run() -> None:
    result = analysed(RUNS / "pp1")
    ranks = result.rank_metrics
    assert ranks.height == 2
    # embedding, then attention and MLP of 4 layers, in each of the 10 forwards that were asked for
    assert ranks["allreduce_count"].to_list() == [90, 90]
    assert ranks["p2p_count"].to_list() == [0, 0]


def test_pipeline_parallel_run() -> None:
    result = analysed(RUNS / "pp2")
    ranks = result.rank_metrics.sort("pp_rank")
    assert ranks["allreduce_count"].to_list() == [0, 0]
    assert all(count > 0 for count in ranks["p2p_count"])
    assert result.p2p.height
    for row in ranks.iter_rows(named=True):
        # nearly all of it is waiting for the other stage, and a few milliseconds move the activations
        waited = row["wait_upstream_ns"] + row["wait_downstream_ns"]
        assert waited > 20 * row["transfer_ns"] > 0
        assert waited + row["transfer_ns"] + row["unresolved_ns"] == row["p2p_total_ns"]


def test_sglang_with_tensor_parallelism() -> None:
    result = analysed(SGLANG / "pp1", window="prefill")
    ranks = result.rank_metrics
    assert ranks["rank_source"].unique().to_list() == ["manifest"]
    # 8 layers, one of them dense: embedding, attention and MLP in each whole forward
    whole = result.forwards.filter("whole").group_by("rank").len().sort("rank")["len"].to_list()
    assert ranks["allreduce_count"].to_list() == [17 * forwards for forwards in whole]
    assert min(whole) >= 12


def test_sglang_with_a_pipeline() -> None:
    """The capture ends after the last stage's last forward, while the server works on."""
    result = analysed(SGLANG / "pp2")
    ranks = result.rank_metrics.sort("pp_rank")
    assert ranks["allreduce_count"].to_list() == [0, 0]
    whole = result.forwards.filter("whole").group_by("rank").len()["len"]
    assert whole.min() >= 12
    for row in ranks.iter_rows(named=True):
        waited = row["wait_upstream_ns"] + row["wait_downstream_ns"]
        assert waited > 5 * row["transfer_ns"] > 0
        assert waited + row["transfer_ns"] + row["unresolved_ns"] == row["p2p_total_ns"]
    # the residual's head and one bank row of each micro-batch: 8,192 tokens in bf16
    sent = result.p2p.filter(pl.col("kind") == "activation")
    assert sent["bytes"].unique().to_list() == [8192 * 7168 * 2]
    assert sent.height == 34


def test_sequence_parallelism_three_ways() -> None:
    """AllReduce, then reduce-scatter and all-gather of NCCL, then nsysk3's kernels in place of most of them."""
    off, nccl, fused = (analysed(run_dir) for run_dir in SP)
    # One AllReduce a forward is left, of the sampled logits.
    for result in (nccl, fused):
        assert result.rank_metrics["allreduce_count"].max() < off.rank_metrics["allreduce_count"].min() / 5

    def total(result: nsysk3.Result, role: str, column: str) -> float:
        return float(result.roles.filter(pl.col("role") == role)[column].sum())

    assert total(off, "reduce_scatter", "count") == 0
    assert total(fused, "reduce_scatter", "total_ns") < total(nccl, "reduce_scatter", "total_ns")
    assert total(fused, "all_gather", "total_ns") < total(nccl, "all_gather", "total_ns")
    assert total(fused, "fused", "count") > 0 == total(nccl, "fused", "count")
    exposed = [result.rank_metrics["exposed_comm_ns"].mean() for result in (off, nccl, fused)]
    assert exposed[2] < 0.8 * min(exposed[:2])
    (said,) = fused.document.sp
    assert said.requested
    assert said.active


@pytest.mark.parametrize("run_dir", LAUNCHED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_manifest_says_what_was_run_and_what_it_cost(run_dir: Path) -> None:
    manifest = read_manifest(run_dir)
    assert manifest is not None
    assert manifest.status == "done"
    measured = json.loads((run_dir / "run.json").read_text("utf-8"))["measured"]
    assert measured["overhead"]["requests_inside"] >= 3
    assert measured["window"]["closed_ns"] > measured["window"]["opened_ns"]
    assert [feature.active for feature in manifest.features or []] == [True]


def test_the_sweep(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    shutil.copytree(RUNS / "sweep", folder)
    said = run("sweep", "report", folder, "--format", "json")
    assert said.code == 0, said.err
    text = run("sweep", "report", folder).out
    for number in ("38,121.38", "39,168.04", "+2.75%", "19,134 MiB", "26,566 MiB"):
        assert number in text
    assert "No knee in this ladder" in text
    assert "284.91" in text or "busbw" in text


def test_the_sweep_with_sglang() -> None:
    """NVLink leaves a pipeline little to win: the deeper layout is slower by far more than repeats differ."""
    text = run("sweep", "report", SGLANG / "sweep").out
    for number in ("27,127.60", "24,906.06", "-8.19%", "283.23 GB/s"):
        assert number in text
    assert "No knee: no deeper layout gains" in text


def test_nothing_of_the_machine_is_left_in_the_text_files() -> None:
    private = re.compile(r"GPU-[0-9a-f]{8}-|/opt/|/root|/home/")
    for path in [*RUNS.rglob("*"), *SGLANG.rglob("*")]:
        if path.is_file() and path.suffix != ".sqlite":
            assert not private.search(path.read_text("utf-8")), path
