"""The page of a comparison in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from browser import Page, browser
from command import run
from report_runs import HOSTILE, PP2, TP2, hostile, real
from test_report_page import quiet, table, violations

from nsysk3.compare import compare
from nsysk3.compare.model import Comparison
from nsysk3.report.html import render_comparison

IDS = [
    "verdict", "headline", "comparable", "budget", "changes", "apart", "pipeline", "collectives", "layers", "evidence",
    "definitions",
]  # fmt: skip


@cache
def compared() -> Comparison:
    return compare(real(TP2), real(PP2))


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("comparisons")
    bad = [hostile(), hostile(), hostile()]
    ladder = compare(bad[0], bad[1:], HOSTILE[:3])
    texts = {
        "en": render_comparison(compared(), [real(TP2), real(PP2)]),
        "zh": render_comparison(compared(), [real(TP2), real(PP2)], "zh"),
        "hostile": render_comparison(ladder, bad),
    }
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text, "utf-8")
    return {name: folder / f"{name}.html" for name in texts}


@pytest.mark.parametrize("name", ["en", "zh", "hostile"])
@pytest.mark.parametrize("width", [390, 1280])
def test_page_is_whole_quiet_and_fits(tab: Page, pages: dict[str, Path], name: str, width: int) -> None:
    tab.show(width)
    tab.open(pages[name])
    tab.ask("document.querySelectorAll('details').forEach(part => part.open = true)")
    quiet(tab, pages[name])
    found = tab.ask("[...document.querySelectorAll('main > section')].map(part => part.id)")
    assert found == [identity for identity in IDS if identity in found]
    assert {"verdict", "headline", "comparable", "budget", "changes"} <= set(found)
    assert tab.ask("document.documentElement.scrollWidth") <= width
    assert tab.ask("document.querySelectorAll('img, iframe, object, embed, link, base').length") == 0


def test_numbers_are_those_of_the_comparison(tab: Page, pages: dict[str, Path]) -> None:
    tab.show(1280)
    tab.open(pages["en"])
    shown = table(tab, "rows-headline")
    rows = [row for row in compared().rows if row.group == "headline" and any(v.value is not None for v in row.values)]
    assert len(shown) == len(rows)
    for cells, row in zip(shown, rows, strict=True):
        assert cells[0] == row.metric
        assert [text and float(text) for text in cells[2:4]] == ["" if v.value is None else v.value for v in row.values]
    text = tab.ask("document.querySelector('#verdict').innerText")
    assert all(sentence.replace(" -> ", " → ") in text for sentence in compared().verdict)


def test_what_is_not_like_for_like_stands_apart_with_the_reason(tab: Page, pages: dict[str, Path]) -> None:
    tab.open(pages["en"])
    assert tab.ask("[...document.querySelectorAll('#apart tbody tr')].every(row => row.classList.contains('muted'))")
    why = next(row.why_apart for row in compared().rows if row.group == "apart")
    assert why is not None
    assert why in tab.ask("document.querySelector('#apart').innerText")
    apart = {row.label for row in compared().rows if row.group == "apart"}
    drawn = tab.ask("document.querySelector('#fig-forest .wide').textContent")
    assert not [label for label in apart if label in drawn]


@pytest.mark.parametrize("dark", [False, True])
def test_accessibility(tab: Page, pages: dict[str, Path], dark: bool) -> None:
    assert violations(tab, pages["en"], dark=dark) == []


def test_command_writes_the_page(tmp_path: Path) -> None:
    base, other = real(TP2).save(tmp_path / "a"), real(PP2).save(tmp_path / "b")
    out = tmp_path / "page.html"
    assert run("compare", base, other, "--format", "html", "--lang", "zh", "--out", out, "-q").code == 0
    assert '<html lang="zh">' in out.read_text("utf-8")
