"""Runs held against each other: exact numbers, samples, pairing, comparability."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from compare_results import LOAD, MS, made, manifest, rank, with_forwards
from conftest import FIXTURES, ROOT
from jsonschema import Draft202012Validator

import nsysk3
from nsysk3.compare import Comparison, compare
from nsysk3.compare.catalog import METRICS
from nsysk3.compare.model import Row, schema, schema_text
from nsysk3.errors import InputError
from nsysk3.result import Result


def row(comparison: Comparison, metric: str, scope: str = "window") -> Row:
    found = [each for each in comparison.rows if (each.metric, each.scope) == (metric, scope)]
    assert len(found) == 1, (metric, scope)
    return found[0]


def published(pp: int, tp: int, count: int, total_ms: float, p50_ms: float, **more: Any) -> Result:
    """32 ranks with the figures of the user's section 9.3, a little spread over ranks."""
    spread = np.linspace(-0.01, 0.01, 32)
    spread[15:17] = 0  # the median is exactly what was published
    return made(
        [
            rank(
                world, world // tp, allreduce_count=count, allreduce_total_ns=round(total_ms * (1 + s) * MS),
                allreduce_p50_ns=p50_ms * (1 + s) * MS, comm_ns=round(total_ms * MS), overlap_ratio=0.0,
            )
            for world, s in enumerate(spread)
        ],
        manifest=manifest(pp, tp), **more,
    )  # fmt: skip


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


# --- samples over forwards


def test_forwards_are_samples() -> None:
    rng = np.random.default_rng(1)
    base = with_forwards(1, 2, 8 + rng.normal(0, 0.2, (2, 12)), calls=6)
    other = with_forwards(2, 1, 5 + rng.normal(0, 0.2, (2, 10)), calls=3)
    comparison = compare(base, [other])
    count = row(comparison, "allreduce_count", "forward")
    assert [value.value for value in count.values] == [6, 3]
    assert [(value.ranks, value.forwards, value.n) for value in count.values] == [(2, 12, 24), (2, 10, 20)]
    assert count.deltas[0].verdict == "lower"
    total = row(comparison, "allreduce_total_ns", "forward")
    low, high = total.deltas[0].low_share, total.deltas[0].high_share
    assert low is not None
    assert high is not None
    assert low < 15 / 48 - 1 < high
    per_token = row(comparison, "allreduce_total_ns", "1k_tokens")
    assert per_token.values[0].value == pytest.approx((total.values[0].value or 0) / 8.192)
    window = row(comparison, "allreduce_total_ns", "window").deltas[0]
    assert (window.verdict, window.low) == ("not enough samples", None)
    assert "an interval needs 3" in (window.reason or "")
    assert [side.forwards for side in (comparison.base, *comparison.others)] == [12, 10]
    assert "different numbers of forwards (PP1 12, PP2 10)" in comparison.verdict[1]


def test_wait_and_transfer_add_up_in_every_scope() -> None:
    comparison = compare(with_forwards(1, 2, np.full((2, 4), 8.0)), [with_forwards(2, 1, np.full((2, 4), 5.0))])
    for scope in ("window", "forward", "1k_tokens"):
        total, wait, transfer = (
            row(comparison, f"allreduce_{part}_ns", scope).values[0].value for part in ("total", "wait", "transfer")
        )
        assert (wait or 0) + (transfer or 0) == pytest.approx(total)


def test_forward_times_and_wall_time() -> None:
    comparison = compare(with_forwards(1, 2, np.full((2, 4), 8.0)), [with_forwards(2, 1, np.full((2, 4), 5.0))])
    assert row(comparison, "forward_p50_ns", "forward").values[0].value == 42 * MS
    wall = row(comparison, "window_ns", "forward")
    assert [value.value for value in wall.values] == pytest.approx([42 * MS, 30 * MS], rel=1e-3)
    assert wall.values[0].forwards == 0  # one number a rank
    assert row(comparison, "forward_p95_ns", "forward").values[0].value == 42 * MS


def test_without_forwards_numbers_per_forward_are_null_with_a_reason(section_9_3: Comparison) -> None:
    found = row(section_9_3, "allreduce_total_ns", "forward")
    assert [value.value for value in found.values] == [None, None]
    assert found.values[0].reason == "no whole forward was found in the window"
    assert found.deltas[0].verdict == "not known"


def test_without_tokens_there_are_no_rows_per_token() -> None:
    base = with_forwards(1, 2, np.full((2, 4), 8.0), tokens=None)
    comparison = compare(base, [with_forwards(2, 1, np.full((2, 4), 5.0))])
    per_token = row(comparison, "allreduce_total_ns", "1k_tokens")
    assert per_token.values[0].reason == "the trace does not tell how many tokens a forward had"
    assert per_token.values[1].value is not None


