"""Where no rank is stable no number over ranks is given, and every report says so in one line."""

from __future__ import annotations

import re
import shutil
from io import StringIO

import pytest
from conftest import FIXTURES
from fixture_results import result_of

import nsysk3
from nsysk3.compare import compare
from nsysk3.report.html import render_comparison, render_report
from nsysk3.report.markdown import render_result
from nsysk3.report.terminal import console, print_result
from nsysk3.report.text import NO_MEDIANS
from nsysk3.result import Result

BOTH = ("pp2-lw", "tp2-lw")
OVER_RANKS = ("where the window went", "kernels with most time", "median over stable ranks", "bubble (exposed")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Reports of two runs taken for one: each recorded a hundredth of it."""
    folder = tmp_path_factory.mktemp("mix")
    for name in BOTH:
        shutil.copy(FIXTURES / "sglang-h200" / f"{name}.sqlite", folder)
    result = nsysk3.analyze(folder)
    assert [rank.stable for rank in result.document.ranks] == [False] * 4
    return result


def printed(result: Result) -> str:
    out = StringIO()
    print_result(result, console(out))
    return out.getvalue()


def cells(page: str) -> str:
    """What a reader sees."""
    return re.sub(r"<script.*?</script>|<[^>]+>", " ", page, flags=re.DOTALL)


def test_text_gives_no_number_over_ranks(mixed: Result) -> None:
    for text in (printed(mixed), render_result(mixed)):
        assert text.count(NO_MEDIANS) == 1
        assert not [title for title in OVER_RANKS if title in text.lower()]
    assert "recorded 1.1 % of the run" in printed(mixed)


def test_neither_does_the_page(mixed: Result) -> None:
    page = render_report(mixed)
    assert cells(page).count(NO_MEDIANS) == 3  # summary, time budget, kernels
    for table in ("summary", "groups", "budget-groups", "top_kernels", "categories-categories"):
        assert f'id="tab-{table}"' not in page
    assert 'id="tab-budget-budget"' in page  # every rank's own
    assert "all ranks, median" not in page
    assert "没有稳定的 Rank：不给出 Rank 间的中位数和 Kernel 平均值。" in render_report(mixed, "zh")


def test_nor_a_comparison_with_it(mixed: Result) -> None:
    runs = [result_of("sglang-h200/tp2-lw"), mixed]
    page = render_comparison(compare(*runs, labels=("one", "mixed")), runs)
    assert f"mixed: {NO_MEDIANS}" in page
    assert f"one: {NO_MEDIANS}" not in page


@pytest.mark.parametrize("trace", [f"sglang-h200/{name}" for name in BOTH])
def test_each_alone_has_them(trace: str) -> None:
    result = result_of(trace)
    assert NO_MEDIANS not in printed(result) + render_result(result) + render_report(result)
    assert "where the window went" in printed(result).lower()
    assert ("bubble (exposed" in printed(result)) == (trace == "sglang-h200/pp2-lw")
