"""Which path is taken: only one that was measured, right and faster."""

from __future__ import annotations

import copy
import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from nsysk3.errors import InputError
from nsysk3.ops import dispatch
from nsysk3.ops.dispatch import BASELINE, Table, find_table, read_table
from nsysk3.ops.dispatch_table import MARGIN, main, make_table

FACTS = {"device": "NVIDIA TestGPU", "world": 2, "date": "2026-11-30", "command": "ops_bench.py", "torch": "2.11"}
CLEAN = [{"section": "correct", "cases": 70, "failures": 0}, {"section": "soak", "differ": 0, "healthy": True}]


def baseline(tokens: int, rows: int, us: Any) -> dict[str, Any]:
    return {"section": "baselines", "P": 2, "M": tokens, "nvb": rows, "nccl_rs": 1.0, "nccl_k0": us}


def pull(tokens: int, rows: int, us: float, path: str = "pull") -> dict[str, Any]:
    return {"section": "k1", "path": path, "P": 2, "M": tokens, "nvb": rows, "us": us}


def document(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"facts": FACTS, "rows": [*CLEAN, *rows]}


def table(paths: dict[tuple[int, int], str]) -> Table:
    return Table("gpu", 2, {"date": "2026-11-30"}, {"rs_attn_res": paths})


GRID = table({(16, 4): "push", (16, 8): "push", (256, 4): "pull", (256, 8): "pull", (1024, 4): "pull", (1024, 8): "nccl"})  # fmt: skip  # noqa: E501


@pytest.mark.parametrize(
    ("tokens", "rows", "path", "why"),
    [
        (16, 8, "push", "measured fastest (2026-11-30)"),
        (100, 6, "pull", "measured fastest (2026-11-30)"),  # all four around it, as the largest says
        (1024, 8, "nccl", "measured no faster"),
        (1024, 6, "nccl", "cases measured around this one disagree"),
        (512, 8, "nccl", "cases measured around this one disagree"),
        (8, 4, "nccl", "not measured for so many tokens or bank rows"),
        (2048, 4, "nccl", "not measured for so many tokens or bank rows"),
        (256, 3, "nccl", "not measured for so many tokens or bank rows"),
    ],
)
def test_only_what_was_measured_around_a_case_counts(tokens: int, rows: int, path: str, why: str) -> None:
    choice = GRID.choose("rs_attn_res", tokens, rows)
    assert (choice.path, choice.reason) == (path, why)


def test_a_hole_in_what_was_measured_is_the_baseline() -> None:
    holed = table({(16, 4): "pull", (256, 8): "pull", (256, 4): "pull"})
    assert holed.choose("rs_attn_res", 100, 6).path == BASELINE
    assert holed.choose("rs_attn_res", 256, 6).path == "pull"
    assert holed.choose("attn_res_ag", 256, 6).path == BASELINE


def test_the_fastest_is_named_and_every_time_is_kept() -> None:
    made = make_table(
        document(
            baseline(8192, 8, 500.0), pull(8192, 8, 240.0), pull(8192, 8, 220.0),
            pull(8192, 8, 260.0, "push"), baseline(16, 8, 13.0),
            {"section": "k1_graph", "P": 2, "M": 16, "nvb": 8, "sets": 4, "push": 8.0, "pull": 9.0},
            baseline(64, 8, 10.0), pull(64, 8, 10.0 * (1 - MARGIN)),
            baseline(32, 8, "RuntimeError('no')"), pull(32, 8, 1.0),
            pull(4096, 8, 1.0),
            {"section": "k1_graph_floor", "what": "a kernel", "us": 3.0}, {"section": "k0", "skipped": "no time left"},
        )
    )  # fmt: skip
    cells = {(cell["tokens"], cell["rows"]): cell for cell in made["operations"]["rs_attn_res"]}
    assert set(cells) == {(8192, 8), (16, 8), (64, 8)}  # both sides measured
    assert cells[8192, 8]["path"] == "pull"
    assert cells[8192, 8]["us"] == {"nccl": 500.0, "pull": 220.0, "push": 260.0}
    assert cells[16, 8] == {"tokens": 16, "rows": 8, "path": "push", "us": {"nccl": 13.0, "push": 8.0, "pull": 9.0}}
    assert cells[64, 8]["path"] == "nccl"  # within what repeats scatter
    assert made["source"] == {key: FACTS[key] for key in ("date", "command", "torch")}
    assert read_table(made).choose("rs_attn_res", 8192, 8).path == "pull"


