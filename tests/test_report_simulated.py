"""That traces are simulated is said once, with what made them where that is known."""

from __future__ import annotations

import re
from io import StringIO

import pytest
from report_runs import TP2, real

from nsysk3.compare import compare
from nsysk3.report.html import render_comparison, render_report
from nsysk3.report.terminal import console, print_result
from nsysk3.result import Result

CASES = [
    ("simulated", ""),
    ("simulated, calibrated on published figures", "calibrated on published figures"),
    ("nsysk3 simulate, seed 7", "nsysk3 simulate, seed 7"),
]


def simulated(text: str | None) -> Result:
    result = real(TP2)
    return Result(result.document.model_copy(update={"simulated": text}), result.tables)


def banner(page: str) -> str:
    (found,) = re.findall(r'<p class="banner">(.*?)</p>', page)
    return re.sub("<[^>]+>", "", found)


@pytest.mark.parametrize(("text", "rest"), CASES)
def test_the_banner_says_it_once(text: str, rest: str) -> None:
    assert banner(render_report(simulated(text))) == f"Simulated: no GPU made these traces. {rest}".strip()
    shown = StringIO()
    print_result(simulated(text), console(shown))
    assert f"\nsimulated: {rest or 'no GPU made these traces'}\n" in shown.getvalue()


def test_a_comparison_says_which_runs_are() -> None:
    def of(*texts: str | None) -> str:
        runs = [simulated(text) for text in texts]
        return banner(render_comparison(compare(runs[0], runs[1:], ["a", "b"]), runs)).partition("traces.")[2]

    assert [of(text, text) for text, _ in CASES] == [f" {rest}".rstrip() for _, rest in CASES]
    assert of(None, "simulated") == " b"
    assert of("simulated", "by hand") == " a · b: by hand"
    assert 'class="banner"' not in render_report(simulated(None))
