"""Ranks of several reports: by the manifest of a run, and apart where hosts have one name or processes one GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import run as command
from exports import GEMM, Export
from identities import gpus

import nsysk3
from nsysk3.trace.load import load


def test_a_run_directory_is_read_by_its_manifest(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    for node in (0, 1):
        gpus(11, 12, host="container").write(run_dir / "nodes" / f"node{node}" / "trace.sqlite")
    # node1 was started as the first node
    ranks = [
        {"world_rank": first + device, "host": host, "device": device, "pp": first // 2, "tp": device}
        for host, first in (("node0", 2), ("node1", 0))
        for device in (0, 1)
    ]
    manifest = {
        "run_id": "x", "topology": {"pp": 2, "tp": 2}, "ranks": ranks, "a field of tomorrow": {"kept": True},
    }  # fmt: skip
    (run_dir / "run.json").write_text(json.dumps(manifest))
    (run_dir / "analysis").mkdir()
    gpus(99).write(run_dir / "analysis" / "not_a_trace.sqlite")
    run = load(run_dir)
    assert run.run_dir == run_dir
    columns = ("world_rank", "pp_rank", "tp_rank", "host", "device_id", "rank_source")
    assert run.ranks.select(*columns).rows() == [
        (0, 0, 0, "node1", 0, "manifest"),
        (1, 0, 1, "node1", 1, "manifest"),
        (2, 1, 0, "node0", 0, "manifest"),
        (3, 1, 1, "node0", 1, "manifest"),
    ]
    document = nsysk3.analyze(run).document
    assert [report.path for report in document.reports] == ["nodes/node0/trace.sqlite", "nodes/node1/trace.sqlite"]


def test_a_simulated_run_says_so_everywhere(tmp_path: Path) -> None:
    gpus(11).write(tmp_path / "nodes" / "node0" / "trace.sqlite")
    (tmp_path / "run.json").write_text(json.dumps({"simulated": "nsysk3 simulate, seed 7"}))
    ran = command("analyze", tmp_path)
    assert ran.code == 0
    assert "simulated: nsysk3 simulate, seed 7" in ran.out
    assert json.loads((tmp_path / "analysis" / "result.json").read_text())["simulated"] == "nsysk3 simulate, seed 7"


BAD_MANIFESTS = {
    "{": "not a readable JSON manifest",
    "[]": "run.json",
    '{"ranks": [{"host": "a"}]}': "ranks.0.world_rank",
    '{"topology": {"pp": 0, "tp": 1}}': "topology.pp",
    '{"hosts": 3}': "hosts",
    '{"ranks": [{"world_rank": -1, "host": "a", "device": 0}]}': "ranks.0.world_rank",
    '{"ranks": [{"world_rank": 1, "host": "a", "device": 0}, {"world_rank": 1, "host": "a", "device": 1}]}': (
        "ranks: rank 1 listed more than once"
    ),
}


@pytest.mark.parametrize("text", BAD_MANIFESTS)
def test_a_bad_manifest_is_one_line_that_names_it(tmp_path: Path, text: str) -> None:
    gpus(11).write(tmp_path / "nodes" / "node0" / "trace.sqlite")
    (tmp_path / "run.json").write_text(text)
    ran = command("analyze", tmp_path)
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert str(tmp_path / "run.json") in ran.err
    assert BAD_MANIFESTS[text] in ran.err


def test_nodes_that_all_say_one_host_name_stay_apart(tmp_path: Path) -> None:
    # GIVEN containers that all report the host name "modal", the same pids and the same GPU ordinals
    for name in ("first", "second"):
        export = gpus(11, 12, host="modal")
        for device in (0, 1):
            export.gpu(device, cuda=device, uuid=f"{name}-{device}")
        export.write(tmp_path / f"{name}.sqlite")
    result = nsysk3.analyze(tmp_path)
    assert [(rank.report, rank.host, rank.device_id) for rank in result.document.ranks] == [
        ("first", "modal", 0), ("first", "modal", 1), ("second", "modal", 0), ("second", "modal", 1),
    ]  # fmt: skip
    assert result.nsys_device_metrics.height == 4
    assert result.nsys_device_metrics["processes"].to_list() == [1] * 4


def test_nodes_that_all_say_one_host_name_and_no_uuid_are_not_one_gpu(tmp_path: Path) -> None:
    for name in ("first", "second"):
        gpus(11, host="modal").write(tmp_path / f"{name}.sqlite")
    devices = nsysk3.analyze(tmp_path).nsys_device_metrics
    assert devices["processes"].to_list() == [1, 1]


def test_one_gpu_shared_by_two_processes_is_two_ranks_and_one_device(tmp_path: Path) -> None:
    export = Export().kernel(GEMM, 0, 100, pid=11).kernel(GEMM, 50, 200, pid=12).gpu(0, cuda=0, uuid="only")
    result = nsysk3.analyze(export.write(tmp_path / "r.sqlite"))
    assert [rank.pid for rank in result.document.ranks] == [11, 12]
    assert result.nsys_device_metrics.select("processes", "world_ranks").rows() == [(2, "0 1")]
