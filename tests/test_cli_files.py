"""What ``nsysk3 analyze`` writes: JSON by its schema, tables, and nothing half."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import polars as pl
import pytest
from command import run as command
from conftest import FIXTURES, GRAPH, ROOT, TP2
from exports import two_ranks
from report_runs import real

from nsysk3.result import Result, ResultDocument

SCHEMA = ROOT / "docs" / "result.schema.json"
# Point 7 of issue 2, word for word.
COLUMNS = [
    "host", "report", "pid", "device_id", "gpu_uuid", "world_rank", "pp_rank", "tp_rank", "rank_source", "stable",
    "reason", "window_ns", "compute_ns", "comm_ns", "fused_ns", "copy_ns", "overlap_ns", "overlap_ratio",
    "exposed_comm_ns", "exposed_comm_share", "idle_ns", "allreduce_count", "allreduce_total_ns", "allreduce_p50_ns",
    "p2p_count", "p2p_total_ns", "unclassified_share",
]  # fmt: skip


def validated(document: dict[str, Any]) -> dict[str, Any]:
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(document, schema, cls=jsonschema.Draft202012Validator)
    return document


def test_the_schema_in_docs_is_the_one_of_the_code() -> None:
    current = json.dumps(ResultDocument.model_json_schema(), indent=1) + "\n"
    if os.environ.get("NSYSK3_UPDATE"):
        SCHEMA.write_text(current)
    assert SCHEMA.read_text() == current, "NSYSK3_UPDATE=1 pytest tests/test_cli_files.py -k schema writes it"


@pytest.mark.parametrize("trace", ["h200/tp2", "h200/pp2-two-reports", "h200/graphwhole", "sglang-h200/pp2-lw"])
def test_json_is_valid_by_the_schema_and_is_result_json(trace: str, tmp_path: Path) -> None:
    path = FIXTURES / trace if (FIXTURES / trace).is_dir() else FIXTURES / f"{trace}.sqlite"
    ran = command("analyze", path, "--json", "--out", tmp_path)
    assert (ran.code, ran.err) == (0, f"results written to {tmp_path}/\n")
    document = validated(json.loads(ran.out, parse_constant=pytest.fail))
    assert (tmp_path / "result.json").read_text() == ran.out
    assert len(document["ranks"]) == 2
    assert ResultDocument.model_validate(document) == Result.load(tmp_path).document


def test_json_names_inputs_that_gave_no_rank_and_is_still_valid(tmp_path: Path) -> None:
    (tmp_path / "bad.sqlite").write_bytes(b"")
    two_ranks().write(tmp_path / "good.sqlite")
    ran = command("analyze", tmp_path, "--json")
    assert ran.code == 2
    document = validated(json.loads(ran.out))
    (problem,) = document["problems"]
    assert problem["path"] == str(tmp_path / "bad.sqlite")
    assert "empty file" in problem["message"]


def test_files_have_the_columns_of_the_issue_in_front(tmp_path: Path) -> None:
    ran = command("analyze", TP2, "--out", tmp_path)
    assert (ran.code, ran.err) == (0, f"results written to {tmp_path}/\n")
    with (tmp_path / "rank_metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0])[: len(COLUMNS)] == COLUMNS
    assert pl.read_parquet(tmp_path / "rank_metrics.parquet").columns[: len(COLUMNS)] == COLUMNS
    assert [(row["world_rank"], row["pp_rank"], row["tp_rank"], row["rank_source"]) for row in rows] == [
        ("0", "0", "0", "marker"), ("1", "0", "1", "marker"),
    ]  # fmt: skip
    assert (rows[0]["compute_ns"], rows[0]["allreduce_count"]) == ("236636862", "256")
    with (tmp_path / "nsys_device_metrics.csv").open(newline="") as file:
        devices = list(csv.DictReader(file))
    assert [device["gpu"] for device in devices] == [row["gpu_uuid"] for row in rows]
    assert [device["compute_ns"] for device in devices] == [row["compute_ns"] for row in rows]
    result = Result.load(tmp_path)
    assert {file.stem for file in tmp_path.glob("*.parquet")} == set(result.tables)


def test_csv_survives_names_with_commas_quotes_and_newlines(tmp_path: Path) -> None:
    path = two_ranks().host('a "host", with\na line').write(tmp_path / "in" / 're"port,.sqlite')
    command("analyze", path, "--out", tmp_path / "out")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "out" / "rank_metrics.csv").read_text())))
    assert [row["host"] for row in rows] == ['a "host", with\na line'] * 2
    assert {row["report"] for row in rows} == {'re"port,'}


def test_results_can_be_written_over_and_nothing_half_is_left(tmp_path: Path) -> None:
    for trace in (TP2, GRAPH):
        assert command("analyze", trace, "--out", tmp_path / "out").code == 0
    assert Result.load(tmp_path / "out").rank_metrics.equals(real(GRAPH).rank_metrics)
    assert not [file.name for file in (tmp_path / "out").iterdir() if file.name.startswith(".")]


def test_out_that_cannot_be_written_is_exit_code_3(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("mine")
    for out in (taken, taken / "below"):
        ran = command("analyze", GRAPH, "--out", out)
        assert (ran.code, ran.err.count("\n")) == (3, 1)
        assert f"{out}: results cannot be written here" in ran.err
    assert taken.read_text() == "mine"


def test_no_room_for_the_results_is_exit_code_3_and_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "import nsysk3.analysis.analyze, nsysk3.report.terminal\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))\n"
        "from nsysk3.cli import main; main()"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, "analyze", str(GRAPH), "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert (ran.returncode, ran.stderr.count("\n")) == (3, 1), ran.stderr
    assert f"{tmp_path / 'out'}: results cannot be written here" in ran.stderr
    assert not (tmp_path / "out").exists()
