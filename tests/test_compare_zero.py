"""Numbers that are 0, in a base or at the end of an interval: what tables, sentences and gates make of them."""

from __future__ import annotations

import io

import numpy as np
import pytest
from compare_results import MS, made, rank, row, with_forwards
from rich.console import Console

from nsysk3.compare import Comparison, compare
from nsysk3.compare.gate import Gate, Outcome, check
from nsysk3.compare.statistics import NO_BASE, ZERO_BASE, judged, ratio_interval
from nsysk3.report.compare_terminal import print_comparison, span
from nsysk3.result import Result


def gate(comparison: Comparison, text: str) -> Outcome:
    """The one outcome of an expression."""
    (found,) = check(comparison, [Gate.parse(text)])
    return found


def fallen() -> Comparison:
    """AllReduce that takes time in a base of two ranks and eight forwards, and none in the other run."""
    calls = np.linspace(7.0, 9.0, 16).reshape(2, 8)
    return compare(with_forwards(1, 2, calls), [with_forwards(1, 2, 0 * calls)])


def made_of(waits: list[int]) -> Result:
    """One number a rank."""
    return made([rank(world, exposed_comm_ns=ms * MS, comm_ns=ms * MS) for world, ms in enumerate(waits)])


def test_an_interval_that_ends_at_no_time_at_all_is_decided() -> None:
    comparison = fallen()
    for metric in ("allreduce_total_ns", "allreduce_wait_ns"):
        outcome = gate(comparison, f"{metric}/forward>+1%")
        assert outcome.state == "passed", outcome
        delta = row(comparison, metric, "forward").deltas[0]
        assert (delta.verdict, delta.low_share, delta.high_share) == ("lower", -1, -1)
        assert span(delta, "ns") != "-"


def test_a_base_that_is_zero_in_some_draws_has_a_bound_where_it_can_have_one() -> None:
    base, other = np.array([0.0] * 10 + [2.0] * 990), np.array([1.0] * 1000)
    found = ratio_interval(base, other)
    assert found is not None
    assert (found.low, found.high) == (-0.5, -0.5)
    assert ratio_interval(np.array([0.0] * 100 + [2.0] * 900), other) is None
    # Of 0 and 0 the ratio is anything: it pulls at both ends.
    both = ratio_interval(base, np.array([0.0] * 10 + [1.0] * 990))
    assert both is not None
    assert (both.low, both.high) == (-0.5, -0.5)


def test_a_gate_without_a_relative_interval_says_why() -> None:
    some = made_of([0, 0, 0, 0, 4, 4, 4, 4, 4, 4])
    comparison = compare(some, [made_of([1] * 10)])
    delta = row(comparison, "exposed_comm_ns").deltas[0]
    assert delta.change_share == -0.75
    assert delta.low_share is None
    outcome = gate(comparison, "exposed_comm_ns>+1%")
    assert outcome.state == "undecided"
    assert ZERO_BASE in outcome.text
    assert NO_BASE not in outcome.text
    # The absolute change has an interval, and the table shows it with the verdict that is made of it.
    assert delta.verdict != "not enough samples"
    assert span(delta, "ns").endswith(" ms")
    assert gate(comparison, "exposed_comm_ns>+9ms").state == "passed"


def test_a_base_of_zero_is_named_as_such() -> None:
    comparison = compare(made_of([0] * 8), [made_of([5] * 8)])
    assert NO_BASE in gate(comparison, "exposed_comm_ns>+1%").text
    assert judged(None) == "not enough samples"


@pytest.mark.parametrize(
    ("ranks", "said"),
    [(8, "+0.4 pt, 95 % interval +0.4 pt to +0.4 pt"), (2, "+0.4 pt, too few samples for an interval")],
)
def test_sentences_keep_the_interval_where_the_base_is_zero(ranks: int, said: str) -> None:
    runs = [
        made([rank(world, overlap_ratio=share, allreduce_count=count) for world in range(ranks)])
        for share, count in ((0.0, 0), (0.004, 7))
    ]
    sentence = compare(runs[0], [runs[1]]).verdict[0]
    assert f"Overlap with compute 0.0% -> 0.4% ({said})" in sentence
    assert ("AllReduce calls 0 -> 7 (+7, 95 % interval +7 to +7)" in sentence) == (ranks == 8)
    assert ("AllReduce calls 0 -> 7 (+7, too few samples for an interval)" in sentence) == (ranks == 2)


def test_the_table_has_an_interval_wherever_it_has_a_verdict() -> None:
    text = io.StringIO()
    print_comparison(fallen(), Console(file=text, width=110))
    judged_rows = [line for line in text.getvalue().splitlines() if line.endswith((" lower", " higher", "none shown"))]
    assert judged_rows
    assert not [line for line in judged_rows if " - " in line]
