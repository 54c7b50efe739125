"""Hosts of run.json that no report is of are told; ranks of unknown stages are not held against each other."""

from __future__ import annotations

from pathlib import Path

from command import run
from simulated import Simulated, make

from nsysk3.analysis.analyze import analyze
from nsysk3.result import Result

# Stages with unlike numbers of AllReduce.
SHAPE = {"pp": 2, "tp": 2, "ep": 2, "nodes": 2, "layers": 8, "micro_batches": 4}


def renamed(made: Simulated, *changes: tuple[str, str]) -> Path:
    text = (made.path / "run.json").read_text("utf-8")
    for before, after in changes:
        text = text.replace(before, after)
    (made.path / "run.json").write_text(text, "utf-8")
    return made.path


def stable(result: Result) -> list[bool]:
    return result.rank_metrics["stable"].to_list()


def test_hosts_that_no_report_is_of(tmp_path: Path) -> None:
    made = make(tmp_path, **SHAPE)
    assert made.result.document.problems == []
    counts = made.result.rank_metrics["allreduce_count"].to_list()
    assert counts[0] != counts[-1]
    path = renamed(made, ("node601", "gpu-1"), ("node602", "gpu-2"))
    done = run("analyze", path, "--out", tmp_path / "out")
    assert done.code == 0
    assert "run.json: lists ranks of gpu-1, gpu-2, none of node601, node602: which ranks" in " ".join(done.out.split())
    assert stable(Result.load(tmp_path / "out")) == [True] * 4


def test_one_host_that_is_called_otherwise(tmp_path: Path) -> None:
    path = renamed(make(tmp_path, **SHAPE), ("node602", "node602.cluster"))
    said = analyze(path).document.notes
    assert any("lists ranks of node601, node602.cluster, none of node602:" in each for each in said), said


def test_without_a_list_no_rank_is_held_against_those_of_another_stage(tmp_path: Path) -> None:
    made = make(tmp_path, **SHAPE)
    (made.path / "run.json").unlink()
    result = analyze(made.path)
    assert [rank.pp_rank for rank in result.document.ranks] == [None] * 4
    assert stable(result) == [True] * 4
