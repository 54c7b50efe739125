"""A whole run, from a plan to an analysed directory; and what is left of one that fails."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from command import run as ran
from launch_runs import FAKE_NSYS, REPORT, Run, faults, plan_of, settings

from nsysk3.errors import InputError, MissingToolError, RunFailedError
from nsysk3.launch import window as window_module
from nsysk3.launch.features import told
from nsysk3.launch.found_ranks import find_ranks
from nsysk3.launch.hosts import Host
from nsysk3.launch.loads import Loads
from nsysk3.launch.overhead import overhead, sentence
from nsysk3.launch.profile import run_profile
from nsysk3.launch.window import Window
from nsysk3.run.config import Settings
from nsysk3.run.manifest import Feature, RankEntry, read_manifest

ROOT = Path(__file__).parent.parent
STEPS = [
    "planned", "preflight", "starting", "healthy", "warming", "loading", "window", "draining", "stopping", "collecting",
    "exported",
]  # fmt: skip


def run(given: Settings, tmp_path: Path, pp: int = 2, **options: Any) -> Run:
    return Run(plan_of(given, f"t-{tmp_path.name[-30:]}", pp=pp), tmp_path / "out", **options)


def test_a_run_is_whole(tmp_path: Path) -> None:
    done = run(settings(tmp_path, "--speed", "2", window={"forwards": 12}), tmp_path, analyze=True)
    assert done.error is None
    assert done.json["status"] == "done"
    assert list(done.json["times"]) == [*STEPS, "analysed", "done"]
    assert sorted(done.json["times"].values()) == list(done.json["times"].values())
    assert "cause" not in done.json
    assert done.json["cleaned"] is True
    manifest = read_manifest(done.out)
    assert manifest
    assert [rank.world_rank for rank in manifest.ranks] == [0, 1]
    window = done.json["measured"]["window"]
    assert (window["stop_profile"], window["steps"]) == (False, 12 + 2 * 2)
    assert window["closed_by"] in ("nsys", "the report")
    assert window["opened_ns"] < window["closed_ns"]
    assert window["requests_before"] >= 2
    assert done.json["server"]["pp_max_micro_batch_size"] == 32
    assert done.json["versions"]["server"] == "0.5.23"
    loads = {each["name"]: each for each in done.json["measured"]["loads"]}
    assert (loads["baseline"]["completed"], loads["baseline"]["errors"]) == (40, 0)
    assert 2 < loads["window"]["completed"] <= 40
    assert done.json["measured"]["overhead"]["capture"] is not None
    assert any(line.startswith("profiler overhead: ") for line in done.said)
    (node,) = done.json["reports"]
    report = done.out / node["report"]
    assert node["sha256"] == hashlib.sha256(REPORT.read_bytes()).hexdigest()
    assert report.read_bytes() == REPORT.read_bytes()
    assert (node["missing_ranks"], sorted(node["kernels"])) == ([], ["0", "1"])
    assert json.loads((done.out / "server_info.json").read_text())["pp_size"] == 2
    for name in ("bench/baseline.jsonl", "bench/window.log", "nodes/localhost/server.log", "analysis/report.html"):
        assert (done.out / name).stat().st_size
    result = json.loads((done.out / "analysis/result.json").read_text())
    assert len(result["ranks"]) == 2
    assert os.access(done.out / "nodes/localhost/command.txt", os.R_OK)


def test_a_load_that_ends_before_its_window_closes_it(tmp_path: Path) -> None:
    done = run(settings(tmp_path, *faults("endless-capture")), tmp_path)
    assert done.error is None
    assert done.json["measured"]["window"]["stop_profile"] is True
    assert done.json["measured"]["window"]["closed_by"] in ("nsys", "the report")
    assert "/stop_profile closed the capture" in done.notes()
    assert done.json["measured"]["loads"][-1]["completed"] == 40


@pytest.mark.parametrize(
    ("fault", "step", "kind", "words"),
    [
        ("die-at-start=watchdog", "starting", "watchdog", "--watchdog-timeout 3600"),
        ("wrong-info=moe_runner_backend:\"triton\"", "healthy", "run", "moe_runner_backend is 'triton'"),
        ("http-500=1", "warming", "run", "none of 2 requests was answered: HTTP 500"),
        ("no-profile", "loading", "run", "has no /start_profile"),
        ("refuse-profile", "loading", "run", "another capture may be open"),
        ("die-in-window=3", "window", "killed", "died with the capture open"),
        ("die-after=3", "loading", "killed", "died"),  # /start_profile is refused before the death is seen
    ],
)  # fmt: skip
def test_a_failure_is_told_where_it_happened(tmp_path: Path, fault: str, step: str, kind: str, words: str) -> None:
    args = ["--moe-runner-backend", "flashinfer_mxfp4"]
    done = run(settings(tmp_path, *args, *faults(fault), window={"overhead": "off"}), tmp_path)
    assert isinstance(done.error, RunFailedError)
    assert words in str(done.error)
    assert "\n" not in str(done.error)
    assert done.json["status"] == "failed"
    assert done.json["cleaned"] is True
    cause = done.json["cause"]
    assert (cause["step"], cause["kind"]) == (step, kind)
    assert cause["message"]
    assert list(done.json["times"]) == [*STEPS[: STEPS.index(step) + 1], "failed"]
    assert (done.out / "nodes/localhost/server.log").stat().st_size


def test_a_server_that_dies_in_the_baseline_is_no_server_that_refuses_the_capture(tmp_path: Path) -> None:
    done = run(settings(tmp_path, *faults("die-after=7")), tmp_path)
    assert "died in the baseline load" in str(done.error)
    assert (done.json["cause"]["step"], done.json["cause"]["kind"]) == ("loading", "killed")


def test_requests_that_failed_are_told(tmp_path: Path) -> None:
    done = run(settings(tmp_path, *faults("http-500=5")), tmp_path)
    assert done.error is None
    for load in done.json["measured"]["loads"]:
        said = f"{load['name']} load: {load['errors']} of {load['errors'] + load['completed']} requests failed"
        assert load["errors"] > 0
        assert said in done.notes()
        assert sum(line.startswith(f"WARNING: {said}") for line in done.said) == 1


def test_what_cannot_be_started_is_told_in_one_line(tmp_path: Path) -> None:
    done = run(settings(tmp_path, nsys={"path": "/no/such/nsys"}), tmp_path)
    assert isinstance(done.error, RunFailedError)
    assert "/no/such/nsys: No such file" in str(done.error)
    assert (done.json["cause"]["step"], done.json["cause"]["kind"]) == ("starting", "run")


def test_a_capture_that_finds_no_room_here_stays_on_its_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch = Host.fetch

    def full(host: Host, remote: str, local: Path) -> None:
        """No file of this process grows as large as the report: the last piece of it finds no room."""
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (REPORT.stat().st_size - 1, limits[1]))
        try:
            fetch(host, remote, local)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    monkeypatch.setattr(Host, "fetch", full)
    done = run(settings(tmp_path, window={"overhead": "off"}), tmp_path)
    assert isinstance(done.error, MissingToolError)
    cause = done.json["cause"]
    assert (done.json["status"], cause["step"], cause["kind"]) == ("failed", "collecting", "environment")
    assert "trace.nsys-rep: cannot be written (File too large)" in cause["message"]
    kept = done.json["kept"]
    assert f"kept on its host, {kept[0]}: make room here" in cause["advice"]
    assert (done.json["cleaned"], len(kept)) == (False, 1)
    assert sum(kept[0] in line for line in done.said) == 1
    assert done.json["reports"][0]["report"] is None
    host, _, place = kept[0].partition(":")
    assert Path(place).read_bytes() == REPORT.read_bytes()
    assert [path.name for path in (done.out / "nodes" / host).glob("*trace*")] == []  # no half of it
    cleaned = ran("cleanup", done.out)
    assert (cleaned.code, str(Path(place).parent) in cleaned.err) == (0, True)
    assert not Path(place).parent.exists()
    document = json.loads((done.out / "run.json").read_text())
    assert (document["cleaned"], "kept" in document, document["status"]) == (True, False, "failed")


def test_a_capture_is_kept_too_when_the_disk_is_full_before_it_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = Loads.keep

    def full(self: Loads, name: str, result: Any) -> None:
        if name == "window":
            raise MissingToolError("window.jsonl: cannot be written (No space left on device)")
        keep(self, name, result)

    monkeypatch.setattr(Loads, "keep", full)
    done = run(settings(tmp_path, window={"overhead": "off"}), tmp_path)
    assert (done.json["cause"]["step"], done.json["cause"]["kind"]) == ("draining", "environment")
    (kept,) = done.json["kept"]
    assert Path(kept.partition(":")[2]).read_bytes() == REPORT.read_bytes()
    assert any("kept, for it did not come" in line and kept in line for line in done.said)


def test_an_export_that_is_none_is_no_success(tmp_path: Path) -> None:
    """Also where nobody analyses it."""
    (tmp_path / "report").write_bytes(b"garbage")
    given = {"FAKE_NSYS_REPORT": str(tmp_path / "report")}
    done = run(settings(tmp_path, env=given, window={"overhead": "off"}), tmp_path)
    assert isinstance(done.error, RunFailedError)
    assert "not a whole export (file is not a database)" in str(done.error)
    cause = done.json["cause"]
    assert (done.json["status"], cause["step"], cause["kind"]) == ("failed", "collecting", "nsys-no-export")
    node = done.out / "nodes/localhost"
    assert (node / "trace.nsys-rep").read_bytes() == b"garbage"
    assert not (node / "trace.sqlite").exists()  # or it would be read in place of the report
    assert "kept" not in done.json


def test_of_two_runs_in_one_directory_one_is_refused(tmp_path: Path) -> None:
    plan = plan_of(settings(tmp_path), "t-second")
    out = tmp_path / "out"
    out.mkdir()
    (out / "run.json").write_text("of the first")
    with pytest.raises(InputError, match="no empty directory"):
        run_profile(plan, out, say=lambda text: None)
    assert [path.name for path in out.iterdir()] == ["run.json"]
    assert (out / "run.json").read_text() == "of the first"
    for place in (out / "run.json", Path("/dev/null/x")):
        with pytest.raises(InputError, match="give another --out"):
            run_profile(plan, place, say=lambda text: None)


def test_a_capture_that_nsys_never_saw_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_module, "NOTHING_S", 0.5)
    report = {"FAKE_NSYS_REPORT": str(REPORT), "FAKE_NSYS": "blind"}
    done = run(settings(tmp_path, env=report, window={"overhead": "off"}), tmp_path)
    assert "nsys wrote no report" in str(done.error)
    assert (done.json["cause"]["step"], done.json["cause"]["kind"]) == ("collecting", "nsys-no-report")
    assert "nothing told that the capture opened" in done.notes()


def test_ranks_that_are_not_in_the_trace_are_named(tmp_path: Path) -> None:
    done = run(settings(tmp_path, window={"overhead": "off"}), tmp_path, pp=4)
    assert done.error is None  # what there is can be analysed
    assert done.json["reports"][0]["missing_ranks"] == [2, 3]
    assert "ranks 2, 3 are not in the trace: 2 processes of the node made CUDA calls" in done.notes()
    assert any(line.startswith("WARNING: localhost: ranks 2, 3") for line in done.said)


def test_a_trace_without_any_gpu_work_is_no_success(tmp_path: Path) -> None:
    empty = {"FAKE_NSYS_REPORT": str(ROOT / "fixtures/versions/c_2024.sqlite")}
    done = run(settings(tmp_path, env=empty, window={"overhead": "off"}), tmp_path, analyze=True)
    assert "no rank's GPU work is in the reports" in str(done.error)
    assert "nsys saw no CUDA" in str(done.error)
    assert (done.json["status"], done.json["cause"]["kind"]) == ("failed", "nsys-no-cuda")
    assert (done.out / "nodes/localhost/trace.nsys-rep").is_file()


def test_a_raw_capture_is_imported_with_the_importer_beside_nsys(tmp_path: Path) -> None:
    """As where a container holds nsys without its host part in its place."""
    target, host = tmp_path / "nsight/target-linux-x64", tmp_path / "nsight/host-linux-x64"
    target.mkdir(parents=True)
    host.mkdir()
    shutil.copy(FAKE_NSYS, target / "nsys")
    given = {"env": {"FAKE_NSYS_REPORT": str(REPORT), "FAKE_NSYS": "raw"}, "window": {"overhead": "off"}}
    nsys = {"path": str(target / "nsys"), "library_path": str(tmp_path / "lib")}
    done = run(settings(tmp_path, nsys=nsys, **given), tmp_path)
    assert "no QdstrmImporter beside" in str(done.error)
    assert [Path(each).name for each in done.json["kept"]] == ["trace.qdstrm"]
    importer = host / "QdstrmImporter"
    importer.write_text(f'#!/bin/sh\n[ "$LD_LIBRARY_PATH" = "{tmp_path}/lib" ] && cp "$2" "$4"\n')
    importer.chmod(0o755)
    (tmp_path / "again").mkdir()
    plan = plan_of(settings(tmp_path, nsys=nsys, **given), "t-again")
    done = Run(plan, tmp_path / "again/out")
    assert done.error is None
    assert done.json["reports"][0]["imported_from_qdstrm"] is True
    assert done.json["reports"][0]["missing_ranks"] == []


def test_the_cost_of_nsys_itself_takes_a_second_server(tmp_path: Path) -> None:
    done = run(settings(tmp_path, window={"overhead": "server"}), tmp_path)
    assert done.error is None
    names = [each["name"] for each in done.json["measured"]["loads"]]
    assert names == ["baseline", "window", "plain"]
    assert done.json["measured"]["overhead"]["attached"] is not None
    plain = (done.out / "plain/nodes/localhost/command.txt").read_text()
    assert " profile " not in plain


def test_a_run_needs_none_of_the_libraries_of_the_analysis(tmp_path: Path) -> None:
    """A launcher machine may have nothing but the command line's own."""
    program = f"""
import sys
for name in "polars plotly sqlalchemy adbc_driver_sqlite adbc_driver_manager pandas pyarrow numpy jinja2".split():
    sys.modules[name] = None
sys.path.insert(0, {str(ROOT / "tests")!r})
from pathlib import Path
from launch_runs import plan_of, settings
from nsysk3.launch.profile import run_profile
tmp = Path({str(tmp_path)!r})
run_profile(plan_of(settings(tmp, window={{"overhead": "off"}}), "t-bare"), tmp / "out", say=print, preflight="skip")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "not analysed: polars is not installed; where it is: nsysk3 analyze" in done.stdout
    manifest = read_manifest(tmp_path / "out")
    assert manifest
    assert manifest.status == "done"


# --- the parts that compute


def record(sent: list[float], took: list[float], errors: list[str] | None = None) -> dict[str, Any]:
    return {
        "start_times": sent, "latencies": took, "errors": errors or [""] * len(sent), "max_concurrency": 1,
        "began_ns": 1_000_000_000_000,
    }  # fmt: skip


def test_overhead_compares_what_lay_inside_with_what_was_steady() -> None:
    steady = record([0, 1, 2, 3, 4, 5], [9, 1, 1, 1, 1, 9])
    inside = record([0, 2, 3, 4, 5, 6], [5, 1.1, 1.1, 1.1, 1.1, 7])
    window = Window(8, opened_ns=1_000_000_000_000 + 2_000_000_000, closed_ns=1_000_000_000_000 + 6_100_000_000)
    found = overhead(inside, window, steady)
    assert found["capture"] == pytest.approx(0.1)
    assert (found["requests_inside"], found["requests_outside"]) == (4, 4)
    assert found["noise"] == 0
    assert sentence(found).startswith("profiler overhead: +10.0% ± 0.0% while collecting")
    assert overhead(inside, window, steady, ranged=False)["capture"] is None
    attached = overhead(inside, window, steady, record([0, 1, 2, 3, 4, 5], [9, 0.5, 0.5, 0.5, 0.5, 9]))
    assert attached["attached"] == pytest.approx(1.0)
    for unknown in (overhead(inside, window, None), overhead(inside, Window(8), steady)):
        assert unknown["capture"] is None  # not 0: nobody measured it
        assert "not measured" in sentence(unknown)


def ranks(*devices: int) -> list[RankEntry]:
    return [RankEntry(world_rank=rank, host="n", device=device) for rank, device in enumerate(devices)]


@pytest.mark.parametrize(
    ("export", "devices", "missing", "words"),
    [
        ("h200/pp2.sqlite", (0, 1), (), ""),
        ("h200/pp2.sqlite", (0, 1, 2), (2,), "were not followed"),
        ("versions/c_2024.sqlite", (0, 1), (0, 1), "nsys saw no CUDA at all"),
        ("sglang-h200/pp2-markers.sqlite", (0, 1), (), ""),
    ],
)
def test_ranks_are_looked_for(export: str, devices: tuple[int, ...], missing: tuple[int, ...], words: str) -> None:
    found = find_ranks(ROOT / "fixtures" / export, ranks(*devices))
    assert found.missing == missing
    assert words in found.reason
    assert set(found.kernels).isdisjoint(missing)
    assert all(count > 0 for count in found.kernels.values())


def test_ranks_are_not_looked_for_in_what_is_no_export(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "thesis.sqlite")) as database:
        database.execute("CREATE TABLE StringIds (id, value)")
    with pytest.raises(InputError, match=r"thesis\.sqlite: not an export of Nsight Systems"):
        find_ranks(tmp_path / "thesis.sqlite", ranks(0))


REQUIRES = (
    "[2026-08-21 12:02:08 TP0] K3 SP collective requires SM100/SM103, TP4/TP8/TP16, MegaMoE/DeepEP, and "
    "CustomAllReduceV2 with multicast; using NCCL (sm=120, world_size=4, a2a=none, comm=None, disabled=None, "
    "has_multicast=None)."
)
ENABLED = (
    "K3 SP collective enabled (TP4, fused RS residual + AG)\n"
    "K3 SP attention-residual carry enabled (local agg/bank write + normalized AG)"
)


def test_what_sglang_declined_is_told_in_its_own_words() -> None:
    asked = [Feature(name=name, requested=True) for name in ("SGLANG_K3_SP_COLLECTIVE", "SGLANG_K3_SP_ATTN_RES")]
    for feature in told(asked, [REQUIRES], pp=1):
        assert (feature.active, feature.fell_back) == (False, True)
        assert "using NCCL (sm=120" in (feature.reason or "")
    both = told(asked, ["", ENABLED], pp=1)
    assert [feature.active for feature in both] == [True, True]
    assert [feature.fell_back for feature in both] == [False, False]
    collective, carry = told(asked, [ENABLED], pp=8)
    assert (collective.active, carry.active) == (True, False)  # a pipeline has no carry, whatever the log says
    assert "without a pipeline only" in (carry.reason or "")
    for feature in told(asked, ["nothing"], pp=1):
        assert (feature.active, feature.fell_back) == (None, None)
        assert "says nothing" in (feature.reason or "")
    ours = [Feature(name="NSYSK3_SP", requested=True)]
    (able,) = told(ours, ["INFO nsysk3 SP can run (TP4, mode auto)"], pp=1)
    assert (able.active, able.fell_back) == (None, None)
    assert "can run (TP4, mode auto)" in (able.reason or "")
    (off,) = told(ours, ["INFO nsysk3 SP is off: SGLang shards rows only with an expert all-to-all and TP > 1"], pp=1)
    assert (off.active, off.fell_back) == (False, True)
    marker = [Feature(name="NSYSK3_MARKERS", requested=True)]
    mark = "nsysk3.rank world=0/2 pp=0/2 tp=0/1 ep=0/1 device=0 nsysk3=0.1.0 sglang=0.5.17 markers=rank,layer"
    assert told(marker, [mark], pp=2)[0].reason == "markers: rank,layer"
    assert told(marker, [mark.replace("sglang=0.5.17", "engine=torch")], pp=2)[0].active is True
