"""Results made by hand for comparisons: every rank's metrics, forwards and AllReduce calls are what a test says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import polars as pl

from nsysk3.compare import Comparison, compare
from nsysk3.compare.catalog import METRICS
from nsysk3.compare.model import Comparability, Row
from nsysk3.result import RankMetrics, Result, ResultDocument
from nsysk3.result.model import ClockInfo, LayerInfo, ReportInfo, WindowInfo

MS = 1_000_000
START = 1_795_978_369_000_000_000
SERVER = {
    "model_path": "/models/Kimi-K3",
    "image": "sglang:k3",
    "moe_runner_backend": "flashinfer_mxfp4",
    "moe_a2a_backend": "none",
    "chunked_prefill_size": 8192,
    "disable_radix_cache": True,
    "mem_fraction_static": 0.88,
}
_NO_LAYERS = LayerInfo(
    sources=[], attributed_share=None, boundary_share=None, period_confidence=None, whole_forwards=None, timeline=""
)
LOAD = {"input_len": 16384, "output_len": 1, "concurrency": 8}


def manifest(pp: int, tp: int, ep: int = 4, **server: Any) -> dict[str, Any]:
    """run.json of the user's experiment."""
    return {
        "engine": "sglang",
        "topology": {"pp": pp, "tp": tp, "ep": ep, "nnodes": 4},
        "server": {**SERVER, "pp_size": pp, "tp_size": tp, **server},
        "load": dict(LOAD),
        "versions": {"sglang": "0.5.17"},
    }


def rank(world: int, stage: int = 0, **metrics: Any) -> dict[str, Any]:
    """One row of rank_metrics; what is not given is nothing."""
    row: dict[str, Any] = {}
    for name, field in RankMetrics.model_fields.items():
        kind = str(field.annotation)
        row[name] = "" if kind == "<class 'str'>" else 0 if "int" in kind else 0.0 if "float" in kind else None
    row |= {
        "host": f"node{world // 8}", "report": "r", "pid": world + 1, "device_id": world % 8, "world_rank": world,
        "pp_rank": stage, "tp_rank": 0, "stable": True, "window_ns": 1000 * MS, "window_start_utc_ns": START,
        "rank_source": "manifest", "coverage": 1.0, "ep_rank": None,
    }  # fmt: skip
    return row | metrics


def made(
    ranks: Sequence[Mapping[str, Any]],
    *,
    manifest: Mapping[str, Any] | None = None,
    simulated: str | None = None,
    window: str = "capture",
    **tables: pl.DataFrame,
) -> Result:
    """A result with these ranks."""
    rows = [RankMetrics.model_validate(row) for row in ranks]
    document = ResultDocument(
        nsysk3_version="0", simulated=simulated, manifest=dict(manifest) if manifest else None,
        window=WindowInfo(asked=window, used=window), reports=[], problems=[], notes=[], not_measured={},
        clock=ClockInfo(reports=[], edges=[]), matched=[], sentences=[], ranks=rows, tables={}, layers=_NO_LAYERS,
        summary={"ranks": len(rows), "stable_ranks": sum(row.stable for row in rows), "median": {}},
    )  # fmt: skip
    frame = pl.DataFrame([row.model_dump() for row in rows], infer_schema_length=None)
    return Result(document, {"rank_metrics": frame, **tables})


def with_forwards(
    pp: int, tp: int, call_ms: np.ndarray, *, calls: int = 4, tokens: int | None = 8192, ep: int = 4, bare: bool = False
) -> Result:
    """Ranks whose forward f makes ``calls`` AllReduce of ``call_ms[rank, f]`` each, a quarter of it waiting.

    Forwards last 10 ms more than their AllReduce and follow each other.
    """
    count, number = call_ms.shape
    forwards, reductions, ranks = [], [], []
    for world in range(count):
        at = START
        for forward in range(number):
            spent = round(float(call_ms[world, forward]) * MS)
            first = at
            for call in range(calls):
                reductions.append(
                    {
                        "communicator": f"stage {world // tp}", "op": "allreduce", "seq": forward * calls + call,
                        "rank": world, "start_utc_ns": at, "end_utc_ns": at + spent, "duration_ns": spent,
                        "wait_ns": spent // 4, "transfer_ns": spent - spent // 4,
                    }
                )  # fmt: skip
                at += spent
            at += 10 * MS
            forwards.append(
                {
                    "rank": world, "stage": world // tp, "forward": forward, "start_utc_ns": first, "end_utc_ns": at,
                    "kernels": calls, "tokens": tokens, "whole": True, "source": "marker",
                }
            )  # fmt: skip
            at += 1000
        mine = [row for row in reductions if row["rank"] == world]
        durations = [row["duration_ns"] for row in mine]
        ranks.append(
            rank(
                world, world // tp, window_ns=at - START, allreduce_count=len(mine), allreduce_total_ns=sum(durations),
                allreduce_p50_ns=float(np.median(durations)), comm_ns=sum(durations), exposed_comm_ns=sum(durations),
                exposed_comm_share=sum(durations) / (at - START),
            )
        )  # fmt: skip
    rank_type = {"rank": pl.Int32}
    return made(
        ranks, manifest=None if bare else manifest(pp, tp, ep),
        forwards=pl.DataFrame(forwards, schema_overrides={**rank_type, "forward": pl.Int32, "tokens": pl.Int64}),
        collectives=pl.DataFrame(reductions, schema_overrides=rank_type),
    )  # fmt: skip


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


def plain(saying: Mapping[str, Any] | None, **more: Any) -> Result:
    """Four ranks of one GPU model, with this manifest."""
    return made([rank(world, gpu_name="RTX 6000D", gpu_uuid="u") for world in range(4)], manifest=saying, **more)


def with_reports(result: Result, exporter: str = "2025.3.2") -> Result:
    """The same with a report that this exporter wrote."""
    report = ReportInfo(
        name="r", path="r", host="h", kind="sqlite", exporter=exporter, schema_version=None, clock="none",
        diagnostics=[],
    )  # fmt: skip
    return Result(result.document.model_copy(update={"reports": [report]}), result.tables)


def row(comparison: Comparison, metric: str, scope: str = "window") -> Row:
    """The one row of a metric in a scope."""
    found = [each for each in comparison.rows if (each.metric, each.scope) == (metric, scope)]
    assert len(found) == 1, (metric, scope)
    return found[0]


def pair(base: Result, other: Result) -> Comparability:
    """What may be compared between two results, whichever their metrics are: one is worked out."""
    with patch("nsysk3.compare.compare.METRICS", METRICS[:1]):
        return compare(base, [other]).comparability[0]
