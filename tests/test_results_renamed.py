"""Reports that were renamed or copied, and run.json put in place after the analysis: what is said, and what is not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from command import run
from conftest import FIXTURES

import nsysk3

SGLANG = FIXTURES / "sglang-h200"


def test_a_renamed_report_is_one_report_and_no_news(nsys: Path, tmp_path: Path) -> None:
    there = tmp_path / "runs"
    there.mkdir()
    shutil.copy(FIXTURES / "h200" / "pp2-small-2024.2.nsys-rep", there / "a.nsys-rep")
    assert run("analyze", there, "--quiet").code == 0
    (there / "a.nsys-rep").rename(there / "b.nsys-rep")
    assert (there / "a.nsysk3.sqlite").exists()
    listed = run("layers", there)
    assert (listed.code, listed.err) == (0, "")
    result = nsysk3.analyze(there)
    assert [report.name for report in result.document.reports] == ["b"]
    # Without its report an export of ours is all there is.
    (there / "b.nsys-rep").unlink()
    (there / "b.nsysk3.sqlite").unlink()
    assert [report.name for report in nsysk3.analyze(there).document.reports] == ["a"]


def test_one_capture_twice_in_a_folder_is_called_so(tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copy(SGLANG / "pp2-markers.sqlite", tmp_path / f"{name}.sqlite")
    notes = nsysk3.analyze(tmp_path).document.notes
    assert (
        "the same GPUs are in several reports (a, b) of the same moments: they are one capture; analyse one of them"
        in notes
    )


@pytest.mark.parametrize("first", ["pp2", "pp1"])
def test_another_run_json_makes_results_old(tmp_path: Path, first: str) -> None:
    """It is told though the reports are as they were; what was wrong then is said as of then."""
    here = tmp_path / "pp1"
    shutil.copytree(SGLANG / "pp1", here, ignore=shutil.ignore_patterns("analysis"))
    shutil.copy(SGLANG / first / "run.json", here / "run.json")
    assert run("analyze", here, "--quiet").code == (0 if first == "pp1" else 2)
    shutil.copy(SGLANG / ("pp1" if first == "pp2" else "pp2") / "run.json", here / "run.json")
    said = run("layers", here)
    lines = said.err.splitlines()
    assert lines[0] == f"nsysk3: {here}: its results are older than run.json: analyze it again"
    assert [line.startswith(f"nsysk3: when analysed: {here}") for line in lines[1:]] == [True] * (first == "pp2")


@pytest.mark.parametrize("fault", ["imbalanced-stage=1:inf", "straggler=0:nan", "lost-kernels=nan"])
def test_a_fault_is_of_a_finite_size(tmp_path: Path, fault: str) -> None:
    done = run("simulate", "--pp", 2, "--tp", 2, "--out", tmp_path / "s", "--fault", fault)
    assert done.code == 2
    assert "not a finite number" in done.err
    assert not (tmp_path / "s").exists()
