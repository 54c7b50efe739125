"""The page of one run in a real browser: quiet, complete, safe, usable by keyboard and screen reader."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Page, browser
from report_runs import PP2, TP2, hostile, page, real

from nsysk3.report.html import SECTIONS

IDS = [section.__name__ for section in SECTIONS]
MAX_BYTES = 6 * 10**6


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    return {
        "pp2": page(real(PP2), folder, "pp2"),
        "tp2": page(real(TP2), folder, "tp2"),
        "zh": page(real(PP2), folder, "zh", "zh"),
        "hostile": page(hostile(), folder, "hostile"),
    }


@pytest.fixture
def fresh(tab: Page) -> Page:
    tab.show(1280)
    return tab


def quiet(tab: Page, file: Path) -> None:
    """Nothing on the console, nothing fetched but the page itself, no dialog."""
    assert tab.errors == []
    assert [url for url in tab.requests if url != file.as_uri()] == []
    assert tab.dialogs == []


def table(tab: Page, identity: str) -> list[list[str]]:
    """A table's cells as CSV would give them, null as an empty text."""
    rows: list[list[str]] = tab.ask(
        f"[...document.getElementById('tab-{identity}').tBodies[0].rows].map(row => [...row.cells].map(cell => "
        "isMissing(cell) ? '' : rawOf(cell)))"
    )
    return rows


@pytest.mark.parametrize("name", ["pp2", "tp2", "zh"])
def test_page_is_whole_and_quiet(fresh: Page, pages: dict[str, Path], name: str) -> None:
    fresh.open(pages[name])
    quiet(fresh, pages[name])
    assert fresh.ask("[...document.querySelectorAll('main > section')].map(part => part.id)") == IDS
    assert fresh.ask("[...document.querySelectorAll('nav a')].every(a => document.querySelector(a.hash))")
    assert fresh.ask("[...document.querySelectorAll('a.term')].every(a => document.querySelector(a.hash))")
    assert pages[name].stat().st_size < MAX_BYTES


def test_numbers_are_those_of_the_result(fresh: Page, pages: dict[str, Path]) -> None:
    fresh.open(pages["tp2"])
    document = json.loads(real(TP2).to_json())
    shown = {row[0]: row[1:] for row in table(fresh, "summary")}
    words = [document["summary"][word] for word in ("median", "lowest", "highest")]
    for metric in ("allreduce_count", "allreduce_total_ns", "allreduce_p50_ns", "overlap_ratio", "exposed_wait_ns"):
        assert [float(text) for text in shown[metric]] == [word[metric] for word in words]
    ranks = table(fresh, "ranks")
    keys = fresh.ask("[...document.getElementById('tab-ranks').tHead.rows[0].cells].map(cell => cell.dataset.key)")
    for row, rank in zip(ranks, document["ranks"], strict=True):
        for key, text in zip(keys, row, strict=True):
            if key.endswith("_ns"):
                assert float(text) == rank[key]
    budget = real(TP2).tables["budget"].filter(real(TP2).tables["budget"]["ns"] > 0)
    assert [float(row[2]) for row in table(fresh, "budget")] == budget["ns"].to_list()


def test_null_is_not_measured_with_its_reason(fresh: Page, pages: dict[str, Path]) -> None:
    fresh.open(pages["pp2"])
    shown = {row[0]: row[1] for row in table(fresh, "summary")}
    assert shown["allreduce_p50_ns"] == ""
    text = fresh.ask("document.querySelector('#summary .tab').innerText")
    assert "not measured" in text
    assert real(PP2).document.not_measured["allreduce_p50_ns"] in text


def test_hostile_text_stays_text(fresh: Page, pages: dict[str, Path]) -> None:
    fresh.open(pages["hostile"])
    fresh.ask("document.querySelectorAll('details').forEach(part => part.open = true)")
    hover = "part.dispatchEvent(new PointerEvent('pointermove', {bubbles: true}))"
    fresh.ask(f"document.querySelectorAll('[data-tip], [data-group]').forEach(part => {hover})")
    quiet(fresh, pages["hostile"])
    assert fresh.ask("document.querySelectorAll('img, iframe, object, embed, link, base').length") == 0
    assert fresh.ask("document.querySelectorAll('script').length") == fresh.ask(
        "document.querySelectorAll('script[type], body > script').length"
    )
    handlers = "flatMap(part => [...part.attributes]).filter(attribute => /^on/i.test(attribute.name))"
    assert fresh.ask(f"[...document.querySelectorAll('*')].{handlers}.length") == 0
    text: str = fresh.ask("document.body.innerText")
    assert "<script>alert(1)</script>" in text
    assert "{{ 7*7 }}" in text
    assert "U+202E" in text
    assert not set(text) & set("\u202e\u2066\u200b\x00\x1b")
    assert "x" * 1000 not in text
    assert pages["hostile"].stat().st_size < MAX_BYTES


