"""Whole runs in other places: four hosts over SSH, a container, and the torch engine under a real nsys."""

from __future__ import annotations

import os
import shutil
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from launch_runs import FAKE_NSYS, REPORT, Run, plan_of, settings
from loopback import free_port
from test_launch_containers import IMAGE, OPTIONS, podman  # noqa: F401 - a fixture

from nsysk3.launch.plan import make_plan
from nsysk3.run.config import Settings

ROOT = Path(__file__).parent.parent


def run(given: Settings, tmp_path: Path, pp: int = 2) -> Run:
    return Run(plan_of(given, f"t-{tmp_path.name[-30:]}", pp=pp), tmp_path / "out")


def test_four_hosts_over_ssh_bring_four_reports(tmp_path: Path) -> None:
    from sshd import hosts

    (tmp_path / "ssh").mkdir()
    with hosts(tmp_path / "ssh") as machines:
        cluster = {
            "hosts": list(machines.names), "launcher": "ssh", "ssh_options": list(machines.options),
            "address": "127.0.0.1",
        }  # fmt: skip
        done = run(settings(tmp_path, "--speed", "4", cluster=cluster, window={"overhead": "off"}), tmp_path, pp=4)
    assert done.error is None
    assert done.json["hosts"] == list(machines.names)
    assert [node["host"] for node in done.json["reports"]] == list(machines.names)
    for name in machines.names:
        folder = done.out / "nodes" / name
        assert (folder / "trace.nsys-rep").read_bytes() == REPORT.read_bytes()
        assert "Capture range ended" in (folder / "server.log").read_text()
        assert "--node-rank" in (folder / "command.txt").read_text()
    assert [clock["host"] for clock in done.json["clocks"]] == list(machines.names)  # skipped before, kept after
    assert all(clock["uncertainty_ns"] >= abs(clock["offset_ns"]) for clock in done.json["clocks"])  # it is one clock


def test_a_server_in_a_container_brings_its_report(podman: Any, tmp_path: Path) -> None:  # noqa: F811
    """All of it inside: server, nsys, importer, export; the image has this machine's programs mounted."""
    target, host = tmp_path / "nsight/target-linux-x64", tmp_path / "nsight/host-linux-x64"
    target.mkdir(parents=True)
    host.mkdir()
    shutil.copy(FAKE_NSYS, target / "nsys")
    (host / "QdstrmImporter").write_text('#!/bin/sh\ncp "$2" "$4"\n')
    (host / "QdstrmImporter").chmod(0o755)
    folders = {"/usr", "/lib", "/lib64", sys.prefix, sys.base_prefix, str(ROOT / "tests"), str(REPORT.parent)}
    mounts = [f"--volume={Path(each).resolve()}:{each}:ro" for each in sorted(folders) if Path(each).exists()]
    given = settings(
        tmp_path,
        container={
            "cli": "podman",
            "image": IMAGE,
            "options": [*OPTIONS, *mounts, f"--volume={target.parent}:/nsight"],
        },
        nsys={"path": "/nsight/target-linux-x64/nsys"},  # which this machine has not, so the host's exports
        env={"FAKE_NSYS_REPORT": str(REPORT), "FAKE_NSYS": "raw", "PATH": os.environ["PATH"]},
        window={"overhead": "off"},
    )
    done = run(given, tmp_path)
    assert done.error is None
    assert done.json["reports"][0]["imported_from_qdstrm"] is True
    assert done.json["reports"][0]["export"] == "nodes/localhost/trace.sqlite"
    assert done.json["reports"][0]["missing_ranks"] == []
    assert podman("ps", "--all", "--quiet") == ""


# --- with a real nsys, without a GPU


@pytest.mark.nsys
def test_the_torch_engine_under_a_real_nsys_without_a_gpu(tmp_path: Path, nsys: Path) -> None:
    pytest.importorskip("torch")
    document = {
        "cluster": {
            "scratch": str(tmp_path), "python": sys.executable, "port": free_port(), "dist_port": free_port(),
        },
        "server": {
            "engine": "torch", "python": sys.executable, "start_timeout_s": 120, "stop_timeout_s": 20,
            "args": ["--device", "cpu", "--scale", "small"],
        },
        "load": {"input_len": 64, "chunk": 32, "concurrency": 2, "requests": 8, "warmup": 2},
        "window": {"forwards": 4, "overhead": "off"},
        "nsys": {"path": str(nsys)},
    }  # fmt: skip
    plan = make_plan(Settings.model_validate(document), pp=2, tp=1, run_id="t-torch-cpu")
    done = Run(plan, tmp_path / "out", analyze=True)
    assert done.error is None
    assert done.json["status"] == "done"
    assert (done.out / "nodes/localhost/trace.nsys-rep").stat().st_size
    assert "no GPU work" in done.notes()
    assert "/stop_profile" not in done.notes()
    assert done.json["measured"]["window"]["closed_by"] == "the end of the load"
    with closing(sqlite3.connect(done.out / done.json["reports"][0]["export"])) as export:
        query = "SELECT COALESCE(text, value) FROM NVTX_EVENTS LEFT JOIN StringIds ON textId = id"
        marks = {str(text).partition(" pp=")[0] for (text,) in export.execute(query)}
    assert {"nsysk3.rank world=0/2", "nsysk3.rank world=1/2"} <= marks  # both processes were followed