def test_layers_are_samples_where_both_runs_have_them() -> None:
    def layered(run: Result, compute: int) -> Result:
        cells = run.forwards.select("rank", "stage", "forward", "start_utc_ns", "end_utc_ns")
        layers = pl.concat(
            [cells.with_columns(pl.lit(n).alias("layer"), pl.lit(compute).alias("compute_ns")) for n in (0, 1)]
        )
        return Result(run.document, {**run.tables, "layers": layers})

    base, other = with_forwards(1, 2, np.full((2, 4), 8.0)), with_forwards(2, 1, np.full((2, 4), 5.0))
    both = row(compare(layered(base, 100), [layered(other, 90)]), "compute_ns", "forward")
    assert [value.value for value in both.values] == [200, 180]
    assert "belong to a layer" in both.samples
    one = row(compare(layered(base, 100), [other]), "compute_ns", "forward")
    assert "divided by its forwards" in one.samples


def test_only_whole_forwards_of_the_window_count() -> None:
    run = with_forwards(1, 2, np.full((2, 6), 8.0))
    cut = run.forwards.with_columns(pl.col("forward") != 2).rename({"forward": "whole_"})
    table = run.forwards.with_columns(cut["whole_"].alias("whole"))
    early = pl.col("start_utc_ns") - 10**9
    table = pl.concat([table, table.filter(pl.col("forward") == 0).with_columns(early, forward=pl.lit(9, pl.Int32))])
    comparison = compare(Result(run.document, {**run.tables, "forwards": table}), [run])
    assert row(comparison, "allreduce_count", "forward").values[0].forwards == 5


def test_unstable_ranks_are_left_out_and_named() -> None:
    ranks = [rank(world, allreduce_count=10) for world in range(4)] + [
        rank(4, allreduce_count=99, stable=False, reason="recorded 12 % of the run")
    ]
    comparison = compare(made(ranks), [made(ranks[:4])])
    assert row(comparison, "allreduce_count").values[0].n == 4
    assert comparison.base.left_out == ["rank 4: recorded 12 % of the run"]
    assert any("not in medians: rank 4" in note for note in comparison.notes)


def test_a_run_without_stable_ranks_has_no_numbers() -> None:
    bad = made([rank(world, stable=False, reason="cut") for world in range(4)])
    comparison = compare(bad, [made([rank(world) for world in range(4)])])
    assert row(comparison, "window_ns").values[0].reason == "no rank is stable"


# --- the same run twice, and a run before and after


@pytest.mark.parametrize("kind", ["published", "forwards", "real"])
def test_a_run_does_not_differ_from_itself(kind: str) -> None:
    if kind == "real":
        run = nsysk3.analyze(FIXTURES / "h200" / "tp2.sqlite")
    elif kind == "published":
        run = published(8, 4, 66, 392.3, 5.83)
    else:
        run = with_forwards(2, 2, 5 + np.random.default_rng(2).normal(0, 1, (4, 10)))
    comparison = compare(run, [run])
    assert {each.deltas[0].verdict for each in comparison.rows} <= {
        "no difference shown",
        "not enough samples",
        "not known",
    }
    assert {each.deltas[0].change for each in comparison.rows} <= {0, None}
    assert comparison.comparability[0].paired


