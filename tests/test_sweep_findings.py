"""What a sweep's points say: laws that hold for any points."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sweep_points import point

from nsysk3.sweep.findings import find
from nsysk3.sweep.folder import Repeat
from nsysk3.sweep.matrix import Layout
from nsysk3.sweep.record import LayoutRecord, Record, Start
from nsysk3.sweep.tables import all_tables, verdict

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
