"""A run of which the report of one host is missing: it is named, and no wait is given that the truth contradicts."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from absent_runs import waits, without, wrong
from command import run
from simulated import Simulated, make

from nsysk3.analysis.analyze import analyze
from nsysk3.result import Result
from nsysk3.run.words import counted, ranks_in_words
from nsysk3.trace.load import load

# Groups over two hosts, groups over one, and a run without a pipeline whose only group loses members.
SHAPES = [
    {"pp": 2, "tp": 4, "nodes": 4, "layers": 8, "micro_batches": 6, "offset_ms": 20.0, "drift_ppm": 30.0},
    {"pp": 4, "tp": 2, "nodes": 4, "layers": 8, "micro_batches": 6, "payloads": False},
    {"pp": 1, "tp": 4, "nodes": 2, "layers": 6, "micro_batches": 4},
]


@pytest.fixture(scope="module", params=range(len(SHAPES)))
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Simulated:
    return make(tmp_path_factory.mktemp("whole"), **SHAPES[request.param], seed=request.param)


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Simulated:
    return make(tmp_path_factory.mktemp("staged"), **SHAPES[1])


@pytest.fixture(scope="module")
def spanning(tmp_path_factory: pytest.TempPathFactory) -> Simulated:
    return make(tmp_path_factory.mktemp("spanning"), **{**SHAPES[0], "pp": 3, "nodes": 6, "layers": 9})


def test_every_wait_that_is_given_lies_within_its_uncertainty_of_the_truth(whole: Simulated, tmp_path: Path) -> None:
    for node in sorted(each.name for each in (whole.path / "nodes").iterdir()):
        found = waits(whole, load(without(whole, node, tmp_path / node)))
        given = found.filter(pl.col("wait_ns").is_not_null())
        assert found.height > 50
        assert wrong(found).is_empty(), node
        if whole.facts["config"]["pp"] > 1:
            assert given.height > found.height / 2  # null is not the answer to everything


def lost(made: Simulated, node: str, folder: Path) -> Result:
    return analyze(without(made, node, folder))


def test_the_missing_are_named_once_and_their_channels_are_null_with_a_reason(
    spanning: Simulated, tmp_path: Path
) -> None:
    assert load(spanning.path).problems == ()
    result = lost(spanning, "node603", tmp_path / "lost")  # ranks 4 and 5: half of stage 1
    (problem,) = result.document.problems
    assert "2 of the 12 ranks that it lists are in no report: ranks 4, 5 of node603" in problem.message
    ranks = {row.world_rank: row for row in result.document.ranks}
    assert {rank for rank, row in ranks.items() if row.wait_collective_ns is None} == {6, 7}
    assert {rank for rank, row in ranks.items() if row.wait_downstream_ns is None} == {0, 1}
    assert {rank for rank, row in ranks.items() if row.wait_upstream_ns is None} == {8, 9}
    assert {"wait_collective_ns", "wait_upstream_ns", "wait_downstream_ns"} <= result.document.not_measured.keys()
    # Nobody of stage 1 knows its collectives; of stages 0 and 2, two ranks of four know their boundary.
    assert {rank for rank, row in ranks.items() if not row.stable} == {0, 1, 8, 9}
    world = list(ranks)
    unknown = result.pipeline.filter(pl.col("bubble_share").is_null())["rank"]
    assert {world[rank] for rank in unknown} == {0, 1, 8, 9}
    mine = result.collectives.filter(pl.col("state") == "incomplete")
    assert set(mine["ranks_seen"]) == {2}
    assert set(mine["ranks"]) == {4}
    assert mine["wait_ns"].null_count() == mine["last_rank"].null_count() == mine.height > 0
    (note,) = [note for note in result.document.notes if "members of" in note]
    assert "2 of 4 members of comm" in note
    for rank, row in enumerate(result.document.ranks):
        parts = (row.wait_collective_ns, row.wait_upstream_ns, row.wait_downstream_ns, row.transfer_ns)
        comm = result.roles.filter((pl.col("rank") == rank) & ~pl.col("role").is_in(["compute", "fused", "copy"]))
        assert sum(part or 0 for part in (*parts, row.unresolved_ns)) == comm["total_ns"].sum()


def test_the_ideal_counts_a_stage_that_is_missing_as_a_whole(staged: Simulated, tmp_path: Path) -> None:
    assert staged.result.document.problems == []
    ideal = set(staged.result.pipeline["ideal_bubble_share"])
    assert set(lost(staged, "node604", tmp_path / "lost").pipeline["ideal_bubble_share"]) == ideal


def test_analyze_writes_its_results_and_exits_with_2(staged: Simulated, tmp_path: Path) -> None:
    path = without(staged, "node604", tmp_path / "lost")
    done = run("analyze", path, "--out", tmp_path / "out", "--quiet")
    assert done.code == 2
    assert done.err.count("nsysk3: ") == 1
    assert "ranks 6, 7 of node604 (no report in nodes/node604)" in done.err
    assert (tmp_path / "out" / "result.json").is_file()


def test_a_report_that_cannot_be_read_is_said_once(staged: Simulated, tmp_path: Path) -> None:
    path = without(staged, "node601", tmp_path / "lost")
    (path / "nodes" / "node601").mkdir()
    (path / "nodes" / "node601" / "trace.sqlite").write_bytes(b"")
    (problem,) = analyze(path).document.problems
    assert "node601" in problem.path
    assert "ranks" not in problem.message


def test_a_report_named_by_itself_is_asked_for_no_other(spanning: Simulated) -> None:
    assert load(spanning.path / "nodes" / "node601" / "trace.sqlite").problems == ()


@pytest.mark.parametrize(
    ("ranks", "words"),
    [([8], "rank 8"), ([9, 8], "ranks 8, 9"), ([0, 1, 2, 7, 5], "ranks 0-2, 5, 7"), (range(8), "ranks 0-7")],
)
def test_ranks_in_words(ranks: list[int], words: str) -> None:
    assert ranks_in_words(ranks) == words


def test_one_is_singular() -> None:
    assert [counted(number, "rank") for number in (0, 1, 2, 1200)] == ["0 ranks", "1 rank", "2 ranks", "1,200 ranks"]
