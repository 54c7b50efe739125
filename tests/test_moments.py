"""When reports were recorded: two runs in one folder, and one run compared with itself."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from command import run
from conftest import FIXTURES, TP2
from exports import EPOCH_NS, GEMM, Export

from nsysk3.analysis.analyze import analyze
from nsysk3.compare import compare
from nsysk3.report.catalogue import catalogue
from nsysk3.result import Result
from nsysk3.trace.load import load
from nsysk3.trace.moments import span_in_words

SAME = "both runs are the same capture"
APART = " were not recorded at the same time: if these are different runs, analyse each alone"


def recorded(folder: Path, *begun_s: float, hosts: str = "hhhh", clock: bool = True) -> list[str]:
    """The notes of reports of a second each that began then."""
    folder.mkdir(exist_ok=True)
    for number, (seconds, host) in enumerate(zip(begun_s, hosts, strict=False)):
        epoch = EPOCH_NS + round(seconds * 1e9) if clock else None
        export = Export(epoch_ns=epoch, duration_us=0).gpu(0, cuda=0, uuid=f"u{number}").host(host)
        export.kernel(GEMM, 100, 200).write(folder / f"r{number}.sqlite")
    return [note for note in load(folder).notes if APART in note]


def test_two_runs_in_one_folder_are_told(tmp_path: Path) -> None:
    for name in ("pp2-lw", "tp2-lw"):
        shutil.copy(FIXTURES / "sglang-h200" / f"{name}.sqlite", tmp_path)
    said = f"tp2-lw and pp2-lw (5 min apart){APART}"
    assert said in load(tmp_path).notes
    assert "不是同时采集的" in catalogue("zh").said(said)[0]


def test_reports_of_one_host_with_nothing_recorded_between_them(tmp_path: Path) -> None:
    assert recorded(tmp_path / "a", 0, 0.5, 1.2) == []
    assert recorded(tmp_path / "b", 0, 30, hosts="hg") == []
    assert recorded(tmp_path / "c", 0, 30, clock=False) == []
    assert recorded(tmp_path / "d", 100, 0, 0.5) == [f"r2 and r0 (98 s apart){APART}"]
    (note,) = recorded(tmp_path / "e", 0, 31, 7233)
    assert note == f"r0 and r1 (30 s apart), r1 and r2 (2 h apart){APART}"
    assert catalogue("zh").said(note)[0].startswith("r0 与 r1（相隔 30 s）、r1 与 r2（相隔 2 h）不是")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.0001, "1 ms"), (0.02, "20 ms"), (0.5, "0.5 s"), (18, "18 s"), (300, "5 min"), (7200, "2 h"), (200_000, "2 d")],
)
def test_spans_in_words(seconds: float, words: str) -> None:
    assert span_in_words(seconds * 1e9) == words


def test_a_run_against_itself_and_against_a_copy_is_told_in_every_format(tmp_path: Path) -> None:
    copy = Path(shutil.copy(TP2, tmp_path / "copy.sqlite"))
    for other, form in ((TP2, "text"), (copy, "md")):
        ran = run("compare", TP2, other, "--format", form)
        assert (ran.code, ran.out.count(SAME)) == (0, 2)
    page = tmp_path / "c.html"
    assert run("compare", TP2, copy, "--format", "html", "--lang", "zh", "--out", page).code == 0
    assert page.read_text("utf-8").count("两次运行是同一次采集") >= 2


def test_of_several_runs_those_that_are_the_same_are_named() -> None:
    one, other = analyze(TP2), analyze(FIXTURES / "h200" / "pp2.sqlite")
    said = compare(one, [other, one], ["a", "b", "c"]).verdict[1]
    assert "a and c are the same capture" in said
    assert "a 与 c 是同一次采集" in catalogue("zh").said(said)[0]
    assert "same capture" not in " ".join(compare(one, [other], ["a", "b"]).verdict)


def test_other_windows_of_one_capture_are_it_and_other_work_of_one_moment_is_not() -> None:
    one = analyze(TP2)
    assert SAME in compare(one, [analyze(TP2, window="0:0.1s")], ["a", "b"]).verdict[1]
    # Simulated runs of one seed begin and may end in the same moment, whatever was done in them.
    ranks = [rank.model_copy(update={"kernel_total_ns": rank.kernel_total_ns + 1}) for rank in one.document.ranks]
    other = Result(one.document.model_copy(update={"ranks": ranks}), one.tables)
    assert SAME not in compare(one, [other], ["a", "b"]).verdict[1]


def test_reports_that_do_not_say_when_are_none_of_one_capture() -> None:
    one = analyze(TP2)
    reports = [report.model_copy(update={"start_utc_ns": None, "end_utc_ns": None}) for report in one.document.reports]
    silent = Result(one.document.model_copy(update={"reports": reports}), one.tables)
    assert SAME not in compare(silent, [silent], ["a", "b"]).verdict[1]
