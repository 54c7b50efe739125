"""What is said of maps that match nothing, of a run.json that is none, and of traces that no GPU made."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from command import run as command
from conftest import FIXTURES, TP2
from identities import gpus
from simulated import Simulated, make

from nsysk3.analysis.analyze import analyze
from nsysk3.trace.load import load


def table(world: int, **where: object) -> str:
    return "\n".join(["[[rank]]", f"world_rank = {world}", *(f"{key} = {json.dumps(it)}" for key, it in where.items())])


# --- maps


def test_tables_that_match_nothing_are_told(tmp_path: Path) -> None:
    ranks = tmp_path / "ranks.toml"
    trace = gpus(11, 12, host="alpha").write(tmp_path / "r.sqlite")
    tables = [table(0, device=0), table(1, device=1), table(1, host="typo*", device=1)]
    ranks.write_text("\n".join(tables))
    run = load(trace, ranks=ranks)
    assert f"{ranks}: [[rank]] number 3 matches no GPU (host typo*, device 1)" in run.notes
    assert not run.problems
    ranks.write_text("\n".join(tables[:2]))
    assert not [note for note in load(trace, ranks=ranks).notes if "matches no GPU" in note]


def test_a_map_of_which_nothing_matches_ends_with_2(tmp_path: Path) -> None:
    ranks = tmp_path / "ranks.toml"
    ranks.write_text("\n".join(table(rank, report="x", pid=rank) for rank in range(9)))
    trace = gpus(11, 12, host="alpha").write(tmp_path / "r.sqlite")
    ran = command("analyze", trace, "--ranks", ranks, "--out", tmp_path / "out", "-q")
    said = (
        f"nsysk3: {ranks}: [[rank]] number 1 matches no GPU (report x, pid 0); number 2 matches no GPU (report x, "
        "pid 1); number 3 matches no GPU (report x, pid 2); number 4 matches no GPU (report x, pid 3); nor do 5 more, "
        "so nothing of it was used; there is device 0 of alpha, device 1 of alpha\n"
    )
    assert (ran.code, ran.err.count(said)) == (2, 1)


def test_a_map_that_the_markers_contradict_wins_and_is_told(tmp_path: Path) -> None:
    ranks = tmp_path / "ranks.toml"
    ranks.write_text("\n".join(table(device, device=device, pp=device, tp=0) for device in (0, 1)))
    run = load(TP2, ranks=ranks)
    assert run.ranks["pp_rank"].to_list() == [0, 1]
    assert run.notes[0] == (
        f"{ranks}: says otherwise than the reports, and was followed: device 1 of vm is rank 1 (stage 1, TP rank 0), "
        "by its marker rank 1 (stage 0, TP rank 1)"
    )
    ranks.write_text("\n".join(table(device, device=device, pp=0, tp=device) for device in (0, 1)))
    assert not [note for note in load(TP2, ranks=ranks).notes if str(ranks) in note]


def test_a_map_that_is_not_there_is_not_called_bad_toml(tmp_path: Path) -> None:
    for path, why in ((tmp_path / "none.toml", "no such file"), (tmp_path, "cannot be read (Is a directory)")):
        ran = command("analyze", TP2, "--ranks", path)
        assert (ran.code, ran.err) == (2, f"nsysk3: {path}: {why}; --ranks takes a TOML rank map\n")


# --- run.json


@pytest.mark.parametrize(
    ("text", "where"),
    [("[]", ""), ("3", ""), ("null", ""), ('{"topology": 3}', "topology: "), ('{"load": []}', "load: ")],
)
def test_a_manifest_that_is_no_object_is_said_plainly(text: str, where: str, tmp_path: Path) -> None:
    gpus(11).write(tmp_path / "r.sqlite")
    (tmp_path / "run.json").write_text(text)
    ran = command("analyze", tmp_path, "--out", tmp_path / "out")
    assert (ran.code, ran.err) == (2, f"nsysk3: {tmp_path}/run.json: {where}must be a JSON object, {{...}}\n")


# --- simulated


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Simulated:
    return make(tmp_path_factory.mktemp("simulated"), pp=2, tp=1, nodes=2, layers=4, micro_batches=2)


def test_a_bare_simulated_trace_says_so(made: Simulated) -> None:
    traces = sorted((made.path / "nodes").glob("*/trace.sqlite"))
    assert analyze(traces[0]).document.simulated == "simulated"
    assert analyze(traces).document.simulated == "simulated"
    assert analyze(made.path).document.simulated == json.loads((made.path / "run.json").read_text())["simulated"]


def test_a_mixed_run_says_which_are(made: Simulated) -> None:
    assert analyze([TP2, made.path]).document.simulated == (
        "simulated: only 2 of 3 reports (node601/trace, node602/trace)"
    )
    assert analyze(TP2).document.simulated is None


def test_real_traces_with_a_simulated_manifest_are_not_called_simulated(tmp_path: Path) -> None:
    run = Path(shutil.copytree(FIXTURES / "sglang-h200" / "pp1", tmp_path / "run", copy_function=shutil.copyfile))
    manifest = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(manifest | {"simulated": "simulated"}))
    document = analyze(run).document
    assert document.simulated is None
    (problem,) = document.problems
    assert problem.message == f"{run}/run.json: says that the run was simulated, but GPUs made localhost/trace"
