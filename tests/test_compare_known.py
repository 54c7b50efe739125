"""Comparisons whose numbers are known: the user's section 9.3, made by hand and simulated, and real traces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from compare_results import MS, published, row
from conftest import FIXTURES
from jsonschema import Draft202012Validator
from report_runs import real

import nsysk3
from nsysk3.compare import Comparison, compare
from nsysk3.compare.model import schema


@pytest.fixture(scope="module")
def section_9_3() -> Comparison:
    return compare(published(1, 32, 557, 4160.6, 7.10), [published(8, 4, 66, 392.3, 5.83)])


@pytest.mark.parametrize(
    ("metric", "base", "other", "percent"),
    [
        ("allreduce_count", 557, 66, -88.2),
        ("allreduce_total_ns", 4160.6 * MS, 392.3 * MS, -90.6),
        ("allreduce_p50_ns", 7.10 * MS, 5.83 * MS, -17.9),
    ],
)
def test_the_table_of_section_9_3(
    section_9_3: Comparison, metric: str, base: float, other: float, percent: float
) -> None:
    found = row(section_9_3, metric)
    assert [value.value for value in found.values] == pytest.approx([base, other])
    delta = found.deltas[0]
    assert round((delta.change_share or 0) * 100, 1) == percent
    assert delta.verdict == "lower"
    assert delta.like_for_like
    assert [value.n for value in found.values] == [32, 32]
    assert section_9_3.labels == ["PP1", "PP8"]


def test_the_first_rows_are_the_user_s_table(section_9_3: Comparison) -> None:
    names = list(dict.fromkeys(each.metric for each in section_9_3.rows if each.group == "headline"))
    assert names == ["allreduce_count", "allreduce_total_ns", "allreduce_p50_ns", "overlap_ratio"]
    assert section_9_3.rows[0].group == "headline"


def test_the_verdict_has_the_numbers_and_their_limits(section_9_3: Comparison) -> None:
    changed, limits = section_9_3.verdict
    assert "AllReduce calls 557 -> 66 (-88.2%" in changed
    assert "AllReduce total 4,160.6 ms -> 392.3 ms (-90.6%, 95 % interval" in changed
    assert "how many forwards the windows hold is not known" in limits
    assert "-87.5% of its AllReduce calls is the layout itself" in limits


def test_shares_are_kept_apart_across_pp_degrees_only(section_9_3: Comparison) -> None:
    for metric in ("exposed_comm_share", "comm_share", "exposed_comm_ns", "comm_ns"):
        found = row(section_9_3, metric)
        assert found.group == "apart"
        assert not found.deltas[0].like_for_like
        assert "Stage wait" in (found.why_apart or "")
    same = published(8, 4, 66, 392.3, 5.83)
    alike = row(compare(same, [published(8, 4, 66, 400, 5.83)]), "exposed_comm_share")
    assert alike.deltas[0].like_for_like
    assert alike.why_apart is None


def test_without_forwards_numbers_per_forward_are_null_with_a_reason(section_9_3: Comparison) -> None:
    found = row(section_9_3, "allreduce_total_ns", "forward")
    assert [value.value for value in found.values] == [None, None]
    assert found.values[0].reason == "no whole forward was found in the window"
    assert found.deltas[0].verdict == "not known"


def test_ranks_never_pair_across_layouts(section_9_3: Comparison) -> None:
    assert not section_9_3.comparability[0].paired
    assert section_9_3.comparability[0].same_layout is False


def test_it_round_trips_and_fits_its_schema(section_9_3: Comparison) -> None:
    text = section_9_3.to_json()
    assert Comparison.model_validate_json(text) == section_9_3
    Draft202012Validator(schema()).validate(json.loads(text))


def test_a_ladder_has_marginal_changes() -> None:
    ladder = [published(pp, 32 // pp, 560 // pp, 4000 / pp, 7 - pp / 8) for pp in (1, 2, 4, 8)]
    comparison = compare(ladder[0], ladder[1:])
    found = row(comparison, "allreduce_count")
    assert comparison.labels == ["PP1", "PP2", "PP4", "PP8"]
    assert [round(delta.change_share or 0, 3) for delta in found.deltas] == [-0.5, -0.75, -0.875]
    assert [(delta.base, delta.other) for delta in found.steps] == [("PP1", "PP2"), ("PP2", "PP4"), ("PP4", "PP8")]
    assert [delta.change_share for delta in found.steps] == [-0.5, -0.5, -0.5]
    assert [(step.base, step.other) for step in comparison.ladder] == [("PP1", "PP2"), ("PP2", "PP4"), ("PP4", "PP8")]
    two = compare(ladder[0], ladder[1])
    assert (two.ladder, row(two, "allreduce_count").steps) == ([], [])


def test_the_published_experiment_simulated(tmp_path: Path) -> None:
    simulation = pytest.importorskip("nsysk3.simulate.run")
    presets = pytest.importorskip("nsysk3.simulate.presets")
    runs = []
    for depth in (1, 8):
        simulation.simulate(presets.preset(f"kimi-k3-6000d-pp{depth}"), tmp_path / f"pp{depth}")
        runs.append(nsysk3.analyze(tmp_path / f"pp{depth}"))
    comparison = compare(runs[0], runs[1:])
    changes = {
        metric: (row(comparison, f"allreduce_{metric}").deltas[0].change_share or 0) * 100
        for metric in ("count", "total_ns", "p50_ns")
    }
    assert changes == pytest.approx({"count": -88.2, "total_ns": -90.6, "p50_ns": -17.9}, abs=0.5)
    assert comparison.comparability[0].single_variable
    assert "both runs are simulated" in comparison.comparability[0].summary
    assert comparison.verdict[1].startswith("Limits: all runs are simulated")
    assert not row(comparison, "exposed_comm_share").deltas[0].like_for_like


# --- real traces


def test_real_tp2_against_pp2() -> None:
    tp2, pp2 = (real(FIXTURES / "h200" / f"{name}.sqlite") for name in ("tp2", "pp2"))
    comparison = compare(tp2, [pp2])
    assert [side.layout.text for side in (comparison.base, *comparison.others)] == ["PP1 / TP2", "PP2 / TP1"]
    count = row(comparison, "allreduce_count")
    assert [value.value for value in count.values] == [256, 0]
    median = tp2.document.summary["median"]
    total = row(comparison, "allreduce_total_ns").values[0].value
    assert total == median["allreduce_total_ns"]
    wait, transfer = (row(comparison, f"allreduce_{part}_ns").values[0].value for part in ("wait", "transfer"))
    assert (wait or 0) + (transfer or 0) == pytest.approx(total)
    stage_wait = row(comparison, "stage_wait_ns")
    assert stage_wait.values[0].value == 0
    assert (stage_wait.values[1].value or 0) == pytest.approx(80.1 * MS, abs=0.5 * MS)
    assert comparison.comparability[0].single_variable is None


def test_the_result_ring_of_real_sglang_is_not_taken_for_overlap() -> None:
    runs = [real(FIXTURES / "sglang-h200" / f"{name}-lw.sqlite") for name in ("tp2", "pp2")]
    found = row(compare(runs[0], runs[1:]), "overlap_ratio")
    assert found.note == "100% of the overlap of PP2 is waiting beside compute and hides no transfer"
