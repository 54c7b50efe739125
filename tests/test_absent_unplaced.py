"""Ranks are missing, and the manifest does not tell which, or a map tells it: no wait is given that is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from absent_runs import waits, without, wrong
from command import run
from simulated import Simulated, make

from nsysk3.analysis.analyze import analyze
from nsysk3.analysis.p2p import sides
from nsysk3.trace.load import load

BASE = {"tp": 4, "layers": 6, "micro_batches": 8}
Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module", params=[True, False], ids=["payloads", "no payloads"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Simulated:
    folder = tmp_path_factory.mktemp("whole")
    return make(folder, **BASE, pp=2, nodes=4, offset_ms=30.0, drift_ppm=20.0, payloads=request.param, seed=97)


def edited(path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    manifest = json.loads((path / "run.json").read_text("utf-8"))
    change(manifest)
    (path / "run.json").write_text(json.dumps(manifest), "utf-8")
    return path


def listed(made: Simulated) -> Ranks:
    ranks: Ranks = json.loads((made.path / "run.json").read_text("utf-8"))["ranks"]
    return ranks


def rank_map(path: Path, ranks: Ranks, number: Callable[[int], int] = int) -> Path:
    text = ""
    for entry in ranks:
        rank = number(entry["world_rank"])
        text += f'[[rank]]\nhost = "{entry["host"]}"\ndevice = {entry["device"]}\n'
        text += f"world_rank = {rank}\npp = {rank // 4}\ntp = {rank % 4}\n"
    path.write_text(text, "utf-8")
    return path


def test_a_stage_is_not_paired_with_the_one_after_the_next(tmp_path: Path) -> None:
    made = make(tmp_path, **{**BASE, "layers": 9}, pp=3, nodes=6, payloads=False, seed=7)
    found = waits(made, load(without(made, "node604", tmp_path / "lost")))
    assert wrong(found).is_empty()
    assert found["wait_ns"].count() > found.height / 2


def test_a_channel_joins_equal_tp_ranks(tmp_path: Path) -> None:
    made = make(tmp_path, **BASE, pp=2, ep=1, nodes=4, payloads=False, seed=102)
    path = without(made, "node602", tmp_path / "lost")
    (path / "nodes" / "node603").unlink()
    assert analyze(path).p2p.is_empty()  # TP ranks 0 and 1 of stage 0, 2 and 3 of stage 1


def renamed(manifest: dict[str, Any]) -> None:
    for entry in manifest["ranks"]:
        entry["host"] = f"new-{entry['host']}"


def one_renamed(manifest: dict[str, Any]) -> None:
    for entry in manifest["ranks"]:
        entry["host"] = entry["host"].replace("node604", "other")


UNTOLD = {
    "all renamed": (renamed, "lists 8 ranks, 6 were found; which are missing cannot be told: its hosts new-node601, "),
    "one renamed": (one_renamed, "its hosts node603, other are not those of the reports node604"),
    "no list": (lambda manifest: manifest.update(ranks=[]), "has a topology of 8 ranks, 6 were found"),
    "no places": (
        lambda manifest: [each.pop(key) for each in manifest["ranks"] for key in ("pp", "tp")],
        "ranks 4, 5 of node603",
    ),
}


@pytest.mark.parametrize("case", UNTOLD)
def test_the_count_tells_what_the_names_do_not(whole: Simulated, tmp_path: Path, case: str) -> None:
    change, words = UNTOLD[case]
    path = edited(without(whole, "node603", tmp_path / "lost"), change)
    loaded = load(path)
    (problem,) = loaded.problems
    assert words in problem.message
    assert wrong(waits(whole, loaded)).is_empty()
    result = analyze(loaded)
    assert result.collectives.filter((pl.col("ranks") < 4) & pl.col("wait_ns").is_not_null()).is_empty()
    assert any("ranks are missing and may be members of " in note for note in result.document.notes)
    assert "wait_collective_ns" in result.document.not_measured


def test_a_whole_run_of_other_hosts_is_quiet(whole: Simulated, tmp_path: Path) -> None:
    path = edited(without(whole, "none", tmp_path / "all"), renamed)
    result = analyze(path)
    assert result.document.problems == []
    assert result.collectives["wait_ns"].null_count() == 0


def test_a_map_lists_ranks_as_a_manifest_does(whole: Simulated, tmp_path: Path) -> None:
    path = without(whole, "node603", tmp_path / "lost")
    turned = rank_map(tmp_path / "turned.toml", listed(whole), lambda rank: 7 - rank)
    short = rank_map(tmp_path / "short.toml", [e for e in listed(whole) if e["host"] != "node603"], lambda r: 7 - r)
    plain = rank_map(tmp_path / "plain.toml", listed(whole))
    said = {each: load(path, ranks=each).problems for each in (turned, short, plain)}
    assert ["ranks 2, 3: what" in problem.message for problem in said[turned]] == [True]
    assert ["the rank map gives other numbers" in problem.message for problem in said[short]] == [True]
    assert ["ranks 4, 5 of node603" in problem.message for problem in said[plain]] == [True]
    (path / "run.json").unlink()
    bare = load(path, ranks=plain)
    (problem,) = bare.problems
    assert problem.message.startswith(f"{plain}: 2 of the 8 ranks that it lists are in no report: ranks 4, 5")
    for loaded in (load(path, ranks=turned), bare):
        found = waits(whole, loaded)
        assert wrong(found).is_empty()
        assert found["wait_ns"].count() > 0
    assert run("analyze", path, "--ranks", plain, "--out", tmp_path / "out", "--quiet").code == 2


def test_a_member_missing_from_a_communicator_names_no_peer() -> None:
    """Stages 1 and 2 of three: what stage 2 calls peer 0 is not stage 1."""
    seen = [(0, True, 2), (0, False, 0), (1, True, 0), (1, False, 1)]
    comm = pl.DataFrame(
        {
            "event": range(4), "rank": [each[0] for each in seen], "report": 0, "stream": 7, "start": 0, "end": 10,
            "dur": 10, "comm": 5, "peer": [each[2] for each in seen], "role": "p2p", "group": None,
            "n_sends": [int(each[1]) for each in seen], "n_recvs": [int(not each[1]) for each in seen],
            "send_bytes": 8, "recv_bytes": 8,
        },
        schema_overrides={"rank": pl.Int32, "group": pl.String},
    )  # fmt: skip
    ranks = pl.DataFrame({"rank": [0, 1], "world_rank": [1, 2], "pp_rank": [1, 2], "tp_rank": 0})
    narrow = pl.col("rank").cast(pl.Int32)
    halves = sides(comm.cast({pl.Int32: pl.Int64}).with_columns(narrow), ranks.with_columns(narrow), 3)
    assert halves["channel_source"].null_count() == 4
