"""Sweeps of a server that speaks SGLang's endpoints, from the first check to the report."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import sshd
from command import run
from conftest import FIXTURES
from loopback import SERVER
from sweep_places import REQUESTS, Place, busy, keys, place

# Columns of results.csv and the field of the JSON line that each is.
COLUMNS = {
    "input_tps": "input_throughput", "output_tps": "output_throughput", "ttft_p50_ms": "median_ttft_ms",
    "ttft_p95_ms": "p95_ttft_ms", "e2e_p95_ms": "p95_e2e_latency_ms", "duration_s": "duration",
    "completed": "completed",
}  # fmt: skip


@pytest.fixture
def here(tmp_path: Path) -> Place:
    return place(tmp_path)


def test_whole_sweep(here: Place) -> None:
    # The links were measured before.
    (here.path / "out").mkdir()
    (here.path / "out" / "nccl_tp4.log").touch()
    shutil.copy(FIXTURES / "kimi-k3-6000d" / "nccl.csv", here.path / "out")
    ran = here.sweep(
        "--pp", "1,2", "--concurrency", "1,3", "--repeats", 2, "--layout-args", "PP2=--pp-max-micro-batch-size 1"
    )
    assert ran.code == 0, ran.err
    assert "40.85 GB/s" in ran.out
    rows = here.rows()
    assert keys(rows) == [(pp, c, r) for pp in (1, 2) for c in (1, 3) for r in (1, 2)]
    out = here.path / "out"
    names = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    for layout in ("pp1_tp4_ep4", "pp2_tp2_ep2"):
        for cell in (f"{layout}_c{c}_r{r}" for c in (1, 3) for r in (1, 2)):
            assert {f"raw/{cell}.jsonl", f"bench/{cell}.txt"} <= names
        for name in ("server.log", "command.txt"):
            assert f"service/{layout}/nodes/localhost/{name}" in names
        assert {f"metadata/{layout}_service.json", f"metadata/{layout}_server_info.json"} <= names
    assert {"results.csv", "summary.csv", "metadata/sweep.json"} <= names
    for row in rows:
        record = json.loads((out / row["raw"]).read_text())
        for column, field in COLUMNS.items():
            assert float(row[column]) == pytest.approx(record[field], abs=1e-6)
        assert (int(row["completed"]), row["errors"], row["status"]) == (REQUESTS, "0", "done")
        assert record["max_concurrency"] == int(row["concurrency"])
    for point in here.rows(name="summary.csv"):
        mine = [row for row in rows if (row["pp"], row["concurrency"]) == (point["pp"], point["concurrency"])]
        rates = [float(row["input_tps"]) for row in mine]
        assert float(point["input_tps"]) == pytest.approx(statistics.median(rates))
        assert float(point["input_tps_spread"]) == pytest.approx(
            (max(rates) - min(rates)) / statistics.median(rates), abs=1e-5
        )
        assert float(point["ttft_p50_ms"]) == pytest.approx(
            statistics.median(float(row["ttft_p50_ms"]) for row in mine)
        )
        assert point["peak_memory_mib"] == ""  # no GPU here: null, never 0
    # The radix cache is off, markers too, and that was asked of every server.
    service = json.loads((out / "metadata" / "pp2_tp2_ep2_service.json").read_text())
    assert "--disable-radix-cache" in service["nodes"][0]["argv"]
    assert service["nodes"][0]["env"]["NSYSK3_MARKERS"] == "0"
    # One request a micro-batch, two of them under way: of three requests one waits.
    assert here.layout(2)["micro_batch"] == {"resolved": 1, "slots": 2, "admits": 2}
    assert "of C=3 1 always wait" in ran.out
    assert ran.out == run("sweep", "report", out).out
    assert not busy(here.port)


NVIDIA_SMI = """#!/usr/bin/env python3
import os, sys
names = next(w.split("=")[1] for w in sys.argv if w.startswith("--query-gpu")).split(",")
used = 79407 if os.path.exists(os.environ["LEAK"]) else 5
know = {"memory.used": "%d MiB", "memory.total": "85651 MiB", "name": "NVIDIA RTX 6000D"}
print(", ".join(names))
for gpu in range(4):
    told = {"index": str(gpu), **know, "memory.used": know["memory.used"] % (used - gpu)}
    print(", ".join(told.get(name, "0") for name in names))
