"""Runs that nsysk3 itself launched, captured and measured on two H200s."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from command import run
from conftest import FIXTURES

import nsysk3
from nsysk3.run.manifest import read_manifest

RUNS = FIXTURES / "torch-h200"


def analysed(name: str, tmp_path: Path) -> nsysk3.Result:
    folder = tmp_path / name
    shutil.copytree(RUNS / name, folder)
    return nsysk3.analyze(nsysk3.load([folder]))


def test_tensor_parallel_run(tmp_path: Path) -> None:
    result = analysed("pp1", tmp_path)
    ranks = result.rank_metrics
    assert ranks.height == 2
    # embedding, then attention and MLP of 4 layers, in each of the 10 forwards that were asked for
    assert ranks["allreduce_count"].to_list() == [90, 90]
    assert ranks["p2p_count"].to_list() == [0, 0]


def test_pipeline_parallel_run(tmp_path: Path) -> None:
    result = analysed("pp2", tmp_path)
    ranks = result.rank_metrics.sort("pp_rank")
    assert ranks["allreduce_count"].to_list() == [0, 0]
    assert all(count > 0 for count in ranks["p2p_count"])
    assert result.p2p.height
    for row in ranks.iter_rows(named=True):
        # nearly all of it is waiting for the other stage, and a few milliseconds move the activations
        waited = row["wait_upstream_ns"] + row["wait_downstream_ns"]
        assert waited > 20 * row["transfer_ns"] > 0
        assert waited + row["transfer_ns"] + row["unresolved_ns"] == row["p2p_total_ns"]


@pytest.mark.parametrize("name", ["pp1", "pp2"])
def test_the_manifest_says_what_was_run_and_what_it_cost(name: str) -> None:
    manifest = read_manifest(RUNS / name)
    assert manifest is not None
    assert manifest.status == "done"
    measured = json.loads((RUNS / name / "run.json").read_text("utf-8"))["measured"]
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


def test_nothing_of_the_machine_is_left_in_the_text_files() -> None:
    private = re.compile(r"GPU-[0-9a-f]{8}-|/opt/|/root|/home/")
    for path in RUNS.rglob("*"):
        if path.is_file() and path.suffix != ".sqlite":
            assert not private.search(path.read_text("utf-8")), path
