"""What people ran into, named after where it was reported: exports that lack something or hold what is wrong."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from case_results import US, only
from command import run as command
from conftest import FIXTURES
from exports import ALLREDUCE, GEMM, Export, two_ranks

import nsysk3
from nsysk3.result import Result
from nsysk3.trace.nccl import read_nccl_calls
from nsysk3.trace.nvtx import read_nvtx
from nsysk3.trace.report import open_report

# --- tables and columns that may not be there


def test_case_nsys_ai_291_kernels_and_strings_alone_are_enough(tmp_path: Path) -> None:
    export = Export(epoch_ns=None).kernel(GEMM, 0, 100).kernel(ALLREDUCE, 80, 150, stream=20)
    export.without("ANALYSIS_DETAILS")
    path = export.write(tmp_path / "bare.sqlite")
    with closing(sqlite3.connect(path)) as connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    assert tables == {"StringIds", "CUPTI_ACTIVITY_KIND_KERNEL"}
    ran = command("analyze", path, "--out", tmp_path / "out")
    assert ran.code == 0
    rank = only(Result.load(tmp_path / "out"))
    assert (rank.window_ns, rank.compute_ns, rank.comm_ns, rank.overlap_ns) == (150 * US, 100 * US, 70 * US, 20 * US)
    assert (rank.host, rank.gpu_uuid, rank.pp_rank, rank.rank_source) == ("bare", None, None, "inferred")
    assert "no session start time" in ran.out


def test_case_nvprof_tools_3_no_kernel_table_is_said_and_not_a_crash(tmp_path: Path) -> None:
    path = Export().nvtx("layer_0", 0, 100).meta("EXPORT_SCHEMA_VERSION", "3.11.1").write(tmp_path / "nvtx.sqlite")
    ran = command("analyze", path)
    assert ran.code == 2
    assert ran.err.count("\n") == 1
    assert f"{path}: no GPU work in this trace" in ran.err


def test_case_nvprof_tools_3_any_other_sqlite_is_not_an_export(tmp_path: Path) -> None:
    path = Export(epoch_ns=None).without("ANALYSIS_DETAILS").row("books", title="x").write(tmp_path / "books.sqlite")
    ran = command("analyze", path)
    assert (ran.code, ran.out) == (2, "")
    assert f"{path}: not an Nsight Systems export" in ran.err


@pytest.mark.parametrize(
    "table", ["NVTX_EVENTS", "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "StringIds"]
)
def test_case_nsys_ai_294_versioned_table_names(tmp_path: Path, table: str) -> None:
    plain = nsysk3.load(two_ranks().write(tmp_path / "plain" / "r.sqlite"))
    other = nsysk3.load(two_ranks().renamed(table, f"{table}_V2").write(tmp_path / "v2" / "r.sqlite"))
    for frame in ("ranks", "events", "names", "nccl_calls"):
        assert getattr(plain, frame).equals(getattr(other, frame))
    assert plain.nccl_calls.height == 8
    assert plain.events["api_start"].null_count() == 0


def test_case_nsys_ai_101_nvtx_without_text_ids(tmp_path: Path) -> None:
    export = Export().nvtx("ncclAllReduce", 0, 10).nvtx("layer_0", 0, 20).without("NVTX_EVENTS", "textId")
    export.string("ncclAllReduce")  # among the strings for another reason
    report = open_report(export.write(tmp_path / "r.sqlite"), "r")
    assert read_nvtx(report)["name"].to_list() == ["layer_0", "ncclAllReduce"]
    assert read_nccl_calls(report)["op"].to_list() == ["ncclAllReduce"]


def test_case_trimmed_exports_unknown_names_are_shown_as_unknown(analyzed: Any) -> None:
    # GIVEN a kernel whose name is not among the strings, and one without any name
    export = Export().kernel(GEMM, 0, 100).kernel(None, 100, 150).kernel(None, 150, 160)
    export.rows["CUPTI_ACTIVITY_KIND_KERNEL"][1]["shortName"] = 999
    result = analyzed(export)
    assert set(result.kernels["name"].to_list()) == {GEMM, "[unknown #999]", "[unknown]"}
    assert only(result).unclassified_share == 60 / 160


# --- damaged files and warnings


@pytest.mark.parametrize("length", [0, 7, 16, 100, 4096, 300_000])
def test_case_truncated_files_are_one_line_and_the_others_go_on(tmp_path: Path, length: int) -> None:
    bad = tmp_path / "bad.sqlite"
    bad.write_bytes((FIXTURES / "h200" / "graph.sqlite").read_bytes()[:length])
    alone = command("analyze", bad)
    assert (alone.code, alone.out, alone.err.count("\n")) == (2, "", 1)
    assert str(bad) in alone.err
    good = two_ranks().write(tmp_path / "good.sqlite")
    both = command("analyze", bad, good, "--out", tmp_path / "out")
    assert both.code == 2
    document = Result.load(tmp_path / "out").document
    assert [problem.path for problem in document.problems] == [str(bad)]
    assert [rank.report for rank in document.ranks] == ["good", "good"]


def test_case_truncated_files_a_wal_beside_is_left_alone_and_said(tmp_path: Path) -> None:
    # A writer that is killed leaves its last rows in a -wal file; read-only cannot merge it, and must not try.
    path = two_ranks().write(tmp_path / "r.sqlite")
    writer = (
        f"import os, sqlite3; c = sqlite3.connect({str(path)!r}); c.execute('pragma journal_mode=wal');"
        "c.execute('delete from CUPTI_ACTIVITY_KIND_KERNEL'); c.commit(); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", writer], check=True)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert "r.sqlite-wal" in before
    result = nsysk3.analyze(path)
    assert any("r.sqlite-wal lies beside the file" in note and "not merged" in note for note in result.document.notes)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_case_nemo_rl_4090_raw_captures_are_named_and_the_others_go_on(tmp_path: Path) -> None:
    (tmp_path / "a.qdstrm").write_bytes(b"raw")
    two_ranks().write(tmp_path / "b.sqlite")
    ran = command("analyze", tmp_path, "--out", tmp_path / "out")
    assert ran.code == 2
    (line,) = [line for line in ran.err.splitlines() if "a.qdstrm" in line]
    assert "QdstrmImporter -i a.qdstrm" in line
    assert len(Result.load(tmp_path / "out").document.ranks) == 2


def test_case_quent_473_impossible_times_are_dropped_and_said(analyzed: Any, tmp_path: Path) -> None:
    export = Export().kernel(GEMM, 0, 100).kernel(GEMM, 50, 40).kernel(GEMM, 1, 1).memcpy(30, 20)
    kernels = export.rows["CUPTI_ACTIVITY_KIND_KERNEL"]
    kernels.append({**kernels[0], "end": 0})
    kernels.append({**kernels[0], "start": 0})
    kernels.append({**kernels[0], "start": None})
    export.nvtx("fine", 0, 100).nvtx("backwards", 100, 90)
    result = analyzed(export)
    rank = only(result)
    assert (rank.dropped_rows, rank.kernel_count, rank.compute_ns, rank.copy_ns) == (5, 2, 100 * US, 0)
    assert any("5 GPU rows dropped" in note for note in result.document.notes)
    ranges = read_nvtx(open_report(tmp_path / "case.sqlite", "r"))
    assert ranges["name"].to_list() == ["fine"]


def test_case_nvtx_0x0104_the_warning_in_the_report_is_shown(tmp_path: Path) -> None:
    text = "NVTX payload extension is incompatible. Provided compatibility ID 260 != 259"
    export = Export().kernel(GEMM, 0, 100).diagnostic(text).diagnostic("harmless", severity=1)
    export.diagnostic("Not all NVTX events might have been collected.").diagnostic("No CUDA events collected. Really?")
    ran = command("analyze", export.write(tmp_path / "r.sqlite"))
    notes = [line for line in ran.out.splitlines() if line.startswith("note:")]
    assert [note for note in notes if text in note]
    assert not [note for note in notes if "harmless" in note or "collected" in note]