def test_gemm_and_gather() -> None:
    plan = {"section": "k2", "what": "K2", "M": 8192, "nvb": 8, "of_gemm": 1.1, "error": "4.0e-03", "healthy": True}
    gather = {"section": "k3", "M": 8192, "nvb": 8, "us": 200.0, "k0_nccl": 300.0, "same": True}
    made = make_table(
        document(
            {"section": "k2", "M": 8192, "nvb": 8, "what": "GEMM alone", "us": 1000.0},
            {"section": "k2", "M": 8192, "nvb": 8, "what": "GEMM, then K1", "us": 1200.0},
            {**plan, "us": 1100.0}, {**plan, "us": 900.0, "error": "4.0e-02"}, {**plan, "us": 800.0, "healthy": False},
            {**plan, "us": 700.0, "error": "nan"}, gather, {**gather, "M": 64, "same": False},
        )
    )["operations"]  # fmt: skip
    (cell,) = made["linear_rs_attn_res"]
    assert cell["us"] == {"nccl": 1200.0, "push": 1100.0}
    assert [(cell["tokens"], cell["path"]) for cell in made["attn_res_ag"]] == [(8192, "push")]


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"section": "correct", "skipped": "no time left"}],
        [{"section": "correct", "cases": 3, "failures": 1}],
        [CLEAN[0], {"section": "soak", "differ": 2, "healthy": True}],
        [CLEAN[0], {"section": "soak", "differ": 0, "healthy": False}],
        [CLEAN[0], {"section": "soak", "failed": "RuntimeError"}],
    ],
)
def test_no_table_of_a_run_with_wrong_results(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    unclean = {"facts": FACTS, "rows": [*rows, baseline(16, 8, 10.0), pull(16, 8, 5.0)]}
    with pytest.raises(InputError):
        make_table(unclean)
    source = tmp_path / "ops.json"
    source.write_text(json.dumps(unclean))
    assert main([str(source), str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()


def test_a_table_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip  # noqa: E501
    source = tmp_path / "ops.json"
    source.write_text(json.dumps(document(baseline(16, 8, 10.0), pull(16, 8, 5.0))))
    assert main([str(source), str(tmp_path / "tables")]) == 0
    assert Path(capsys.readouterr().out.strip()).name == "nvidia-testgpu-x2.json"
    assert find_table("NVIDIA TestGPU", 2) is None
    monkeypatch.setenv("NSYSK3_DISPATCH", str(tmp_path / "tables"))
    found = find_table("NVIDIA TestGPU", 2)
    assert found is not None
    assert found.choose("rs_attn_res", 16, 8).path == "pull"
    assert find_table("NVIDIA TestGPU", 4) is None
    assert main([]) == 2
    assert main([str(tmp_path / "nowhere.json")]) == 2


def shipped() -> list[Any]:
    folder = resources.files("nsysk3.ops") / "dispatch"
    return [each for each in folder.iterdir() if each.name.endswith(".json")] if folder.is_dir() else []


@pytest.mark.parametrize("file", shipped() or [None], ids=str)
def test_tables_that_are_shipped_hold_to_their_times(file: Any) -> None:
    if file is None:
        pytest.skip("no table was measured yet")
    said = json.loads(file.read_text("utf-8"))
    assert said["source"].keys() >= {"date", "command"}
    for cells in copy.deepcopy(said["operations"]).values():
        for cell in cells:
            times = cell["us"]
            base = times.pop("nccl")
            best = min(times, key=lambda path: times[path])
            wins = times[best] < base * (1 - MARGIN)
            assert cell["path"] == (best if wins else dispatch.BASELINE)
    assert find_table(said["device"], said["world"]) is not None
    record = Path(__file__).parent.parent / "benchmarks" / "results" / said["source"]["record"]
    made = make_table(json.loads(record.read_text("utf-8")))
    made["source"]["record"] = record.name
    assert said == made


@pytest.mark.parametrize(
    ("operation", "tokens", "rows", "path"),
    [
        ("rs_attn_res", 16, 8, "push"), ("rs_attn_res", 8192, 8, "pull"), ("rs_attn_res", 8192, 2, "push"),
        ("rs_attn_res", 16384, 8, "nccl"), ("linear_rs_attn_res", 6000, 4, "push"),
        ("linear_rs_attn_res", 8192, 8, "nccl"), ("linear_rs_attn_res", 8192, 6, "nccl"),
        ("attn_res_ag", 100, 3, "push"),
    ],
)  # fmt: skip
def test_what_two_h200_take(operation: str, tokens: int, rows: int, path: str) -> None:
    table = find_table("NVIDIA H200", 2)
    assert table is not None
    assert table.choose(operation, tokens, rows).path == path
