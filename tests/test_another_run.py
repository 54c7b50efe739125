"""A run.json of the same layout that was written for another run: its times, and the switches it records, tell."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from command import run as command
from conftest import FIXTURES
from exports import EPOCH_NS, GEMM, Export

from nsysk3.analysis.analyze import analyze
from nsysk3.trace.load import Run, load

TORCH = FIXTURES / "torch-h200"
RUNS = [path.parent for path in sorted(FIXTURES.rglob("run.json"))]
NOT_THOSE = "its settings are not those of these reports, and were not used; put the run.json of this run there"
# A little before the session that the exports of this test's helpers have.
PLANNED, DONE = "2026-11-29T18:52:00Z", "2026-11-29T18:53:30.5Z"
OWN_SP = "void k3::rs_attn_res<__nv_bfloat16, 2>(k3::Params)"
SGLANG_SP = "void (anonymous namespace)::attn_res_fused_pull_rs_kernel<__nv_bfloat16, 1u>(int)"


def swapped(run: str, other: str, folder: Path) -> Path:
    """A fixture with the run.json of another."""
    place = Path(shutil.copytree(TORCH / run, folder / run))
    shutil.copyfile(TORCH / other / "run.json", place / "run.json")
    return place


def made(folder: Path, *, after_s: tuple[float, ...] = (0,), kernel: str = GEMM, **manifest: Any) -> Run:
    """A run of a report a host whose sessions began so long after ``EPOCH_NS``, with this in run.json."""
    for number, seconds in enumerate(after_s):
        place = folder / "nodes" / f"h{number}"
        place.mkdir(parents=True)
        export = Export(epoch_ns=EPOCH_NS + round(seconds * 1e9)).gpu(0, cuda=0, uuid=f"u{number}")
        export.kernel(kernel, 100, 200).write(place / "trace.sqlite")
    hosts = [f"h{number}" for number in range(len(after_s))]
    body = {"status": "done", "times": {"planned": PLANNED, "done": DONE}, "hosts": hosts, "load": {"input_len": 7}}
    (folder / "run.json").write_text(json.dumps(body | manifest))
    return load(folder)


def measured(offset_s: float) -> list[dict[str, object]]:
    return [{"host": "h0", "offset_ns": round(offset_s * 1e9), "uncertainty_ns": 1_000}]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.parent.name}/{run.name}")
def test_no_fixture_is_doubted(run: Path) -> None:
    assert load(run).problems == ()


@pytest.mark.parametrize(
    ("run", "other", "when"),
    [
        ("sp-off", "sp-sglang", "15 s before this run was planned"),
        ("sp-sglang", "sp-off", "18 s after this run had ended"),
    ],
)
def test_a_run_json_of_the_same_layout_is_told_by_its_times(run: str, other: str, when: str, tmp_path: Path) -> None:
    path = swapped(run, other, tmp_path)
    ran = command("analyze", path, "--out", tmp_path / "out", "-q")
    assert ran.code == 2
    assert f"{path}/run.json: localhost/trace was recorded {when}: {NOT_THOSE}" in ran.err
    manifest = analyze(path).document.manifest or {}
    assert (manifest["topology"]["tp"], len(manifest["ranks"])) == (2, 2)
    assert (manifest["server"], manifest["load"]) == ({}, {})


def test_settings_of_another_run_are_nothing_to_compare(tmp_path: Path) -> None:
    one, two = swapped("sp-off", "sp-sglang", tmp_path), swapped("sp-sglang", "sp-off", tmp_path)
    ran = command("compare", one, two)
    assert ran.code == 2
    assert "only sp differs" not in ran.out


@pytest.mark.parametrize(
    ("after_s", "manifest", "said"),
    [
        (-45, {}, None),  # nobody measured that clock
        (-120, {}, "h0/trace was recorded 70 s before this run was planned"),
        (95, {}, None),
        (200, {}, "h0/trace was recorded 3 min after this run had ended"),
        (200, {"status": "exported"}, None),
        (200, {"times": {"start": PLANNED, "seconds": 3}}, None),
        (200, {"times": {"planned": "soon", "done": DONE}}, None),
        (-60, {"clocks": measured(0)}, "h0/trace was recorded 10 s before this run was planned"),
        (3600, {"clocks": measured(3600)}, None),
        (0, {"clocks": measured(3600)}, "h0/trace was recorded 59 min before this run was planned"),
    ],
)  # fmt: skip
def test_how_far_a_session_may_lie_outside(
    after_s: float, manifest: dict[str, Any], said: str | None, tmp_path: Path
) -> None:
    found = made(tmp_path, after_s=(after_s,), **manifest)
    messages = [problem.message for problem in found.problems]
    assert (said is None) == (messages == [])
    assert all(said is not None and said in message for message in messages)
    # Whoever did not measure the clock cannot be certain.
    kept = said is None or "clocks" not in manifest
    assert found.manifest is not None
    assert bool(found.manifest.load) is kept


def test_one_report_of_another_run_leaves_the_settings_to_the_others(tmp_path: Path) -> None:
    found = made(tmp_path, after_s=(0, 7200), clocks=measured(0))
    (problem,) = found.problems
    assert (
        "h1/trace was recorded 119 min after this run had ended: unless a clock is off the two are" in problem.message
    )
    assert found.manifest is not None
    assert found.manifest.load == {"input_len": 7}


def switched(values: str, *names: str, **more: Any) -> dict[str, Any]:
    return {"server": {"sp": "off", "env": dict(zip(names, values, strict=True)), **more}}


SWITCHES = ("NSYSK3_SP", "SGLANG_K3_SP_COLLECTIVE", "SGLANG_K3_SP_ATTN_RES")


@pytest.mark.parametrize(
    ("kernel", "server", "whose"),
    [
        (OWN_SP, switched("000", *SWITCHES), "nsysk3"),
        (SGLANG_SP, switched("000", *SWITCHES), "SGLang"),
        (OWN_SP, switched("100", *SWITCHES), None),
        (SGLANG_SP, switched("001", *SWITCHES), None),
        (SGLANG_SP, switched("0", "NSYSK3_SP"), None),
        (OWN_SP, switched("0", "NSYSK3_SP", args=["--sp", "nsysk3"]), None),
        (OWN_SP, {"server": {"sp": "nsysk3", "env": {"NSYSK3_SP": "0"}}}, None),
        (GEMM, switched("000", *SWITCHES), None),
    ],
)
def test_sp_kernels_of_a_run_that_says_off(
    kernel: str, server: dict[str, Any], whose: str | None, tmp_path: Path
) -> None:
    problems = made(tmp_path, kernel=kernel, **server).problems
    assert [problem.message for problem in problems] == (
        [] if whose is None
        else [f"{tmp_path}/run.json: says sp off, but SP collectives of {whose} ran in h0/trace: {NOT_THOSE}"]
    )  # fmt: skip


def test_a_manifest_without_times_says_nothing(tmp_path: Path) -> None:
    assert made(tmp_path, after_s=(9000,), times={}).problems == ()
