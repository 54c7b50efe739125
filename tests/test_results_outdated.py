"""Saved results whose reports have changed since are used, and one line says so."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from command import run
from conftest import FIXTURES
from exports import EPOCH_NS, GEMM, Export

MARKED = "pp2-small-2024.2"


def export(file: Path, *, after_s: float = 0, kernels: int = 1) -> Path:
    """A small report that was recorded so long after the others."""
    spans = [(100 + 10 * number, 105 + 10 * number) for number in range(kernels)]
    made = Export(epoch_ns=EPOCH_NS + round(after_s * 1e9), duration_us=5_000).gpu(0, cuda=0, uuid=file.stem)
    return made.host("h").kernels(GEMM, spans).write(file)


def analyzed(folder: Path) -> Path:
    assert run("analyze", folder, "-q").code == 0
    return folder


def said(folder: Path) -> str:
    ran = run("report", folder, "--format", "md")
    assert ran.code == 0
    return ran.err


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "add").mkdir()
    export(tmp_path / "add" / "node0.sqlite")
    return analyzed(tmp_path / "add")


def test_a_report_that_came_later_is_named_by_whatever_uses_the_results(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsysk3.cli.browser.show", lambda page: True)
    run("report", folder)
    export(folder / "node1.sqlite")
    line = f"nsysk3: {folder}: its results are older than node1.sqlite: analyze it again\n"
    for command in (("report", folder, "--format", "md"), ("open", folder), ("layers", folder, "--csv")):
        ran = run(*command)
        assert (ran.code, ran.err) == (0, line), command
    assert run("compare", folder, folder).err.startswith(line)
    assert said(analyzed(folder)) == ""


@pytest.mark.parametrize(("other", "time"), [({"after_s": 60}, 2**32), ({"kernels": 2000}, 1)], ids=["run", "size"])
def test_a_report_that_was_replaced_is_named(folder: Path, other: dict[str, int], time: int) -> None:
    trace = folder / "node0.sqlite"
    trace.unlink()
    os.utime(export(trace, **other), (time, time))
    assert "are older than node0.sqlite" in said(folder)


def test_a_report_that_is_gone_is_named_where_others_are_left(folder: Path) -> None:
    export(folder / "node1.sqlite", after_s=0.001)
    analyzed(folder)
    (folder / "node0.sqlite").unlink()
    assert "its results hold node0, gone since: analyze it again" in said(folder)
    (folder / "node1.sqlite").unlink()
    assert said(folder) == ""


def test_a_copy_a_checkout_and_a_new_name_are_no_news(folder: Path, tmp_path: Path) -> None:
    for result in (folder / "analysis").iterdir():
        os.utime(result, (1, 1))
    assert said(folder) == ""
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    (copy / "node0.sqlite").rename(copy / "renamed.sqlite")
    assert said(copy) == ""


def test_the_trace_of_a_run_directory_is_found_from_its_results_too(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FIXTURES / "torch-h200" / "pp2", tmp_path / "run"))
    analyzed(folder)
    assert said(folder) == said(folder / "analysis") == ""
    trace = folder / "nodes" / "localhost" / "trace.sqlite"
    shutil.copyfile(FIXTURES / "torch-h200" / "pp1" / "nodes" / "localhost" / "trace.sqlite", trace)
    line = f"nsysk3: {folder}: its results are older than nodes/localhost/trace.sqlite: analyze it again\n"
    assert said(folder) == said(folder / "analysis") == line


def test_an_export_of_the_same_report_is_no_news_and_another_report_is(tmp_path: Path) -> None:
    folder = tmp_path / "reports"
    folder.mkdir()
    for file in (FIXTURES / "h200").glob(f"{MARKED}*"):
        shutil.copy(file, folder)
    analyzed(folder)
    assert said(folder) == ""
    shutil.copyfile(folder / f"{MARKED}.nsysk3.sqlite", folder / f"{MARKED}.sqlite")
    assert said(folder) == ""
    (folder / f"{MARKED}.sqlite").unlink()
    shutil.copyfile(FIXTURES / "h200" / "tp2-small-2024.2.nsys-rep", folder / f"{MARKED}.nsys-rep")
    assert f"are older than {MARKED}.nsys-rep" in said(folder)


def test_where_nothing_else_tells_a_much_later_time_does(folder: Path) -> None:
    made = (folder / "analysis" / "result.json").stat().st_mtime
    report = folder / "node0.nsys-rep"
    report.write_bytes(b"recorded again")
    for later, news in ((30, False), (600, True)):
        os.utime(report, (made + later, made + later))
        assert ("are older than node0.nsys-rep" in said(folder)) is news


def test_results_elsewhere_may_be_of_anything(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "analysis"
    assert run("analyze", folder, "--out", out, "-q").code == 0
    export(tmp_path / "node7.sqlite")
    assert said(out) == ""
