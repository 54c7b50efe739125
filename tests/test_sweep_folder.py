"""What of a sweep lies on the disk: written whole, read back, and refused with its place."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
from command import run
from conftest import FIXTURES, PUBLISHED
from hypothesis import given
from hypothesis import strategies as st

from nsysk3.errors import InputError, MissingToolError
from nsysk3.run.config import Load
from nsysk3.run.nccl_log import read_nccl_log
from nsysk3.sweep import folder as folder_module
from nsysk3.sweep.folder import Folder, Point, Repeat
from nsysk3.sweep.matrix import Cell, Layout
from nsysk3.sweep.memory import peak_of, read_snapshot
from nsysk3.sweep.merge import read_sweep
from nsysk3.sweep.nccl_table import domain_table, read_csv
from nsysk3.sweep.prepare import new_run_id
from nsysk3.sweep.repeat import repeat_row

texts = st.text(st.characters(codec="utf-8", exclude_characters="\x00\r"), max_size=40)
numbers = st.none() | st.floats(0, 1e9).map(lambda value: round(value, 6))


@given(st.builds(
    Repeat, pp=st.integers(1, 64), tp=st.integers(1, 64), ep=st.integers(1, 8), concurrency=st.integers(1, 99),
    repeat=st.integers(1, 9), status=st.sampled_from(["done", "failed"]), requests=st.integers(1, 99),
    completed=st.integers(0, 99), errors=st.integers(0, 9), input_tps=numbers, ttft_p50_ms=numbers,
    cause=st.none() | texts.filter(bool),
))  # fmt: skip
def test_rows_come_back_as_they_were_written(tmp_path_factory: pytest.TempPathFactory, row: Repeat) -> None:
    folder = Folder(tmp_path_factory.mktemp("rows"))
    folder.keep_results([row])
    assert folder.results() == [row]


def test_a_write_that_is_cut_short_leaves_the_table_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(tmp_path)
    rows = [Repeat(1, 1, 1, 8, number, "done", 4, 4, 0, input_tps=float(number)) for number in (1, 2)]
    folder.keep_results(rows[:1])
    before = (tmp_path / "results.csv").read_bytes()

    def killed(_: object, __: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(MissingToolError):
            folder.keep_results(rows)
    assert (tmp_path / "results.csv").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["results.csv"]
    folder.keep_results(rows)
    assert folder.results() == rows


@pytest.mark.parametrize(
    ("text", "why"),
    [("pp,tp\n1,2\n", "no column ep"), ("pp,tp,ep,concurrency,repeats,input_tps\n1,x,1,8,3,5\n", "tp: 'x'"),
     ("pp,tp,ep,concurrency,repeats,input_tps\n1,1,1,8,3,fast\n", "line 2"),
     ("pp,tp,ep,concurrency,repeats,input_tps\n1,1,1,8,,5\n", "missing"),
     ("pp,tp,ep,concurrency,repeats,input_tps\n1,1,1,8,3,nan\n", "line 2: input_tps: nan cannot"),
     ("pp,tp,ep,concurrency,repeats,input_tps\n1,1,1,8,3,0\n", "input_tps: 0 cannot"),
     ("pp,tp,ep,concurrency,repeats,input_tps\n0,1,1,8,3,5\n", "pp: 0 cannot"),
     ("pp,tp,ep,concurrency,repeats,input_tps\n1,1,1,8\n", "line 2: it is cut short"),
     ("pp,tp,ep,concurrency,repeats,input_tps\n1,1,1,8,3,5\n1,1,1,8,3,6\n", "lines 2 and 3 are of the same")],
)  # fmt: skip
def test_tables_that_cannot_be_understood_are_refused_with_the_place(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / folder_module.SUMMARY).write_text(text)
    with pytest.raises(InputError, match=why):
        Folder(tmp_path).summary()
    assert run("sweep", "report", tmp_path).code == 2


def test_a_table_that_a_spreadsheet_wrote_is_read(tmp_path: Path) -> None:
    (tmp_path / folder_module.SUMMARY).write_text("pp,tp,ep,concurrency,repeats,input_tps\n1,1,1,8,3,5\n", "utf-8-sig")
    assert Folder(tmp_path).summary() == [Point(1, 1, 1, 8, 3, 5.0)]


def test_a_benchmark_that_measured_nothing_leaves_cells_empty() -> None:
    cell = Cell(Layout(1, 1, 1), 8, 1)
    nothing = {"completed": 4, "input_throughput": math.nan, "median_ttft_ms": math.inf, "errors": []}
    row = repeat_row(nothing, cell, requests=4, load=Load())
    assert (row.status, row.input_tps, row.ttft_p50_ms) == ("failed", None, None)


def test_a_report_never_replaces_what_it_is_made_of(tmp_path: Path) -> None:
    table = "pp,tp,ep,concurrency,repeats,input_tps\n1,1,1,8,3,5\n"
    (tmp_path / folder_module.SUMMARY).write_text(table)
    ran = run("sweep", "report", tmp_path, "--out", tmp_path / folder_module.SUMMARY)
    assert (ran.code, "is an input" in ran.err) == (2, True)
    assert (tmp_path / folder_module.SUMMARY).read_text() == table
    assert "? requests a repeat" in run("sweep", "report", tmp_path).out  # a bare table does not tell
    assert "requests" not in read_sweep(tmp_path).record.items()


def test_a_row_whose_json_line_is_gone_does_not_stand_unquestioned(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "torch-h200" / "sweep", tmp_path / "sweep")
    folder = Folder(tmp_path / "sweep")
    assert (folder.unproven(), len(folder.done())) == ({}, 12)
    raw = sorted((folder.path / "raw").iterdir())
    raw[0].unlink()
    raw[1].write_text("")
    raw[2].write_text('{"completed": 2')
    assert sorted(folder.unproven().values()) == [
        f"raw/{path.name} {why}" for path, why in zip(raw, ("is gone", "is empty", "is no JSON line"), strict=False)
    ]
    assert len(folder.done()) == 9  # so --resume measures three
    said = " ".join(run("sweep", "report", folder.path).out.split())
    assert f"3 rows of results.csv cannot be checked any more: raw/{raw[0].name} is gone; raw/{raw[1].name}" in said
    assert "cannot be checked" not in run("sweep", "report", FIXTURES / "torch-h200" / "sweep").out


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--accept", "load.chunk"), "there is no baseline"),
        (("--baseline", PUBLISHED, "--accept", "load.chunks"), "no such item; did you mean 'load.chunk'? Items: "),
        (("--baseline", PUBLISHED, "--accept", "load.chunk", "--accept", "zzz"), "--accept zzz: no such item; Items: "),
    ],
)
def test_an_item_that_is_none_is_not_accepted(words: tuple[object, ...], why: str) -> None:
    ran = run("sweep", "report", PUBLISHED, *words)
    assert (ran.code, why in ran.err, len(ran.err.splitlines())) == (2, True, 1), ran.err
    assert ("load.input_len" in ran.err) == ("Items" in why)


def test_memory_is_that_of_the_fullest_gpu_of_all_hosts(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    layout = Layout(2, 2, 1)
    heads = ("index, name, memory.used [MiB], memory.total [MiB]", "memory.total, index, memory.used")
    rows = (("0, H200, 70 MiB, 100 MiB", "1, H200, 90 MiB, 100 MiB"), ("100, 0, 95", "[N/A], 1, 99"))
    for host, head, lines in zip(("a", "b.example"), heads, rows, strict=True):
        path = folder.gpu(layout, "after", host)
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join((head, *lines)) + "\n")
    folder.gpu(layout, "before", "a").write_text("index, memory.used [MiB], memory.total [MiB]\n0, 99 MiB, 100 MiB\n")
    peak = peak_of(folder, layout)
    assert peak is not None
    assert (peak.used_mib, peak.headroom_mib, peak.gpu) == (95, 5, "b.example:0")
    assert peak_of(folder, Layout(4, 1, 1)) is None
    (tmp_path / "odd.csv").write_text("No devices were found\n")
    assert read_snapshot(tmp_path / "odd.csv") == []


def test_domains_of_a_log_and_of_the_table_agree(tmp_path: Path) -> None:
    assert read_csv(tmp_path / "nothing.csv") == []
    assert domain_table(read_csv(PUBLISHED / "nccl.csv")).rows[0][0] == "TP4"
    with pytest.raises(InputError):
        read_nccl_log(tmp_path / "nothing.log")


def test_sweeps_that_start_in_one_second_have_names_of_their_own() -> None:
    assert len({new_run_id() for _ in range(4)}) > 2
