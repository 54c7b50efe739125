"""Windows and rules given on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import run as command
from conftest import GRAPH, TP2


@pytest.mark.parametrize("window", ["", "1", "2s:1s", "a:b", "everything"])
def test_a_bad_window_is_one_line(window: str) -> None:
    ran = command("analyze", GRAPH, "--window", window)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"nsysk3: --window {window!r}: ")
    assert ran.err.count("\n") == 1


def test_a_window_of_the_users_cuts_every_number() -> None:
    whole, part = (json.loads(command("analyze", TP2, "--json", *w).out) for w in ([], ["--window", "100ms:150ms"]))
    assert part["window"]["used"] == "100ms:150ms"
    for before, after in zip(whole["ranks"], part["ranks"], strict=True):
        assert after["window_ns"] == 50_000_000
        assert 0 < after["allreduce_count"] < before["allreduce_count"]
        assert after["compute_ns"] + after["exposed_comm_ns"] <= 50_000_000


RULES = {
    "not toml": ("[[rule]", "not valid TOML"),
    "not json": ("{", "not valid JSON"),
    "no rules": ("x = 1", "holds [[rule]] tables"),
    "a bad expression": ('[[rule]]\npattern = "("\ncategory = "X"\nrole = "compute"', "bad regular expression"),
    "an unknown role": ('[[rule]]\npattern = "x"\ncategory = "X"\nrole = "magic"', "unknown role 'magic'"),
    "an unknown key": ('[[rule]]\npattern = "x"\ncategory = "X"\nrole = "copy"\nweight = 3', "unknown key 'weight'"),
}


@pytest.mark.parametrize("name", RULES)
def test_a_bad_rules_file_is_one_line_that_names_it(tmp_path: Path, name: str) -> None:
    text, said = RULES[name]
    rules = tmp_path / "mine.rules"
    rules.write_text(text)
    for arguments in (["analyze", GRAPH], ["rules", "explain", "x"], ["rules", "list"]):
        ran = command(*arguments, "--rules", rules)
        assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
        assert str(rules) in ran.err
        assert said in ran.err
    assert command("analyze", GRAPH, "--rules", tmp_path / "none.toml").code == 2


def test_rules_of_gputrc2graph_are_taken(tmp_path: Path) -> None:
    rules = tmp_path / "sglang.json"
    rules.write_text(json.dumps({"sglang": {"k3": {"nvjet": "gemm-mine", "nccl": "nccl_and_custom_ar", ".*": "misc"}}}))
    document = json.loads(command("analyze", TP2, "--json", "--rules", rules).out)
    categories = {row["category"]: row["role"] for row in document["tables"]["categories"]}
    assert categories["gemm-mine"] == "compute"
    assert categories["nccl_and_custom_ar"] == "allreduce"
    assert any("matches every name and was left out" in note for note in document["notes"])
    assert document["ranks"][0]["allreduce_count"] == 256


def test_rules_explain_and_list() -> None:
    ran = command("rules", "explain", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)")
    assert (ran.code, ran.err) == (0, "")
    assert "verdict   AR, role allreduce" in ran.out
    assert "because   rule 1 (nsysk3 rules.toml rule 1)" in ran.out
    assert "no rule matches" in command("rules", "explain", "zzz").out
    listed = command("rules", "list").out.splitlines()
    assert listed[0].split()[:3] == ["1", "allreduce", "AR"]
    assert len(listed) > 50
