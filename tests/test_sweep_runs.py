"""Sweeps of a server that speaks SGLang's endpoints: whole ones, failing ones, killed ones, merged ones."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sshd
from command import Ran, run
from conftest import FIXTURES
from loopback import SERVER, free_port

from nsysk3.sweep import serve

REQUESTS = 4
# Columns of results.csv and the field of the JSON line that each is.
COLUMNS = {
    "input_tps": "input_throughput", "output_tps": "output_throughput", "ttft_p50_ms": "median_ttft_ms",
    "ttft_p95_ms": "p95_ttft_ms", "e2e_p95_ms": "p95_e2e_latency_ms", "duration_s": "duration",
    "completed": "completed",
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """A folder for sweeps, its settings, and how to run them."""

    path: Path
    port: int

    @property
    def settings(self) -> Path:
        return self.path / "nsysk3.toml"

    def words(self, *words: object, out: str = "out") -> list[str]:
        fixed = ["--config", self.settings, "--out", self.path / out, "--requests", REQUESTS]
        return ["sweep", *map(str, words), *map(str, fixed)]

    def sweep(self, *words: object, out: str = "out") -> Ran:
        return run(*self.words(*words, out=out))

    def rows(self, out: str = "out", name: str = "results.csv") -> list[dict[str, str]]:
        file = self.path / out / name
        return list(csv.DictReader(file.read_text("utf-8").splitlines())) if file.is_file() else []

    def record(self, out: str = "out") -> dict[str, Any]:
        document: dict[str, Any] = json.loads((self.path / out / "metadata" / "sweep.json").read_text("utf-8"))
        return document

    def layout(self, pp: int, out: str = "out") -> dict[str, Any]:
        found: dict[str, Any] = next(each for each in self.record(out)["layouts"] if each["pp"] == pp)
        return found


def place(path: Path, *, args: str = "", load: str = "") -> Place:
    made = Place(path, free_port())
    made.settings.write_text(f"""
[cluster]
gpus_per_host = 4
port = {made.port}
dist_port = {free_port()}
[server]
command = [{json.dumps(sys.executable)}, {json.dumps(str(SERVER))}]
args = ["--speed", "400"{args}]
start_timeout_s = 60
stop_timeout_s = 5
[load]
input_len = 512
chunk = 256
warmup = 1
request_timeout_s = 20
{load}
""")
    return made


@pytest.fixture
def here(tmp_path: Path) -> Place:
    return place(tmp_path)


def keys(rows: list[dict[str, str]]) -> list[tuple[int, ...]]:
    return [tuple(int(row[name]) for name in ("pp", "concurrency", "repeat")) for row in rows]


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


def test_failed_layouts_are_written_down_and_the_sweep_goes_on(here: Place) -> None:
    deaths = {1: "die-at-start=oom", 2: "die-at-start=decode-graph"}
    words = [word for pp, fault in deaths.items() for word in ("--layout-args", f"PP{pp}=--fault {fault}")]
    ran = here.sweep("--pp", "1,2,4", "--concurrency", 2, "--repeats", 1, *words)
    assert ran.code == 4
    assert (
        ran.err.strip()
        .splitlines()[-1]
        .startswith("nsysk3: 2 of 3 layouts failed: PP1/TP4/EP4: a GPU ran out of memory")
    )
    assert keys(here.rows()) == [(4, 2, 1)]
    causes = {pp: here.layout(pp)["starts"][0]["cause"] for pp in deaths}
    assert [causes[pp]["kind"] for pp in (1, 2)] == ["oom", "decode-graph-ipc"]
    assert "PP2=--disable-decode-cuda-graph" in causes[2]["advice"]
    assert "a GPU ran out of memory" in ran.out  # the report says why PP1 is not in its tables
    assert here.record()["status"] == "failed"
    # What was advised is taken up where it stopped; what failed is tried again, what is done is kept.
    kept = here.rows()
    again = here.sweep(
        "--resume", "--layout-args", "PP1=--log-level info", "--layout-args", "PP2=--disable-decode-cuda-graph"
    )
    assert again.code == 0, again.err
    assert keys(here.rows()) == [(1, 2, 1), (2, 2, 1), (4, 2, 1)]
    assert here.rows()[2] == kept[0]
    assert [start["status"] for start in here.layout(2)["starts"]] == ["failed", "done"]
    assert (here.path / "out" / "service" / "pp2_tp2_ep2_start2").is_dir()
    assert "PP2/TP2/EP2: its server also got --disable-decode-cuda-graph" in again.out


def test_server_that_dies_under_load(here: Place) -> None:
    """The warm-up is request 1, the first repeat 2 to 5: the second one kills."""
    ran = here.sweep("--pp", 2, "--concurrency", 2, "--repeats", 3, "--layout-args", "PP2=--fault die-after=7")
    assert ran.code == 4
    start = here.layout(2)["starts"][0]
    assert (start["cause"]["kind"], start["cause"]["step"]) == ("killed", "loading")
    assert [row["status"] for row in here.rows()] == ["done", "failed"]
    assert [int(row["repeats"]) for row in here.rows(name="summary.csv")] == [1]
    assert not busy(here.port)


def test_a_repeat_with_errors_does_not_count(here: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third request fails, in another way with each layout."""
    monkeypatch.setattr(serve, "_DEATH_S", 0.2)  # no server dies here
    faults = {1: ("http-500=3", "HTTP 500"), 2: ("abort=3", "aborted"), 4: ("disconnect=3", "Protocol")}
    words = [word for pp, (fault, _) in faults.items() for word in ("--layout-args", f"PP{pp}=--fault {fault}")]
    ran = here.sweep("--pp", "1,2,4", "--concurrency", 2, "--repeats", 1, *words)
    assert ran.code == 4
    for row in here.rows():
        assert row["status"] == "failed"
        assert int(row["completed"]) + int(row["errors"]) == REQUESTS
        assert int(row["errors"]) > 0
        assert faults[int(row["pp"])][1] in row["cause"]
    assert len(here.rows()) == 3
    assert here.rows(name="summary.csv") == []
    assert "no report" in ran.err