def test_policy_stops_what_is_not_ours(fresh: Page, pages: dict[str, Path]) -> None:
    fresh.open(pages["tp2"])
    fresh.ask("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.bad = 1\">')")
    fresh.ask("document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.bad = 2'}))")
    fresh.ask("new Promise(done => setTimeout(done, 100))")
    assert fresh.ask("window.bad ?? null") is None
    assert any("Content Security Policy" in error for error in fresh.errors)


def test_timeline_zooms_and_rows_lead_to_it(fresh: Page, pages: dict[str, Path]) -> None:
    file = fresh.open(pages["pp2"]) and pages["pp2"]
    whole = fresh.ask("timeline.view[1] - timeline.view[0]")
    fresh.ask("document.querySelector('[data-do=in]').click()")
    assert fresh.ask("timeline.view[1] - timeline.view[0]") == pytest.approx(whole / 2)
    key = "document.getElementById('tl').dispatchEvent(new KeyboardEvent('keydown', {key: '%s', bubbles: true}))"
    fresh.ask(key % "0")
    assert fresh.ask("timeline.view[1] - timeline.view[0]") == pytest.approx(whole)
    fresh.ask(key % "n")
    assert fresh.ask("timeline.chosen") >= 0
    said = fresh.ask("document.getElementById('tl-said').textContent")
    assert "ms" in said or "µs" in said
    # A row of a table: the longest event of that kernel, and it is in view.
    fresh.ask("document.querySelector('#tab-top_kernels tr[data-goto] .go').click()")
    name = fresh.ask("JSON.parse(document.querySelector('#tab-top_kernels tr[data-goto]').dataset.goto).name")
    assert fresh.ask("timeline.data.names[timeline.data.name[timeline.chosen]]") == name
    assert fresh.ask(
        "timeline.start[timeline.chosen] >= timeline.view[0] && timeline.end[timeline.chosen] <= timeline.view[1]"
    )
    assert fresh.ask("document.activeElement.id") == "tl"
    quiet(fresh, file)


def test_timeline_holds_every_event_as_it_is(fresh: Page, pages: dict[str, Path]) -> None:
    fresh.open(pages["pp2"])
    events = real(PP2).tables["timeline"].sort("rank", "stream", "start_ns", "end_ns")
    assert fresh.ask("[...timeline.start]") == events["start_ns"].to_list()
    assert fresh.ask("[...timeline.end]") == events["end_ns"].to_list()
    assert fresh.ask("timeline.data.wait_ns") == events["wait_ns"].fill_null(-1).to_list()


def test_tables_sort_filter_and_leave_as_csv(fresh: Page, pages: dict[str, Path]) -> None:
    fresh.open(pages["tp2"])
    column = "[...document.getElementById('tab-top_kernels').tBodies[0].rows].map(row => Number(rawOf(row.cells[3])))"
    fresh.ask("document.querySelector('#tab-top_kernels thead th:nth-child(4) .sort').click()")
    assert fresh.ask(column) == sorted(fresh.ask(column), reverse=True)
    fresh.ask("document.querySelector('#tab-top_kernels thead th:nth-child(4) .sort').click()")
    assert fresh.ask(column) == sorted(fresh.ask(column))
    field = "document.querySelector('[data-table=top_kernels] input')"
    fresh.ask(f"{field}.value = 'AllReduce'; {field}.dispatchEvent(new Event('input'))")
    left = "[...document.getElementById('tab-top_kernels').tBodies[0].rows].filter(row => !row.hidden).length"
    assert fresh.ask(left) == 1
    lines = fresh.ask("csvOf(document.getElementById('tab-top_kernels'))").splitlines()
    assert lines[0].startswith("name,category,role,total_ns")
    assert len(lines) == 2


