"""What runs of one layout are called, the same in every format, and what gates leave in the JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from command import run
from compare_results import manifest, plain, with_forwards
from numpy import full
from numpy.random import default_rng

from nsysk3.compare import compare
from nsysk3.compare.labels import short_names
from nsysk3.report.compare_terminal import heads
from nsysk3.run.words import ranks_in_words


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["/r/before", "/r/after"], ["before", "after"]),
        (["/r/before/results", "/r/after/results"], ["before", "after"]),
        (["/r/before/analysis", "/r/after"], ["before", "after"]),
        (["/r/a/x", "/r/b/x", "/r/c"], ["a/x", "b/x", "c"]),
        (["/r/1/x/pp1", "/q/1/y/pp1"], ["x", "y"]),
        (["/r", "/r/a"], ["r", "a"]),
        (["/r/a", "/r/a"], ["/", "/"]),
    ],
)
def test_names_are_the_shortest_that_differ(paths: list[str], names: list[str]) -> None:
    assert short_names([Path(path) for path in paths]) == names


def test_traces_are_called_by_their_files(tmp_path: Path) -> None:
    for name in ("a.sqlite", "b.sqlite"):
        (tmp_path / name).touch()
    assert short_names([Path(os.path.relpath(tmp_path / name)) for name in ("a.sqlite", "b.sqlite")]) == ["a", "b"]


def test_labels_are_the_first_names_that_differ() -> None:
    alike = [plain(manifest(1, 4) | {"run_id": name}) for name in ("one", "two", "two")]
    assert compare(alike[0], alike[1], folders=["x", "y"]).labels == ["x", "y"]
    assert compare(alike[0], alike[1], folders=["x", "x"]).labels == ["one", "two"]
    assert compare(alike[1], alike[2], folders=["x", "x"]).labels == ["base", "other"]
    assert compare(alike[0], alike[1:], folders=["x", "x", "y"]).labels == ["base", "other 1", "other 2"]
    assert compare(alike[0], plain(manifest(2, 2)), folders=["x", "y"]).labels == ["PP1", "PP2"]
    assert compare(alike[0], alike[1], ["a", "b"], folders=["x", "y"]).labels == ["a", "b"]


def test_columns_of_long_labels_tell_them_apart() -> None:
    assert heads(["base", "20260101-pp2-sp-off", "20260101-pp2-sp-on"]) == ["base", "…-pp2-sp-off", "…1-pp2-sp-on"]
    assert heads(["PP1", "a label that is long"]) == ["PP1", "a label tha…"]


@pytest.fixture
def saved(tmp_path: Path) -> list[Path]:
    """Two runs of one layout; the second takes half as long."""
    paths = [tmp_path / name / "results" for name in ("before", "after")]
    for path, level in zip(paths, (8.0, 4.0), strict=True):
        with_forwards(1, 4, full((4, 8), level) + default_rng(5).normal(0, 0.1, (4, 8))).save(path)
    return paths


def test_every_format_has_the_same_labels(saved: list[Path]) -> None:
    shown = {form: run("compare", *saved, "--format", form).out for form in ("text", "md", "html")}
    assert shown["text"].startswith("before -> after at PP1 / TP4")
    assert shown["md"].startswith("### nsysk3: after against before\n")
    assert "<h1><bdi>before → after</bdi></h1>" in shown["html"]
    document = json.loads(run("compare", *saved, "--json").out)
    assert [document["base"]["label"], document["others"][0]["label"]] == ["before", "after"]
    assert document["gates"] == []


def test_json_has_what_the_gates_found(saved: list[Path]) -> None:
    gates = ["allreduce_total_ns>+5%", "allreduce_p50_ns/forward<-1ms", "allreduce_count/forward>3", "p2p_total_ns>+1%"]
    ran = run("compare", *saved, "--json", *(word for gate in gates for word in ("--fail-on", gate)))
    found = json.loads(ran.out)["gates"]
    assert ran.code == 1
    assert [each["gate"] for each in found] == gates
    assert ran.err.splitlines() == [f"gate: {each['text']}" for each in found]
    assert [each["state"] for each in found] == ["passed", "failed", "failed", "undecided"]
    assert [each["of"] for each in found] == ["share", "change", "value", "share"]
    assert [each["limit"] for each in found] == [0.05, -1e6, 3.0, 0.01]
    assert {(each["base"], each["other"]) for each in found} == {("before", "after")}
    for each in found[:3]:
        assert each["low"] <= each["value"] <= each["high"]
        assert f": {each['state']}, " in each["text"]
    assert [each["reason"] is None for each in found] == [True, True, True, False]
    assert found[3]["text"].endswith(f": undecided, {found[3]['reason']}")


def test_of_many_ranks_the_first_stretches_are_named() -> None:
    assert ranks_in_words([64, *range(8), 9, 11, 20, 21], most=3) == "ranks 0-7, 9, 11 and 3 more"
    assert ranks_in_words(range(64, 128), most=3) == "ranks 64-127"