def test_server_that_is_not_what_was_asked_for(tmp_path: Path) -> None:
    here = place(tmp_path, args=', "--fault", "wrong-info=pp_size:1"')
    assert here.sweep("--pp", 2, "--concurrency", 1, "--repeats", 1).code == 4
    assert "pp_size is 1, the plan asked for 2" in here.layout(2)["starts"][0]["cause"]["message"]
    assert here.rows() == []


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


def test_other_settings_are_refused_item_by_item(here: Place) -> None:
    assert here.sweep("--pp", 1, "--concurrency", 1, "--repeats", 1).code == 0
    kept = (here.path / "out" / "results.csv").read_bytes()
    text = here.settings.read_text()
    here.settings.write_text(
        text.replace("chunk = 256", "chunk = 128").replace('"400"', '"300"') + '[env]\nNCCL_ALGO = "Ring"\n'
    )
    ran = here.sweep("--resume", "--input-len", 1024, "--layout-args", "PP1=--log-level info")
    assert ran.code == 2
    for words in ("load.chunk was 256, is 128", "load.input_len was 512, is 1024", '"300"', "env.NCCL_ALGO was not set",
                  "--layout-args of PP1/TP4/EP4"):  # fmt: skip
        assert words in ran.err
    # What changes nothing that is measured may change, and the matrix may grow.
    here.settings.write_text(
        text.replace("start_timeout_s = 60", "start_timeout_s = 50").replace(
            f"port = {here.port}", f"port = {free_port()}"
        )
    )
    ran = here.sweep("--resume", "--repeats", 2)
    assert ran.code == 0, ran.err
    assert keys(here.rows()) == [(1, 1, 1), (1, 1, 2)]
    assert (here.path / "out" / "results.csv").read_bytes().startswith(kept)
    assert here.sweep("--pp", 1).code == 2  # without --resume the folder is somebody's


def test_a_server_of_another_version_is_told_for_ever(here: Place) -> None:
    """Repeats of two versions stand in one median."""
    words = ("--pp", 1, "--concurrency", 1)
    assert here.sweep(*words, "--repeats", 1).code == 0
    path = here.path / "out/metadata/sweep.json"
    path.write_text(path.read_text().replace('"version": "0.5.23"', '"version": "9.9"'))
    raw = here.path / "out/raw/pp1_tp4_ep4_c1_r1.jsonl"
    for repeats in (2, 3):
        raw.write_text("")  # what nobody can check any more is measured again
        ran = here.sweep(*words, "--repeats", repeats, "--resume")
        assert ran.code == 0
        assert f"raw/{raw.name} is empty: C=1 repeat 1 is measured again" in ran.err
        assert json.loads(raw.read_text())["completed"] == REQUESTS
        assert "version was 9.9 when it was started before, is 0.5.23 now" in " ".join(ran.out.split())