"""


def test_memory_is_looked_at_before_healthy_after_and_cleaned(here: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for nvidia-smi; what it says once the service is cleaned away is more than before: that is told."""
    tools = here.path / "tools"
    tools.mkdir()
    (tools / "nvidia-smi").write_text(NVIDIA_SMI)
    (tools / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    leak = here.path / "leak"
    monkeypatch.setenv("LEAK", str(leak))
    here.settings.write_text(here.settings.read_text() + f'[env]\nLEAK = "{leak}"\n')
    server = here.path / "server.sh"  # it fills the memory as it starts
    server.write_text(f'touch {leak}; exec "$@"\n')
    text = here.settings.read_text()
    here.settings.write_text(text.replace("command = [", f'command = ["sh", "{server}", '))
    ran = here.sweep("--pp", 2, "--concurrency", 1, "--repeats", 1)
    assert ran.code == 0, ran.err
    names = {path.name for path in (here.path / "out" / "gpu").iterdir()}
    assert names == {f"pp2_tp2_ep2_{label}_localhost.csv" for label in ("before", "healthy", "after", "cleaned")}
    (point,) = here.rows(name="summary.csv")
    assert (point["peak_memory_mib"], point["memory_total_mib"], point["peak_memory_gpu"]) == (
        "79407",
        "85651",
        "localhost:0",
    )
    assert "6,244 MiB" in ran.out
    assert "GPU 0 of localhost holds 79,402 MiB more than before the service" in ran.err


def test_everything_is_checked_before_anything_starts(here: Place) -> None:
    """A layout that cannot run ends the command; so does a folder or an option that is none."""
    before = set(here.path.iterdir())
    for words, why in (
        (("--pp", "2,3"), "--pp 3"), (("--pp", "2,x"), "--pp"), (("--pp", 2, "--layout-args", "PP8=--x"), "PP8"),
        (("--pp", "1,2", "--tp", "4,2,1"), "--tp"), (("--resume",), "--resume"), ((), "--pp"),
        (("--pp", 2, "--baseline", here.path / "none"), "no such folder"), (("--pp", 1, "--ep", 3), "--ep"),
        (("--pp", 2, "--accept", "load.chunk"), "--accept load.chunk: there is no baseline"),
    ):  # fmt: skip
        ran = here.sweep(*words)
        assert ran.code == 2
        assert why in ran.err
        assert len(ran.err.strip().splitlines()) == 1
    assert set(here.path.iterdir()) == before
    other = here.path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("mine")
    ran = here.sweep("--pp", 2, out="other")
    assert (ran.code, "holds something else than a sweep (thesis.txt)" in ran.err) == (2, True)


def test_dry_run_prints_every_command_and_starts_nothing(here: Place) -> None:
    ran = here.sweep(
        "--pp", "1,2,4", "--concurrency", "1,2", "--repeats", 2, "--dry-run", "--layout-args", "PP4=--log-level warning"
    )
    assert ran.code == 0
    for pp, tp in ((1, 4), (2, 2), (4, 1)):
        assert f"--tp-size {tp} --pp-size {pp}" in ran.out.replace(" \\\n    ", " ")
    assert ran.out.count(SERVER.name) == 3
    assert ran.out.count("--log-level warning") == 1
    assert f"{3 * 2 * 2 * REQUESTS * 512:,} prompt tokens" in ran.out
    assert not (here.path / "out").exists()


def test_needs_nothing_that_analysis_needs(here: Place) -> None:
    """Launch hosts have typer, rich, pydantic, platformdirs and httpx, and no more."""
    missing = ("polars", "numpy", "pandas", "pyarrow", "plotly", "jinja2", "sqlalchemy", "adbc_driver_manager", "torch")
    code = f"import sys; sys.modules.update(dict.fromkeys({missing})); from nsysk3.cli import main; main()"
    words = here.words("--pp", 1, "--concurrency", 1, "--repeats", 1)
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Throughput and TTFT" in done.stdout
    page = subprocess.run(
        [sys.executable, "-c", code, "sweep", "report", here.path / "out", "--format", "html"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (page.returncode, len(page.stderr.strip().splitlines())) == (3, 1)


def test_two_hosts_over_ssh(tmp_path: Path) -> None:
    """Layouts of one stage a host and of one stage over both; logs of every node come home."""
    ssh = tmp_path / "ssh"
    ssh.mkdir()
    with sshd.hosts(ssh, 2) as hosts:
        here = place(tmp_path)
        cluster = f"hosts = {json.dumps(hosts.names)}\nssh_options = {json.dumps(hosts.options)}\ngpus_per_host = 2\n"
        here.settings.write_text(here.settings.read_text().replace("gpus_per_host = 4\n", cluster))
        ran = here.sweep("--pp", "1,2", "--concurrency", 2, "--repeats", 1)
    assert ran.code == 0, ran.err
    assert keys(here.rows()) == [(1, 2, 1), (2, 2, 1)]
    for host in hosts.names:
        assert "server_args" in (here.path / "out/service/pp1_tp4_ep4/nodes" / host / "server.log").read_text()
    assert not busy(here.port)
