"""All reports' answers as the tables and the document of a result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import polars as pl

from nsysk3.analysis.attribution import LAYER_SOURCES
from nsysk3.analysis.bandwidth import bandwidth_table
from nsysk3.analysis.clocks import Clocks
from nsysk3.analysis.cross import Matched
from nsysk3.analysis.document import document
from nsysk3.analysis.layer_summary import layer_rows, layer_summary
from nsysk3.analysis.metrics import kernel_table, rank_table
from nsysk3.analysis.pipeline import pipeline_table
from nsysk3.analysis.run_tables import budget_table, device_table, unclassified_table
from nsysk3.analysis.sp_collectives import add_calls, sp_info
from nsysk3.analysis.stability import stability
from nsysk3.analysis.steps import Summed, plain
from nsysk3.analysis.stragglers import straggler_table
from nsysk3.analysis.summaries import budget_summary, report_tables, top_kernels
from nsysk3.analysis.timeline import timeline_table
from nsysk3.analysis.windows import within
from nsysk3.result.model import LayerInfo, RankMetrics, WindowInfo
from nsysk3.result.store import Result
from nsysk3.trace.facts import ReportFacts
from nsysk3.trace.load import Roster

MIN_ATTRIBUTED = 0.9


@dataclass(frozen=True)
class Found:
    """What was decided of the whole run before its tables were made.

    ``matched`` with ``kind`` of collectives and hidden waits of pairs; ``forwards``: those in their rank's window;
    ``fits``: of periods, those that say something; ``calls``: of SP marks, by report; ``drawn``: which events are.
    """

    matched: Matched
    stages: pl.DataFrame
    windows: pl.DataFrame
    window: WindowInfo
    captures: pl.DataFrame
    forwards: pl.DataFrame
    fits: pl.DataFrame
    calls: Sequence[pl.DataFrame]
    notes: Sequence[str]
    drawn: str


def result_of(
    run: Roster, found: Found, summed: Sequence[Summed], comm: Sequence[int], reference: pl.DataFrame
) -> Result:
    """The result.

    ``summed``: answers of the last step, by report; ``comm``: how many communication events each has; ``reference``:
    see read_nccl_tests.
    """
    windows, stages, inside = found.windows, found.stages, found.forwards
    collectives = within(found.matched.collectives, windows, "rank", "start_utc_ns")
    pairs = within(found.matched.pairs, windows, "dst_rank", "recv_start_utc_ns")
    sent = within(found.matched.pairs, windows, "src_rank", "send_start_utc_ns")
    by_rank = {rank: each for one in summed for rank, each in one.budgets.items()}
    by_rank = {rank: by_rank[rank] for rank in windows["rank"].to_list()}
    every = {name: pl.concat(one.tables[name] for one in summed) for name in summed[0].tables if name != "drawn"}
    # A report's rows are in order; its ranks may lie between those of others.
    every = {name: table.sort("rank", maintain_order=True) for name, table in every.items()}
    recordings = _recordings(run.facts, found.matched.clocks)
    unsplit = found.matched.unsplit
    steady = stability(run.ranks, found.captures, recordings, every["work"], inside, unsplit)
    ranks = rank_table(run.ranks, windows, every["sums"], by_rank, steady, unsplit)
    kernels = kernel_table(every["kernels"], run.names)
    budget = budget_table(by_rank)
    per_layer = layer_summary(every["layers"], windows, inside)
    offsets = list(accumulate(comm, initial=0))
    drawn = pl.concat(
        one.tables["drawn"].with_columns(pl.col("event") + low) for one, low in zip(summed, offsets[:-1], strict=True)
    )
    times = {rank: each for one in summed for rank, each in one.stages.items()}
    timeline, said = timeline_table(
        drawn, sum(one.drawn for one in summed), run.names, found.matched.collectives, found.drawn
    )
    tables = {
        "rank_metrics": ranks.select(*RankMetrics.model_fields),
        "nsys_device_metrics": device_table(ranks),
        "budget": budget,
        "budget_summary": budget_summary(budget, ranks, stages),
        "top_kernels": top_kernels(kernels, ranks.height),
        "roles": every["roles"],
        "categories": every["categories"],
        "kernels": kernels,
        "unclassified": unclassified_table(kernels),
        "collectives": collectives.rename({"role": "op"}).drop("event"),
        "p2p": pairs.drop("send_event", "recv_event"),
        "p2p_unmatched": found.matched.lonely,
        "pipeline": pipeline_table(stages, times, by_rank, inside.filter("whole"), unsplit, found.matched.stages),
        "bandwidth": bandwidth_table(collectives, pairs, reference),
        "stragglers": straggler_table(collectives),
        "forwards": plain(inside),
        "layers": every["layers"],
        "layer_summary": plain(per_layer),
        "layer_rows": plain(layer_rows(per_layer)),
        "layer_categories": every["layer_categories"],
        "unattributed": every["unattributed"],
        "timeline": timeline,
    }
    tables |= report_tables(tables)
    layers = _layer_info(summed, found.fits, ranks, inside, said)
    sp = sp_info(run.manifest, kernels, add_calls(found.calls), any(one.opaque for one in summed))
    notes = [*found.notes, *_attribution_note(layers)]
    return Result(document(run, tables, found.matched, found.window, layers, notes, sent, sp), tables)


def _layer_info(
    summed: Sequence[Summed], fits: pl.DataFrame, ranks: pl.DataFrame, forwards: pl.DataFrame, drawn: str
) -> LayerInfo:
    seen = {source for one in summed for source in one.sources}
    confidence = fits["confidence"].drop_nulls().min()
    whole = forwards.filter("whole").group_by("rank").len()["len"]
    share, boundary = ranks["attributed_share"].min(), ranks["boundary_share"].max()
    return LayerInfo(
        sources=[source for source in LAYER_SOURCES.categories if source in seen],
        attributed_share=share if isinstance(share, float) else None,
        boundary_share=boundary if isinstance(boundary, float) else None,
        period_confidence=confidence if isinstance(confidence, float) else None,
        whole_forwards=int(whole.min()) if len(whole) else None,  # type: ignore[arg-type]
        timeline=drawn,
    )


def _attribution_note(layers: LayerInfo) -> list[str]:
    """Below 90 % of the kernel time that could have a layer, say so: boundary kernels have none."""
    if not layers.sources or layers.attributed_share is None:
        return []
    could = 1 - (layers.boundary_share or 0)
    if layers.attributed_share >= MIN_ATTRIBUTED * could:
        return []
    return [
        f"only {layers.attributed_share:.0%} of kernel time could be given a layer on the worst rank "
        "(table unattributed says why): per-layer numbers are that much too small"
    ]


def _recordings(reports: Sequence[ReportFacts], clocks: Clocks) -> pl.DataFrame:
    """When each report was recording: ``report``, ``start``, ``end`` (UTC ns, null if it does not say), ``clocked``."""
    cells = [
        (
            index,
            report.time_shift_ns + report.to_utc_ns - round(clocks.offset_ns[index])
            if report.end_ns is not None
            else None,
            report.end_ns + report.to_utc_ns - round(clocks.offset_ns[index]) if report.end_ns is not None else None,
            report.clock != "none" or len(reports) == 1,
        )
        for index, report in enumerate(reports)
    ]
    schema = {"report": pl.Int64, "start": pl.Int64, "end": pl.Int64, "clocked": pl.Boolean}
    return pl.DataFrame(cells, schema=schema, orient="row")