def test_baseline_is_merged_after_a_check_item_by_item(here: Place) -> None:
    few = ("--concurrency", 1, "--repeats", 1)
    assert here.sweep("--pp", 1, *few, out="first").code == 0
    first = here.path / "first"
    refused = here.sweep("--pp", 2, *few, "--baseline", first, "--input-len", 256, "--chunk", 128)
    assert refused.code == 2
    assert "load.input_len is 256 here, 512 there; server" not in refused.err
    assert {"load.input_len is 256 here, 512 there", "load.chunk is 128 here, 256 there"} <= {
        part.strip() for part in refused.err.split("differs:")[1].split(". To merge")[0].split(";")
    }
    assert not (here.path / "out").exists()
    ran = here.sweep("--pp", 2, *few, "--baseline", first)
    assert ran.code == 0, ran.err
    assert "baseline" in ran.out
    assert "PP1 -> PP2" in ran.out
    first.rename(here.path / "moved")  # what is needed was copied
    assert run("sweep", "report", here.path / "out").out == ran.out
    # The same after the fact, and a difference that was accepted stays in the report.
    assert here.sweep("--pp", 4, *few, "--input-len", 256, out="third").code == 0
    third = ("sweep", "report", here.path / "third", "--baseline", here.path / "moved")
    assert run(*third).code == 2
    shown = run(*third, "--accept", "load.input_len")
    assert shown.code == 0
    assert "although it differs: load.input_len is 256 here, 512 there" in shown.out


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


# The sweep itself is killed.


def busy(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def grown(here: Place, rows: int, process: subprocess.Popen[str]) -> bool:
    return len(here.rows()) > rows or process.poll() is not None


def until(ready: Callable[[], object], limit: float = 60.0) -> None:
    end = time.monotonic() + limit
    while not ready():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.02)


def test_a_killed_sweep_is_taken_up_where_it_stopped(tmp_path: Path) -> None:
    """First somebody presses Ctrl-C, then somebody kills it, and then it may run to its end."""
    here = place(tmp_path)
    here.settings.write_text(here.settings.read_text().replace('"400"', '"1"'))  # a repeat takes most of a second
    new = here.words("--pp", "1,2", "--concurrency", 2, "--repeats", 2)
    again = ["sweep", "--resume", "--config", str(here.settings), "--out", str(here.path / "out")]
    done: list[dict[str, str]] = []
    for number, words in ((signal.SIGINT, new), (signal.SIGKILL, again)):
        process = subprocess.Popen(
            [sys.executable, "-c", "from nsysk3.cli import main; main()", *words],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        until(partial(grown, here, len(done), process))
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
        assert here.rows()[: len(done)] == done
        done = here.rows()
        assert 0 < len(done) < 4, err
        if number == signal.SIGINT:
            assert process.returncode == 130
            assert "--resume --out" in err.strip().splitlines()[-1]
            assert here.record()["status"] == "interrupted"
            assert not busy(here.port)
        else:
            assert process.returncode == -signal.SIGKILL
            until(lambda: not busy(here.port))  # nobody is left behind, however it ended
    # In the middle of a repeat: its JSON line is there, its row is not.
    half = here.path / "out" / "raw" / "pp2_tp2_ep2_c2_r2.jsonl"
    half.parent.mkdir(exist_ok=True)
    half.write_text('{"completed": 1, "inpu')
    ran = run(*again)
    assert ran.code == 0, ran.err
    assert keys(here.rows()) == [(1, 2, 1), (1, 2, 2), (2, 2, 1), (2, 2, 2)]
    assert here.rows()[: len(done)] == done
    assert json.loads(half.read_text())["completed"] == REQUESTS
    assert {start["status"] for each in here.record()["layouts"] for start in each["starts"]} == {"interrupted", "done"}
    assert here.record()["status"] == "done"


def test_two_sweeps_in_one_folder(here: Place) -> None:
    import fcntl

    assert here.sweep("--pp", 1, "--concurrency", 1, "--repeats", 1).code == 0
    holder = os.open(here.path / "out", os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    try:
        ran = here.sweep("--resume", "--repeats", 2)
    finally:
        os.close(holder)
    assert (ran.code, "another sweep is running" in ran.err) == (2, True)