def test_before_and_after_ranks_pair() -> None:
    # Ranks differ by far more than the change: only pairing shows it.
    own = np.linspace(100, 900, 16)
    before, after, deeper = (
        made(
            [
                rank(world, 0, allreduce_total_ns=round((ms + gain) * MS), allreduce_count=9)
                for world, ms in enumerate(own)
            ],
            manifest=manifest(pp, 16 // pp),
        )
        for pp, gain in ((1, 0), (1, -5), (2, -5))
    )
    comparison = compare(before, [after, deeper], ["before", "after", "deeper"])
    assert [pair.paired for pair in comparison.comparability] == [True, False]
    assert [delta.verdict for delta in row(comparison, "allreduce_total_ns").deltas] == ["lower", "no difference shown"]


def test_ranks_never_pair_across_layouts(section_9_3: Comparison) -> None:
    assert not section_9_3.comparability[0].paired
    assert section_9_3.comparability[0].same_layout is False


# --- ladders


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


# --- comparability


def pair(base: Result, other: Result) -> Any:
    return compare(base, [other]).comparability[0]


def plain(saying: dict[str, Any] | None, **more: Any) -> Result:
    return made([rank(world, gpu_name="RTX 6000D", gpu_uuid="u") for world in range(4)], manifest=saying, **more)


def with_reports(result: Result, exporter: str = "2025.3.2") -> Result:
    from nsysk3.result.model import ReportInfo

    report = ReportInfo(
        name="r", path="r", host="h", kind="sqlite", exporter=exporter, schema_version=None, clock="none",
        diagnostics=[],
    )  # fmt: skip
    return Result(result.document.model_copy(update={"reports": [report]}), result.tables)


def test_only_pp_and_tp_differ() -> None:
    found = pair(with_reports(plain(manifest(1, 4))), with_reports(plain(manifest(4, 1))))
    assert (found.single_variable, found.differences, found.unknown) == (True, [], [])
    assert "besides PP and TP nothing that the manifests record differs" in found.summary


def test_ep_is_a_second_variable() -> None:
    found = pair(plain(manifest(8, 4)), plain(manifest(16, 2, ep=2)))
    assert found.single_variable is False
    assert "EP4 -> EP2" in found.differences
    assert "EP4 -> EP2: not a single-variable comparison" in found.summary


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"server": {"moe_runner_backend": "marlin"}}, "MoE runner backend flashinfer_mxfp4 -> marlin"),
        ({"server": {"chunked_prefill_size": 16384}}, "chunk 8192 -> 16384"),
        ({"server": {"image": "sglang:old"}}, "image sglang:k3 -> sglang:old"),
        ({"load": {**LOAD, "concurrency": 16}}, "concurrency 8 -> 16"),
        ({"versions": {"sglang": "0.5.23"}}, "SGLang version 0.5.17 -> 0.5.23"),
    ],
)
def test_what_differs_is_named(changed: dict[str, Any], said: str) -> None:
    other = manifest(4, 1)
    other |= {key: {**other[key], **value} for key, value in changed.items()}
    found = pair(plain(manifest(1, 4)), plain(other))
    assert found.single_variable is False
    assert said in found.differences


def test_settings_nobody_listed_are_compared_too() -> None:
    options = {"trace": "cuda,nvtx", "cuda-graph-trace": "node", "out_dir": "/a"}
    base, other = manifest(1, 4), manifest(4, 1, pp_max_micro_batch_size=1)
    base["server"]["pp_max_micro_batch_size"] = 2
    base["nsys"] = {"options": options}
    other["nsys"] = {"options": {**options, "cuda-graph-trace": "graph", "out_dir": "/b"}}
    found = pair(plain(base), plain(other))
    assert "pp_max_micro_batch_size 2 -> 1" in found.differences
    assert "options.cuda_graph_trace node -> graph" in found.differences
    assert not any("out_dir" in text for text in found.differences)


def test_without_a_manifest_nothing_is_claimed() -> None:
    found = pair(plain(None), plain(manifest(4, 1)))
    assert found.single_variable is None
    assert {"model", "chunk", "concurrency"} <= set(found.unknown)
    assert any("no manifest for" in line for line in found.summary)
    comparison = compare(plain(None), [plain(manifest(4, 1))])
    assert comparison.base.layout.source == "inferred"
    assert comparison.base.layout.text == "PP1 / TP4"
    assert "no manifest for PP1" in comparison.verdict[1]


