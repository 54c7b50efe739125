"""What a sweep's points say: the published tables to the printed digit, and laws that hold for any points."""

from __future__ import annotations

import csv
import json
import math
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from browser import browser
from command import run
from conftest import FIXTURES
from hypothesis import given
from hypothesis import strategies as st

from nsysk3.errors import InputError, MissingToolError
from nsysk3.run.config import Load
from nsysk3.run.nccl_log import read_nccl_log
from nsysk3.sweep import folder as folder_module
from nsysk3.sweep.findings import find
from nsysk3.sweep.folder import Folder, Point, Repeat
from nsysk3.sweep.matrix import Cell, Layout
from nsysk3.sweep.memory import peak_of, read_snapshot
from nsysk3.sweep.merge import read_sweep
from nsysk3.sweep.nccl_table import domain_table, read_csv
from nsysk3.sweep.record import LayoutRecord, Record, Start
from nsysk3.sweep.repeat import repeat_row
from nsysk3.sweep.report import find_in
from nsysk3.sweep.tables import TextTable, all_tables, verdict

PUBLISHED = FIXTURES / "kimi-k3-6000d"
# Section 7 of the published report, as printed; the last column is TTFT.
SEVEN = """
1/32/4 8 3,257.96 39.19 41.62 baseline baseline
2/16/4 8 5,015.95 25.22 26.69 +53.96% -35.65%
4/8/4 8 7,155.20 17.28 18.62 +119.62% -55.90%
8/4/4 8 8,809.50 13.47 16.45 +170.40% -65.64%
16/2/2 8 6,701.04 17.94 21.39 +105.68% -54.22%
1/32/4 16 3,260.14 78.39 80.88 baseline baseline
2/16/4 16 5,018.38 50.70 52.14 +53.93% -35.32%
4/8/4 16 7,152.58 34.84 35.95 +119.39% -55.56%
8/4/4 16 8,824.12 27.31 29.77 +170.67% -65.16%
16/2/2 16 6,700.96 35.88 39.49 +105.54% -54.23%
"""
EIGHT = """
1/32/4 81,355 4,296
2/16/4 80,335 5,316
4/8/4 82,417 3,234
8/4/4 79,407 6,244
16/2/2 79,989 5,662
"""
NINE_ONE = """
PP1->PP2 +53.96% -35.65%
PP2->PP4 +42.65% -31.48%
PP4->PP8 +23.12% -22.05%
PP8->PP16 -23.93% +33.18%
"""
NINE_TWO = """
TP4 4.93 40.85 41.00 0
TP8 6.00 39.13 38.89 0
TP16 6.24 40.31 40.60 0
TP32 6.59 39.47 40.08 0
"""


def printed(text: str) -> list[list[str]]:
    return [line.split() for line in text.strip().splitlines()]


def bare(table: TextTable, *places: int) -> list[list[str]]:
    """Some columns of a table without the blanks and units that the published ones have not."""
    units = (" s", " ms", " MiB", " GB/s")
    rows = []
    for row in table.rows:
        cells = [
            next((row[at].removesuffix(unit) for unit in units if row[at].endswith(unit)), row[at]) for at in places
        ]
        rows.append([cell.replace(" ", "") for cell in cells])
    return rows


@pytest.fixture(scope="module")
def published() -> dict[str, TextTable]:
    sweep = read_sweep(PUBLISHED)
    findings, more = find_in(sweep)
    return {table.id: table for table in (*all_tables(findings, sweep.record), *more)}


def test_published_tables_come_out_to_the_printed_digit(published: dict[str, TextTable]) -> None:
    assert bare(published["ladder"], 0, 1, 2, 3, 4, 5, 6) == printed(SEVEN)
    assert bare(published["memory"], 0, 1, 2) == printed(EIGHT)
    assert published["memory"].columns[2].endswith("85,651 MiB")
    assert [row[:1] + row[2:] for row in bare(published["steps"], 0, 1, 2, 3) if row[1] == "8"] == printed(NINE_ONE)
    assert bare(published["domains"], 0, 2, 3, 4, 5) == printed(NINE_TWO)
    # Of section 7's text: PP16 against PP8.  (It has +31.37% for TTFT at C=16; see the fixture's README.)
    last = {row[1]: row[2:4] for row in published["steps"].rows if row[0] == "PP8 -> PP16"}
    assert last == {"8": ("-23.93%", "+33.18%"), "16": ("-24.06%", "+31.38%")}


def test_published_verdict() -> None:
    sweep = read_sweep(PUBLISHED)
    findings, _ = find_in(sweep)
    knee = findings.knee
    assert (knee.kind, knee.layout, knee.over) == ("knee", Layout(8, 4, 4), [Layout(16, 2, 2)])
    assert (knee.recommended, knee.fallback) == (Layout(8, 4, 4), Layout(4, 8, 4))
    assert [each.saturated for each in findings.pressures] == [True] * 5
    said = "\n".join([*findings.caveats, *findings.limits])
    for words in (
        "EP2, but EP4",
        "--disable-decode-cuda-graph",
        "less than its 16 stages",
        "C=1",
        "long decode",
        "mixed",
    ):
        assert words in said
    # Nobody knows the spread of PP4: what is taken in its place is said.
    assert all("those of PP4 are not known" in sentence for sentence in knee.why)


