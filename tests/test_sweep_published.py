"""The published tables, to the printed digit, in every form of a report."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
from browser import browser
from command import run
from conftest import PUBLISHED
from sweep_points import point

from nsysk3.sweep.folder import Folder
from nsysk3.sweep.matrix import Layout
from nsysk3.sweep.merge import read_sweep
from nsysk3.sweep.record import LayoutRecord, Record
from nsysk3.sweep.report import find_in
from nsysk3.sweep.tables import TextTable, all_tables

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
