"""What limits a run's numbers is told on its page: every flag that a result can hold, and every note."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest
from compare_results import MS, START, made, rank
from pydantic import BaseModel

from nsysk3.report.catalogue import LANGUAGES, catalogue
from nsysk3.report.sections.limits import limits
from nsysk3.report.view import View
from nsysk3.result import RankMetrics, Result, ResultDocument
from nsysk3.result.model import ClockReport, LayerInfo, MatchedInfo, SpInfo, WindowInfo

CLOCK = {"report": "r", "reference": "r", "offset_ns": 0, "drift_ppm": 0.0, "uncertainty_ns": 0, "reason": None}
FEATURE = {"name": "NSYSK3_MARKERS", "requested": True, "active": False, "fell_back": True, "reason": "an old server"}
# By model and field: what it may say that limits the numbers, and how the page puts it.
FLAGS: dict[type[BaseModel], dict[str, tuple[Any, str]]] = {
    RankMetrics: {
        "rank_source": ("inferred", "ranks numbered by host and GPU order, a guess: 1 of 2"),
        "stable": (False, "ranks not in the medians: 1 of 2"),
        "reason": ("recorded 60.0 % of the run", "(recorded 60.0 % of the run)"),
        "coverage": (0.93, "recorded only 93.0 % of the run"),
        "unclassified_share": (0.2, "kernels that no rule names: up to 20.0 %"),
        "graph_ns": (500 * MS, "their kernels are unknown: up to 50.0 % of a rank's window"),
        "exposed_unresolved_ns": (100 * MS, "nobody can say which: up to 10.0 % of a rank's window"),
        "dropped_rows": (22, "GPU rows left out for times that cannot be: 22"),
    },
    ResultDocument: {
        "simulated": ("simulated", "the traces are simulated"),
        "problems": (
            [{"path": "x", "message": "x: damaged"}],
            "inputs missing, not readable or contradicting others: 1",
        ),
        "not_measured": ({"moe_share": "no layer"}, "at least: MoE share of AllReduce (no layer)"),
        "notes": (["what nobody foresaw"], "what nobody foresaw"),
    },
    WindowInfo: {
        "used": ("capture", "window: capture (asked: steady; no forward)"),
        "asked": ("prefill", "(asked: prefill; no forward)"),
        "reason": ("why not", "(asked: steady; why not)"),
    },
    ClockReport: {
        "uncertainty_ns": (30_200, "clocks of different reports agree to 30.2 µs"),
        "reason": ("nothing in common", "reports that share no clock with the others"),
    },
    MatchedInfo: {"unmatched": (8, "communication kernels that found no partner: 8 of 160")},
}
MANIFEST: dict[str, tuple[Any, str]] = {
    "notes": (["all C=8 requests run at once"], "all C=8 requests run at once"),
    "cause": ({"step": "loading", "kind": "oom", "message": "no memory", "advice": None}, "ended as failed: no memory"),
    "features": ([FEATURE], "NSYSK3_MARKERS was asked for, but something else was used: an old server"),
}
# Names, numbers of the work itself, and what is seen elsewhere: kinds of waits and layers in notes, SP in sentences.
ELSEWHERE: dict[type[BaseModel], str] = {
    RankMetrics: "host report pid device_id gpu_uuid world_rank pp_rank tp_rank ep_rank gpu_name window_start_utc_ns "
    "window_ns compute_ns comm_ns fused_ns copy_ns overlap_ns overlap_ratio exposed_comm_ns exposed_comm_share "
    "idle_ns allreduce_count allreduce_total_ns allreduce_p50_ns allreduce_p95_ns allreduce_p99_ns p2p_count "
    "p2p_total_ns kernel_count kernel_total_ns wait_collective_ns wait_upstream_ns wait_downstream_ns transfer_ns "
    "unresolved_ns exposed_wait_ns exposed_transfer_ns overlap_wait_ns overlap_transfer_ns stage_idle_ns "
    "attributed_share moe_share",
    ResultDocument: "schema_version nsysk3_version manifest window reports clock matched layers sp sentences summary "
    "ranks tables",
    WindowInfo: "",
    ClockReport: "report reference offset_ns drift_ppm",
    MatchedInfo: "role matched",
    LayerInfo: "sources attributed_share boundary_share period_confidence whole_forwards timeline",
    SpInfo: "name requested active fell_back reason kernels calls fused_calls",
}


def result(kind: type[BaseModel] | None = None, **said: Any) -> Result:
    """Two ranks of which nothing is doubtful, but for what ``said`` says in the first object of ``kind``."""

    def of(model: type[BaseModel], **plain: Any) -> dict[str, Any]:
        return plain | (said if kind is model else {})

    found = made([of(RankMetrics, **rank(0)), rank(1)])
    changed = of(ResultDocument)
    if kind is WindowInfo:
        changed["window"] = of(WindowInfo, asked="steady", used="capture", reason="no forward")
    if kind is ClockReport:
        changed["clock"] = {"reports": [of(ClockReport, **CLOCK)], "edges": []}
    changed["matched"] = [of(MatchedInfo, role="allreduce", matched=152, unmatched=0)]
    document = ResultDocument.model_validate(found.document.model_dump() | changed)
    return Result(document, found.tables)


def told(found: Result, lang: str = "en") -> list[str]:
    return [text for text, _ in limits(View(found, catalogue(lang)), "").items]


NOTHING = {lang: catalogue(lang)("verdict.limit_none") for lang in LANGUAGES}


def test_of_what_is_certain_nothing_is_said() -> None:
    assert {lang: told(result(), lang) for lang in LANGUAGES} == {lang: [text] for lang, text in NOTHING.items()}


@pytest.mark.parametrize(
    ("kind", "field", "value", "says"),
    [(kind, field, *case) for kind, fields in FLAGS.items() for field, case in fields.items()],
)
def test_every_flag_is_told(kind: type[BaseModel], field: str, value: Any, says: str) -> None:
    found = result(kind, **({"stable": False} if field == "reason" and kind is RankMetrics else {}), **{field: value})
    assert says in "\n".join(told(found))
    assert NOTHING["zh"] not in told(found, "zh")


@pytest.mark.parametrize(("field", "value", "says"), [(field, *case) for field, case in MANIFEST.items()])
def test_what_the_manifest_knows_is_told(field: str, value: Any, says: str) -> None:
    found = result(ResultDocument, manifest={"status": "failed", field: value})
    assert says in "\n".join(told(found))


def test_every_field_of_a_result_is_a_limit_or_named_as_none() -> None:
    for kind, others in ELSEWHERE.items():
        assert {*FLAGS.get(kind, ()), *others.split()} == set(kind.model_fields), kind.__name__


@pytest.mark.parametrize(("window", "way"), [("capture", True), ("prefill", False)])
def test_forwards_that_the_window_cut_are_told(window: str, way: bool) -> None:
    """On one of two ranks, one forward is not whole and one lies in the window in part."""
    rows = [
        {
            "rank": each, "forward": forward, "start_utc_ns": START + (300 * forward) * MS, "tokens": 1,
            "end_utc_ns": START + (300 * forward + 290) * MS, "whole": (each, forward) != (0, 1),
        }
        for each in (0, 1) for forward in range(4 if each == 0 else 3)
    ]  # fmt: skip
    forwards = pl.DataFrame(rows, schema_overrides={"rank": pl.Int32, "forward": pl.Int32})
    (said,) = told(made([rank(0), rank(1)], window=window, forwards=forwards))
    assert said.startswith("forwards in the windows that are not whole (cut, or another kind of pass): 2 of 7, on 1 of")
    assert said.endswith("--window prefill leaves them out") == way


def test_who_is_left_out_of_a_comparison_is_told_in_chinese() -> None:
    english = "a: not in medians: rank 0: no whole forward in the window; rank 3: recorded 60.0 % of the run and 2 more"
    said, _ = catalogue("zh").said(english)
    assert said == "a：不计入中位数：Rank 0：窗口内没有完整的 forward；Rank 3：只记录了整次运行的 60.0 % 等"


def test_what_is_counted_is_not_told_twice() -> None:
    said = "1 of 2 ranks is numbered by host and GPU order, a guess: name them with --ranks"
    found = result(RankMetrics, rank_source="inferred")
    document = found.document.model_copy(update={"notes": [said]})
    assert told(Result(document, found.tables)) == told(found)