@pytest.mark.parametrize("name", ["summary.csv", "nccl.csv"])
def test_published_files_hold_what_was_published(name: str) -> None:
    """Every value of the fixture rounds to the printed one, and AllReduce times and rates belong together."""
    rows = list(csv.DictReader((PUBLISHED / name).read_text("utf-8").splitlines()))
    if name == "summary.csv":
        for row, cells in zip(rows, printed(SEVEN), strict=True):
            assert f"{float(row['ttft_p50_ms']) / 1000:.2f}" == cells[3]
            assert f"{float(row['ttft_p95_ms']) / 1000:.2f}" == cells[4]
            assert f"{float(row['input_tps']):,.2f}" == cells[2]
    for row in rows if name == "nccl.csv" else ():
        if row["time_us"]:
            ranks, seconds = int(row["ranks"]), float(row["time_us"]) / 1e6
            busbw = int(row["bytes"]) / seconds / 1e9 * 2 * (ranks - 1) / ranks
            assert abs(busbw / float(row["busbw_gbs"]) - 1) < 0.002  # printed to 10 us


def test_report_command_in_every_form(tmp_path: Path) -> None:
    text = run("sweep", "report", PUBLISHED).out
    markdown = run("sweep", "report", PUBLISHED, "--format", "md").out
    document = json.loads(run("sweep", "report", PUBLISHED, "--format", "json").out)
    page = tmp_path / "page.html"
    assert run("sweep", "report", PUBLISHED, "--format", "html", "--out", page).code == 0
    for shown in (text, markdown, page.read_text("utf-8")):
        for words in (
            "+170.40%",
            "-65.64%",
            "+42.65%",
            "6,244 MiB",
            "Knee: PP8/TP4/EP4",
            "Over the knee: PP16/TP2/EP2",
        ):
            assert words in shown
    assert max(map(len, text.splitlines())) <= 100  # columns of a terminal; long topologies go over two lines
    assert "one host, GPU 0-3, one PCIe/NUMA" in text
    assert document["findings"]["knee"]["layout"]["pp"] == 8
    assert document["points"][0]["input_tps"] == 3257.96
    assert document["points"][0]["input_tps_spread"] is None
    assert run("sweep", "report", tmp_path).code == 2