def test_csv_of_hostile_names_runs_no_formula(fresh: Page, pages: dict[str, Path]) -> None:
    fresh.open(pages["hostile"])
    lines = fresh.ask("csvOf(document.getElementById('tab-problems'))").splitlines()
    assert not [line for line in lines if line.startswith(("=", '"='))]


def test_definitions_open_where_they_are_asked_for(fresh: Page, pages: dict[str, Path]) -> None:
    fresh.open(pages["tp2"])
    fresh.ask("document.querySelector('#tab-summary a.term').click()")
    assert not fresh.ask("document.getElementById('definition').hidden")
    assert "AllReduce" in fresh.ask("document.getElementById('definition').innerText")
    fresh.ask("document.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'}))")
    assert fresh.ask("document.getElementById('definition').hidden")
    assert fresh.ask("document.activeElement.className") == "term"


@pytest.mark.parametrize("name", ["pp2", "zh", "hostile"])
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_sticks_out_of_the_window(fresh: Page, pages: dict[str, Path], name: str, width: int) -> None:
    fresh.show(width)
    fresh.open(pages[name])
    assert fresh.ask("document.documentElement.scrollWidth") <= width


def test_figures_leave_as_svg_and_png(fresh: Page, pages: dict[str, Path]) -> None:
    fresh.open(pages["pp2"])
    figures = fresh.ask("document.querySelectorAll('figure.fig:not(.timeline)').length")
    assert figures >= 4
    texts = fresh.ask("all('figure.fig:not(.timeline)').map(figure => standalone(figure).text)")
    assert all(text.startswith("<svg") and "var(" not in text and "url(&quot;file" not in text for text in texts)
    size = fresh.ask("png(document.getElementById('fig-budget')).then(blob => blob.size)")
    assert size > 10_000
    assert fresh.errors == []


def test_both_languages_have_every_text(fresh: Page, pages: dict[str, Path]) -> None:
    fresh.open(pages["zh"])
    assert fresh.ask("document.documentElement.lang") == "zh"
    assert fresh.ask("document.querySelector('#budget h2').textContent") == "时间账"
    # The analysis' own sentences are in Chinese too; what no pattern knows would be marked English.
    assert fresh.ask("document.querySelectorAll('#verdict [lang=en]').length") == 0


def test_print_shows_what_is_folded(fresh: Page, pages: dict[str, Path]) -> None:
    fresh.open(pages["pp2"])
    folded = len(fresh.pdf())
    fresh.ask("dispatchEvent(new Event('beforeprint'))")
    assert fresh.ask("document.querySelectorAll('details:not([open])').length") == 0
    fresh.ask("dispatchEvent(new Event('afterprint'))")
    assert fresh.ask("document.querySelectorAll('details[open]').length") == 0
    assert folded > 50_000


@pytest.mark.parametrize(("name", "dark"), [("pp2", False), ("tp2", True), ("zh", False)])
def test_accessibility(fresh: Page, pages: dict[str, Path], name: str, dark: bool) -> None:
    found = violations(fresh, pages[name], dark=dark)
    assert found == []


def violations(tab: Page, file: Path, *, dark: bool) -> list[Any]:
    """What axe-core finds against WCAG 2.1 A and AA, with everything unfolded and the first rows of long tables."""
    axe = pytest.importorskip("axe_core_python", reason="no axe-core: pip install -e .[dev]")
    source = Path(axe.__file__).with_name("axe.min.js").read_text("utf-8")
    tab.show(1280, dark=dark)
    tab.open(file)
    tab.ask("document.querySelectorAll('details').forEach(part => part.open = true)")
    # Two hundred rows that are all alike cost more than all the rest of the page.
    tab.ask("document.querySelectorAll('tbody').forEach(body => [...body.rows].slice(25).forEach(row => row.remove()))")
    tab.ask(source + ";1")
    rules = "{runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa']}"
    told = "[found.id, found.nodes.length, found.nodes[0].html.slice(0, 200), found.nodes[0].failureSummary]"
    found: list[Any] = tab.ask(f"axe.run(document, {rules}).then(done => done.violations.map(found => {told}))")
    return found