def test_simulated_against_real_is_said() -> None:
    found = pair(plain(manifest(1, 4)), plain(manifest(4, 1), simulated="calibrated on published figures"))
    assert "one run is simulated, the other real" in found.differences
    both = compare(*(plain(manifest(pp, 4 // pp), simulated="made up") for pp in (1, 4)))
    assert both.verdict[1].startswith("Limits: all runs are simulated")


def test_windows_that_differ_are_named() -> None:
    found = pair(plain(manifest(1, 4)), plain(manifest(4, 1), window="prefill"))
    assert "window capture -> prefill" in found.differences


def test_layouts_are_inferred_from_stages() -> None:
    comparison = compare(with_forwards(2, 2, np.ones((4, 3)), bare=True), [with_forwards(4, 1, np.ones((4, 3)))])
    assert comparison.base.layout.model_dump(exclude={"note"}) == {
        "pp": 2, "tp": 2, "ep": None, "ranks": 4, "source": "inferred", "text": "PP2 / TP2",
    }  # fmt: skip
    assert comparison.others[0].layout.source == "manifest"


def test_a_layout_nobody_knows_is_not_guessed() -> None:
    run = made([rank(world, pp_rank=None, p2p_count=3) for world in range(4)])
    comparison = compare(run, [run])
    assert comparison.base.layout.pp is None
    assert comparison.labels == ["base", "other"]
    assert not comparison.comparability[0].paired
    assert not row(comparison, "exposed_comm_share").deltas[0].like_for_like


def test_a_manifest_the_trace_contradicts_is_doubted() -> None:
    run = with_forwards(4, 1, np.ones((4, 3)))
    document = run.document.model_copy(update={"manifest": manifest(2, 2)})
    assert "the trace shows 4 stages" in (compare(Result(document, run.tables), [run]).base.layout.note or "")


# --- the document


def test_rows_do_not_depend_on_the_order_of_tables() -> None:
    run = with_forwards(2, 2, 5 + np.random.default_rng(2).normal(0, 1, (4, 10)))
    mixed = {name: run.tables[name].sample(fraction=1, shuffle=True, seed=5) for name in ("forwards", "collectives")}
    other = with_forwards(1, 4, 6 + np.random.default_rng(3).normal(0, 1, (4, 10)))
    assert compare(run, [other]) == compare(Result(run.document, {**run.tables, **mixed}), [other])


def test_it_round_trips_and_fits_its_schema(section_9_3: Comparison) -> None:
    text = section_9_3.to_json()
    assert Comparison.model_validate_json(text) == section_9_3
    Draft202012Validator(schema()).validate(json.loads(text))


def test_the_written_schema_is_current() -> None:
    # To make it anew: python -c 'from nsysk3.compare.model import *; print(schema_text(), end="")' > docs/...
    assert (ROOT / "docs" / "comparison.schema.json").read_text("utf-8") == schema_text()


def test_metrics_have_one_name_each() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    assert {metric.unit for metric in METRICS} == {"ns", "count", "share"}


@pytest.mark.parametrize(
    ("labels", "said"), [(["a"], "1 labels for 2 runs"), (["a", "a"], "the same label"), (["a", "b", "c"], "3 labels")]
)
def test_labels_must_fit(labels: list[str], said: str) -> None:
    run = plain(None)
    with pytest.raises(InputError, match=said):
        compare(run, [run], labels)


def test_one_run_is_no_comparison() -> None:
    with pytest.raises(InputError, match="at least one other run"):
        compare(plain(None), [])


# --- real traces


def test_real_tp2_against_pp2() -> None:
    tp2, pp2 = (nsysk3.analyze(FIXTURES / "h200" / f"{name}.sqlite") for name in ("tp2", "pp2"))
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
    runs = [nsysk3.analyze(FIXTURES / "sglang-h200" / f"{name}-lw.sqlite") for name in ("tp2", "pp2")]
    found = row(compare(runs[0], runs[1:]), "overlap_ratio")
    assert found.note == "100% of the overlap of PP2 is waiting beside compute and hides no transfer"


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


def test_a_cut_forward_is_no_divisor() -> None:
    run = with_forwards(1, 2, np.full((2, 6), 8.0))
    table = run.forwards.with_columns(pl.col("forward") < 5, whole=pl.col("forward") < 5).drop("forward")
    table = run.forwards.with_columns(table["whole"])
    cut = Result(run.document, {**run.tables, "forwards": table})
    comparison = compare(cut, [run])
    wall = row(comparison, "window_ns", "forward")
    assert wall.values[0].value is None
    assert "--window prefill" in (wall.values[0].reason or "")
    assert wall.values[1].value is not None
    # What is sampled inside forwards needs no divisor.
    assert row(comparison, "allreduce_total_ns", "forward").values[0].value == 32 * MS


def test_some_stages_do_not_speak_for_all() -> None:
    run = with_forwards(2, 1, np.full((2, 6), 8.0))
    tokens = pl.when(pl.col("stage") == 0).then("tokens").alias("tokens")
    half = Result(run.document, {**run.tables, "forwards": run.forwards.with_columns(tokens)})
    per_token = row(compare(half, [run]), "allreduce_total_ns", "1k_tokens")
    assert per_token.values[0].reason == "only some of the stages tell it"


def test_forwards_that_hold_little_of_the_window_are_doubted() -> None:
    run = with_forwards(1, 2, np.full((2, 10), 8.0))
    few = Result(run.document, {**run.tables, "forwards": run.forwards.filter(pl.col("forward") < 4)})
    note = row(compare(few, [run]), "allreduce_total_ns", "forward").note
    assert note == "whole forwards hold only 40% of the AllReduce calls of base"


def test_what_is_hardly_any_of_the_window_is_no_forward() -> None:
    run = with_forwards(1, 2, np.full((2, 10), 8.0))
    few = Result(run.document, {**run.tables, "forwards": run.forwards.filter(pl.col("forward") < 1)})
    values = row(compare(few, [run]), "allreduce_total_ns", "forward").values
    assert values[0].reason == "what was taken for forwards holds only 10% of the window's AllReduce calls"
    assert values[1].value == 32 * MS