def test_page_is_quiet_and_fits(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert run("sweep", "report", PUBLISHED, "--format", "html", "--out", page).code == 0
    with browser() as tab:
        for width in (390, 1280):
            tab.show(width)
            tab.open(page)
            assert (tab.errors, tab.requests) == ([], [page.as_uri()])
            assert tab.ask("document.documentElement.scrollWidth") <= width
            assert tab.ask("[...document.querySelectorAll('nav a')].every(a => document.querySelector(a.hash))")
            shown = tab.ask("[...document.querySelectorAll('#tab-ladder tbody tr')].map(r => r.innerText.split('\\t'))")
            assert [row[2] for row in shown] == [cells[2] for cells in printed(SEVEN)]


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    bad = "<img src=x onerror=alert(1)>|[a](b) `c` \x1b[31m\u202e"
    points = [replace(point(1, 100.0), peak_memory_gpu=bad, peak_memory_mib=1, memory_total_mib=2), point(2, 200.0)]
    folder = Folder(tmp_path)
    folder.write_summary(points)
    (tmp_path / "metadata").mkdir()
    record = Record(
        run_id=bad, notes=[bad], layouts=[LayoutRecord(pp=1, tp=16, args=[bad])], settings={"model.path": bad}
    )
    folder.manifest.write_text(record.model_dump_json())
    for form in ("text", "md", "html"):
        out = tmp_path / f"out.{form}"
        assert run("sweep", "report", tmp_path, "--format", form, "--out", out).code == 0
        text = out.read_text("utf-8")
        assert not set(text) & {"\x1b", "\u202e"}
        assert form == "text" or "<img" not in text


# Laws.


def point(pp: int, tps: float, *, concurrency: int = 8, spread: float | None = 0.01, repeats: int = 3) -> Point:
    """A point whose repeats lie evenly around their median; nothing is known of them with ``spread`` None."""
    low, high = (None, None) if spread is None else (tps * (1 - spread / 2), tps * (1 + spread / 2))
    return Point(pp, 16 // pp, 1, concurrency, repeats, tps, low, high, spread, None, 8e6 / tps, 9e6 / tps)


depths = st.lists(st.sampled_from([1, 2, 4, 8, 16]), min_size=2, max_size=5, unique=True).map(sorted)
rates = st.floats(100, 10_000)


@given(depths, st.data(), st.sampled_from([None, 0.0, 0.01, 0.3]))
def test_a_knee_is_only_claimed_where_repeats_allow_it(
    layouts: list[int], data: st.DataObject, spread: float | None
) -> None:
    tps = data.draw(st.lists(rates, min_size=len(layouts), max_size=len(layouts)))
    points = [point(pp, rate, spread=spread) for pp, rate in zip(layouts, tps, strict=True)]
    knee = find(points, Record()).knee
    if spread is None:
        assert knee.kind == "not shown"
    if knee.kind in ("knee", "still rising"):
        at = next(each for each in points if each.layout == knee.layout)
        for other in points:
            assert other.pp >= at.pp or other.input_tps_max < at.input_tps_min  # type: ignore[operator]
            assert other.input_tps_min <= at.input_tps_max or other is at  # type: ignore[operator]
        assert (knee.kind == "still rising") == (at.pp == layouts[-1])
    assert knee.recommended in {each.layout for each in points}
    assert knee.fallback != knee.recommended
    for layout in knee.over:
        assert layout > knee.layout  # type: ignore[operator]


@given(depths, st.data(), st.floats(0.1, 10), st.randoms(use_true_random=False))
def test_order_and_unit_of_throughput_change_no_verdict(
    layouts: list[int], data: st.DataObject, factor: float, shuffle: random.Random
) -> None:
    tps = data.draw(st.lists(rates, min_size=len(layouts), max_size=len(layouts)))
    points = [point(pp, rate, concurrency=c) for pp, rate in zip(layouts, tps, strict=True) for c in (4, 8)]
    scaled = [
        replace(
            each, input_tps=each.input_tps * factor, input_tps_min=(each.input_tps_min or 0) * factor,
            input_tps_max=(each.input_tps_max or 0) * factor,
        )
        for each in points
    ]  # fmt: skip
    shuffle.shuffle(scaled)
    one, other = find(points, Record()), find(scaled, Record())
    assert (one.knee.kind, one.knee.layout, one.knee.over) == (other.knee.kind, other.knee.layout, other.knee.over)
    assert [step.judgement.verdict for step in one.steps] == [step.judgement.verdict for step in other.steps]


@given(depths, st.data())
def test_steps_multiply_to_the_change_against_the_base(layouts: list[int], data: st.DataObject) -> None:
    tps = data.draw(st.lists(rates, min_size=len(layouts), max_size=len(layouts)))
    findings = find([point(pp, rate) for pp, rate in zip(layouts, tps, strict=True)], Record())
    product = 1.0
    for step, rung in zip(findings.steps, findings.rungs[1:], strict=True):
        product *= 1 + step.judgement.change
        assert product == pytest.approx(1 + rung.tps_change)  # type: ignore[operator]


def test_concurrencies_that_disagree_show_no_knee() -> None:
    up = [point(pp, 1000.0 * pp, concurrency=16) for pp in (1, 2, 4)]
    down = [point(pp, 1000.0 / pp, concurrency=1) for pp in (1, 2, 4)]
    knee = find(up + down, Record()).knee
    assert (knee.kind, knee.layout) == ("not shown", None)
    assert len(knee.why) == 2


def test_plateau_has_its_knee_at_the_shallowest_layout_of_it() -> None:
    points = [point(1, 100.0), point(2, 200.0), point(4, 200.5), point(8, 150.0)]
    knee = find(points, Record()).knee
    assert (knee.kind, knee.layout, knee.over) == ("knee", Layout(2, 8, 1), [Layout(8, 2, 1)])


# What lies on the disk.

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


def test_what_is_not_known_is_null_with_its_reason() -> None:
    record = Record(
        layouts=[LayoutRecord(pp=1, tp=16, not_measured={"peak_memory_mib": "a: no nvidia-smi"})],
        not_measured={"input_tps_spread": "only medians were kept"},
    )
    findings = find([point(1, 100.0, spread=None), point(2, 200.0, spread=None)], record)
    tables = {table.id: table for table in all_tables(findings, record)}
    assert findings.rooms[0].peak_mib is None
    assert [row[-1] for row in tables["ladder"].rows] == ["-", "-"]
    assert any("only medians were kept" in note for note in tables["ladder"].notes)
    assert any("a: no nvidia-smi" in note for note in tables["memory"].notes)
    assert verdict(findings)[0] == "No knee is shown."


def test_failures_are_told_with_their_way_out() -> None:
    cause = {"step": "starting", "kind": "watchdog", "message": "a forward took long", "advice": "raise it"}
    start = Start.model_validate({"attempt": 1, "status": "failed", "cause": cause})
    record = Record(layouts=[LayoutRecord(pp=16, tp=1, starts=[start])])
    bad = Repeat(1, 16, 1, 8, 2, "failed", 40, 39, 1, cause="HTTP 500")
    findings = find([point(1, 100.0)], record, [bad])
    assert findings.failures == [
        "PP16/TP1/EP1: watchdog: a forward took long; raise it",
        "PP1/TP16/EP1 C=8 repeat 2: 39 of 40 requests completed; HTTP 500",
    ]


def test_domains_of_a_log_and_of_the_table_agree(tmp_path: Path) -> None:
    assert read_csv(tmp_path / "nothing.csv") == []
    assert domain_table(read_csv(PUBLISHED / "nccl.csv")).rows[0][0] == "TP4"
    with pytest.raises(InputError):
        read_nccl_log(tmp_path / "nothing.log")
