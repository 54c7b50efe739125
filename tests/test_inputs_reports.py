"""Reports among the inputs, which a real nsys exports."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from command import run as command
from conftest import FIXTURES
from input_files import contents, small

import nsysk3


@pytest.mark.nsys
def test_every_kind_of_export_gives_the_same_numbers(nsys: Path, tmp_path: Path) -> None:
    for name, kinds in {
        "tp2-small-2024.2": ("sqlite", "parquetdir", "arrowdir"),
        "pp2-small-2024.2": ("sqlite", "arrowdir"),
    }.items():
        report = FIXTURES / "h200" / f"{name}.nsys-rep"
        results = []
        for kind in kinds:
            made = tmp_path / f"{name}.{kind}"
            command_line = [nsys, "export", f"--type={kind}", f"--output={made}", "--force-overwrite=true", report]
            subprocess.run(command_line, check=True, capture_output=True, stdin=subprocess.DEVNULL)
            results.append(nsysk3.analyze(made))
            assert results[-1].document.reports[0].kind == kind
        for other in results[1:]:
            tables = dict(results[0].tables)
            for table, expected in tables.items():
                drop = [column for column in ("report",) if column in expected.columns]
                assert other.tables[table].drop(drop).equals(expected.drop(drop)), (name, table)


@pytest.mark.nsys
def test_reports_are_exported_once_and_left_alone(nsys: Path, small_reports: Path) -> None:
    before = contents(small_reports)
    first = command("analyze", small_reports, "--json")
    assert first.code == 0
    after = contents(small_reports)
    assert {name: after[name] for name in before} == before
    made = set(after) - set(before)
    assert {name for name in made if not name.startswith("analysis/")} == {
        f"{name}-small-2024.2.nsysk3.sqlite{note}" for name in ("tp2", "pp2") for note in ("", ".json")
    }
    again = command("analyze", small_reports, "--json")
    assert again == first
    unchanged = contents(small_reports)
    assert {name: unchanged[name] for name in after if "analysis" not in name} == {
        name: after[name] for name in after if "analysis" not in name
    }


@pytest.mark.nsys
def test_a_report_that_is_too_new_is_named_and_the_others_go_on(nsys: Path, tmp_path: Path) -> None:
    newer = tmp_path / "newer.nsys-rep"
    shutil.copy(FIXTURES / "h200" / "tp2-small-2025.3.nsys-rep", newer)
    alone = command("analyze", newer)
    assert (alone.code, alone.out, alone.err.count("\n")) == (3, "", 1)
    assert str(newer) in alone.err
    assert "2024.2.3" in alone.err
    small(tmp_path / "good.sqlite")
    both = command("analyze", tmp_path)
    assert both.code == 2
    assert "1 rank," in both.out
    assert str(newer) in both.err


def test_a_report_without_any_nsys_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("NSYSK3_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("NSYSK3_NSYS", raising=False)
    report = Path(shutil.copy(FIXTURES / "h200" / "tp2-small-2024.2.nsys-rep", tmp_path / "r.nsys-rep"))
    ran = command("analyze", report)
    assert (ran.code, ran.out, ran.err.count("\n")) == (3, "", 1)
    assert "--nsys" in ran.err
    # with another input that can be read, the run goes on
    small(tmp_path / "good.sqlite")
    both = command("analyze", tmp_path)
    assert both.code == 2
    assert "1 rank," in both.out
    assert str(report) in both.err


@pytest.mark.parametrize("workers", [(), ("--workers", 2)])
def test_a_missing_nsys_is_said_once_for_all_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: tuple[str, ...]
) -> None:
    monkeypatch.setenv("NSYSK3_NSYS", "/nowhere/nsys")
    for name in ("tp2-small-2024.2.nsys-rep", "pp2-small-2024.2.nsys-rep"):
        shutil.copy(FIXTURES / "h200" / name, tmp_path)
    done = command("analyze", tmp_path, "-q", *workers)
    assert (done.code, done.err.count("\n"), done.err.count("no such program")) == (3, 1, 1)
    assert "and 1 more: $NSYSK3_NSYS /nowhere/nsys" in done.err
