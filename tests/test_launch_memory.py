"""Ranks on CPUs that a host has no memory for are told before the kernel kills them."""

from __future__ import annotations

from typing import Any

import pytest

from nsysk3.errors import MissingToolError
from nsysk3.launch import probe
from nsysk3.launch.checks import GIB, Check
from nsysk3.launch.checks_memory import check_memory
from nsysk3.launch.judge import judge
from nsysk3.launch.plan import Plan, make_plan
from nsysk3.launch.preflight import Preflight, questions
from nsysk3.run.config import Settings


def planned(*args: str, pp: int = 2, **sections: Any) -> Plan:
    document = {"server": {"engine": "torch"}, "load": {"chunk": 8192}} | sections
    return make_plan(Settings.model_validate(document), pp=pp, tp=1, run_id="r1", extra_args=("--device", "cpu", *args))


def said(plan: Plan, available: int | None) -> tuple[str, str] | None:
    for level, _, problem in check_memory(plan, plan.nodes[0], {"memory": {"available": available}}):
        return level, problem or ""
    return None


def test_what_would_be_killed_is_refused_with_the_way_out() -> None:
    level, problem = said(planned(), 22 * GIB) or ("", "")
    assert level == "fatal"
    assert (
        "2 ranks on its CPUs will take about 62.2 GiB of memory (31.7 of it weights), of 22.0 GiB available" in problem
    )
    assert "`-- --scale small`" in problem
    small = planned("--scale", "small", load={"chunk": 65_536, "input_len": 65_536})
    assert said(small, 22 * GIB) == ("ok", "")
    level, problem = said(small, GIB) or ("", "")
    assert level == "fatal"
    assert "--scale small" not in problem
    assert "a smaller --chunk" in problem


def test_little_more_than_it_takes_is_a_warning() -> None:
    assert [(said(planned(), size * GIB) or ("",))[0] for size in (62, 65, 80)] == ["fatal", "warning", "ok"]


def test_one_rank_is_one_rank() -> None:
    assert (said(planned(pp=1), GIB) or ("", ""))[1].startswith("1 rank on its CPUs")


def test_nothing_is_said_of_what_is_not_known() -> None:
    assert said(planned(), None) is None  # no /proc/meminfo
    assert said(planned(server={"engine": "torch", "command": ["own"]}), GIB) is None
    assert said(planned("--watchdog-timeout", "x"), GIB) is None  # the server says so itself
    on_gpus = make_plan(Settings.model_validate({"server": {"engine": "torch", "args": ["--device", "cuda"]}}),
                        pp=2, tp=1, run_id="r1")  # fmt: skip
    assert said(on_gpus, GIB) is None


def test_of_sglang_the_weights_are_told() -> None:
    config = {"num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 64, "vocab_size": 128,
              "intermediate_size": 64}  # fmt: skip
    plan = planned(model={"path": "/m"}, server={})
    model = {"model": {"config": config, "bytes": 20 * GIB}}
    for available, wanted in ((22 * GIB, ["warning"]), (18 * GIB, ["fatal"])):
        answers = {"memory": {"available": available}, **model}
        assert [level for level, *_ in check_memory(plan, plan.nodes[0], answers)] == wanted


def test_it_is_fatal_in_preflight() -> None:
    plan = planned()
    asked = questions(plan, plan.nodes[0])
    found = probe.answer({name: what for each in asked for name, what in each.items() if name != "packages"})
    assert found["memory"]["available"] > 0
    found["packages"] = {"packages": {"torch": "2", "nsysk3": "1"}}
    found["nsys"] = {"version": "2024.2.3", "lacks": []}
    found["memory"]["available"] = GIB
    fatal: list[Check] = [each for each in judge(plan, plan.nodes[0], found) if each.level == "fatal"]
    assert [each.name for each in fatal] == ["memory"]
    with pytest.raises(MissingToolError, match="2 ranks on its CPUs"):
        Preflight(tuple(fatal), {}, ()).raise_if_fatal()


@pytest.mark.parametrize(
    ("limits", "free", "known"),
    [
        ({}, "MemAvailable:    2048 kB", 2 * 2**20),
        ({"/sys/fs/cgroup/memory.max": "max"}, "MemAvailable:    2048 kB", 2 * 2**20),
        ({"/sys/fs/cgroup/memory.max": "1000"}, "MemAvailable:    2048 kB", 1000),
        ({"/sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**63)}, "MemAvailable:    2048 kB", 2 * 2**20),
        ({}, "", None),
    ],
)
def test_a_container_has_no_more_than_it_may(
    limits: dict[str, str], free: str, known: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"/proc/meminfo": f"MemTotal: 9 kB\n{free}\n", **limits}
    monkeypatch.setattr(probe, "_read", lambda path: files.get(str(path), ""))
    assert probe.ask_memory(None)["available"] == known
