"""What a user is told of a run: who was killed, what is not analysed, which nsys runs, what is no run's id."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import run
from conftest import ROOT
from death_logs import DEATHS
from launch_plans import EXAMPLES
from launch_runs import plan_of, settings

from nsysk3.cli.profile import say_what_went_wrong
from nsysk3.launch.failures import explain, recognise
from nsysk3.launch.profile import run_profile
from nsysk3.launch.request import is_run_id, new_run_id
from nsysk3.sweep.prepare import new_run_id as new_sweep_id

KILLED = "[2026-08-21 12:02:08] rank 1 (stage 1, TP rank 0, process 77) was killed by SIGKILL: the server ends"
SGLANG = "RuntimeError: scheduler died during initialization (exit code: -9)"
NO_GPU = "the server runs without GPUs: the trace will hold no GPU work, and is kept but not analysed"
SMALL = ["--engine", "torch", "--pp", 1, "--tp", 1, "--dry-run"]


@pytest.mark.parametrize(("log", "who"), [(KILLED, "rank 1 (stage 1, TP rank 0, process 77)"), (SGLANG, "scheduler")])
def test_a_process_that_was_killed_is_recognised(log: str, who: str) -> None:
    failure = explain(["all is well\n" + log], [4])
    said = f"killed (SIGKILL), most often because the machine ran out of memory: {who}"
    assert (failure.kind, failure.message) == ("killed", said)
    assert "dmesg" in failure.advice
    for peer in ("nccl", "gloo"):  # what the others say of it, on its host or on another
        assert explain([DEATHS[peer], log]).kind == explain([DEATHS[peer] + "\n" + log]).kind == "killed"
    assert explain([DEATHS["oom"], log]).kind == "oom"  # there is another cause
    assert recognise(KILLED.replace("SIGKILL", "SIGTERM")) is None


def test_quiet_keeps_quiet_but_for_what_went_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export = {"FAKE_NSYS_REPORT": str(ROOT / "fixtures/versions/c_2024.sqlite")}
    given = settings(tmp_path, "--device", "cpu", env=export, window={"overhead": "off"})
    plan = plan_of(given, "t-quiet")
    assert plan.warnings == (NO_GPU,)
    made = run_profile(plan, tmp_path / "out", say=say_what_went_wrong, summary=False, preflight="skip")
    assert json.loads((made / "run.json").read_text())["status"] == "done"
    said = capsys.readouterr()
    assert said.out == ""
    assert [line for line in said.err.splitlines() if not line.startswith("WARNING: ")] == [
        line for line in said.err.splitlines() if line.startswith("not analysed: ") and "no GPU work" in line
    ]
    assert "not analysed: " in said.err


def test_quiet_prints_no_summary_of_what_was_analysed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_of(settings(tmp_path, window={"overhead": "off"}), "t-quiet-gpu")
    made = run_profile(plan, tmp_path / "out", say=lambda text: None, summary=False, report=False, preflight="skip")
    assert (made / "analysis" / "result.json").is_file()
    assert capsys.readouterr().out == ""


def test_a_plan_says_that_a_trace_without_gpus_is_not_analysed() -> None:
    assert f"# WARNING: {NO_GPU}\n" in run("profile", *SMALL, "--", "--device", "cpu").out
    assert NO_GPU not in run("profile", *SMALL, "--", "--device", "cuda").out


@pytest.mark.parametrize(
    ("hosts", "path", "words"),
    [
        ("localhost", None, None),
        ("localhost", "/x/nsys", None),
        ("localhost", "/file/nsys", "replaces /file/nsys of nsysk3.toml on every host"),
        ("n1", None, "replaces nsys on PATH on every host"),
        ("n1", "/x/nsys", None),
    ],
)
def test_a_variable_that_replaces_the_hosts_nsys_is_told(
    hosts: str, path: str | None, words: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NSYSK3_NSYS", "/x/nsys")
    (tmp_path / "nsysk3.toml").write_text(f'[nsys]\npath = "{path}"\n' if path else "")
    planned = run("profile", *SMALL, "--hosts", hosts, "--", "--device", "cuda").out
    found = [line for line in planned.splitlines() if line.startswith("# WARNING: nsys.path: NSYSK3_NSYS=/x/nsys ")]
    assert len(found) == (words is not None)
    assert words is None or words in found[0]
    assert " /x/nsys" in planned.partition("mkdir")[2]
    monkeypatch.setenv("NSYSK3_NSYS_PATH", "/y/nsys")  # which can mean the hosts' only
    assert "nsys.path" not in run("profile", *SMALL, "--hosts", hosts, "--", "--device", "cuda").out


def test_in_a_container_it_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("profile", "--config", EXAMPLES / "kimi-k3-6000d.toml", "--pp", 8, "--dry-run")
    monkeypatch.delenv("NSYSK3_NSYS", raising=False)
    assert "nsys.path" not in run(*arguments).out
    monkeypatch.setenv("NSYSK3_NSYS", "/x/nsys")
    (line,) = [line for line in run(*arguments).out.splitlines() if "nsys.path" in line]
    assert "replaces /opt/nvidia/nsight-systems/bin/nsys of " in line
    assert "in the container of every host" in line


@pytest.mark.parametrize("name", ["nope", "runs/nope", "*", "*-pp1", "pp8", "pp8-20260821-120208", "sweep"])
def test_what_is_no_run_is_not_said_to_be_clean(name: str) -> None:
    ran = run("cleanup", name)
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert f"{name}: no such run directory, nor a run's id such as pp8-20260821-120208-3f9a" in ran.err
    assert "--hosts" in ran.err


def test_every_id_that_is_given_to_a_run_can_be_cleaned_up() -> None:
    sweep = new_sweep_id()
    given = [new_run_id(8), sweep, sweep.replace("sweep", "nccl"), f"{sweep}-pp8", f"{sweep}-pp8-2", "doctor-0a1b2c3d"]
    assert [name for name in given if not is_run_id(name)] == []
