"""``nsysk3 export``."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from command import run as command
from conftest import FIXTURES


@pytest.mark.nsys
def test_export_prints_where_each_export_is_and_makes_it_once(nsys: Path, small_reports: Path) -> None:
    reports = sorted(small_reports.iterdir())
    first = command("export", *reports)
    made = [report.with_name(f"{report.stem}.nsysk3.sqlite") for report in reports]
    assert first == (0, "".join(f"{path}\n" for path in made), "")
    stamps = [path.stat().st_mtime_ns for path in made]
    assert command("export", *reports) == first
    assert [path.stat().st_mtime_ns for path in made] == stamps
    assert command("analyze", made[0]).code == 0
    parquet = command("export", reports[0], "--type", "parquetdir", "--out", small_reports / "tables")
    assert parquet == (0, f"{small_reports / 'tables'}\n", "")
    assert command("analyze", small_reports / "tables").code == 0
    again = command("export", reports[0], "--type", "parquetdir", "--out", small_reports / "tables")
    assert (again.code, again.out) == (2, "")
    assert "--force" in again.err
    assert command("export", *reports, "--out", small_reports / "x").code == 2


@pytest.mark.nsys
def test_export_goes_on_after_a_report_that_fails(nsys: Path, small_reports: Path) -> None:
    newer = Path(shutil.copy(FIXTURES / "h200" / "tp2-small-2025.3.nsys-rep", small_reports / "newer.nsys-rep"))
    good = small_reports / "tp2-small-2024.2.nsys-rep"
    ran = command("export", newer, small_reports / "none.nsys-rep", good)
    assert ran.code == 3
    assert ran.out == f"{good.with_name('tp2-small-2024.2.nsysk3.sqlite')}\n"
    assert [line.split(": ")[1] for line in ran.err.splitlines()] == [str(newer), str(small_reports / "none.nsys-rep")]


def test_export_without_an_nsys_is_exit_code_3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("NSYSK3_NSYS", raising=False)
    ran = command("export", FIXTURES / "h200" / "tp2-small-2024.2.nsys-rep")
    assert (ran.code, ran.out, ran.err.count("\n")) == (3, "", 1)
    assert "no nsys found" in ran.err
