"""From a loaded run to a result: the order in which the analyses are applied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import polars as pl

from nsysk3.analysis.allreduce_kinds import collective_kinds, moe_shares
from nsysk3.analysis.bandwidth import bandwidth_table
from nsysk3.analysis.clocks import Clocks
from nsysk3.analysis.cross import CrossRank, cross_rank
from nsysk3.analysis.document import document
from nsysk3.analysis.forward_windows import prefill_windows, steady_windows
from nsysk3.analysis.forwards import forward_table
from nsysk3.analysis.layer_attribution import LayerAttribution, attribute_layers
from nsysk3.analysis.layer_summary import layer_rows, layer_summary
from nsysk3.analysis.layers import attributed_shares, layer_categories, layer_table, unattributed_reasons
from nsysk3.analysis.metrics import budgets, category_table, in_window, kernel_table, rank_table, role_table
from nsysk3.analysis.nccl_links import LINK_SCHEMA
from nsysk3.analysis.nccl_tests import read_nccl_tests
from nsysk3.analysis.pipeline import infer_stages, pipeline_table, stage_gaps
from nsysk3.analysis.roles import assign_roles
from nsysk3.analysis.run_tables import budget_table, device_table, unclassified_table
from nsysk3.analysis.sp_collectives import sp_info
from nsysk3.analysis.stability import stability
from nsysk3.analysis.stragglers import straggler_table
from nsysk3.analysis.summaries import budget_summary, report_tables, top_kernels
from nsysk3.analysis.timeline import timeline_table
from nsysk3.analysis.windows import WindowSpec, capture_windows, explicit_windows, parse_window, within
from nsysk3.classify import RuleSet
from nsysk3.errors import InputError
from nsysk3.result.model import LayerInfo, RankMetrics, WindowInfo
from nsysk3.result.store import Result
from nsysk3.trace.load import Run, load
from nsysk3.trace.report import Report

MIN_ATTRIBUTED = 0.9
_LAYER_COLUMNS = ["layer", "module", "forward", "host_forward", "layer_source", "reason"]


def analyze(
    run: Run | str | Path | Sequence[str | Path],
    *,
    window: str = "capture",
    rules: RuleSet | str | Path | None = None,
    nccl_tests: Sequence[str | Path] = (),
    layer_regex: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Result:
    """Analyse one run.

    ``run``: what ``load`` gave, or paths to load.  ``window``: ``capture``, ``prefill``, ``steady`` or ``START:END``
    counted from the run's first kernel (``0.5s:2s``).  ``rules``: a rules file whose rules go before the shipped ones.
    ``nccl_tests``: logs of nccl-tests on the same machines, to hold the measured bandwidth against.  ``layer_regex``:
    finds layers in NVTX names, with a group named ``layer``.  Raises InputError for unusable input or arguments.
    """
    spec = parse_window(window)
    ruleset = rules if isinstance(rules, RuleSet) else RuleSet.load(Path(rules) if rules else None)
    reference = read_nccl_tests([Path(path) for path in nccl_tests])
    loaded = run if isinstance(run, Run) else load(run, progress=progress)
    say = progress or (lambda _: None)
    say("matching ranks")
    named = assign_roles(loaded.events, loaded.names, loaded.nccl_calls, ruleset)
    found = cross_rank(named, loaded.ranks, len(loaded.reports))
    stages = infer_stages(loaded.ranks, found.pairs)
    staged = loaded.ranks.drop("pp_rank").join(stages.rename({"stage": "pp_rank"}), on="rank", how="left")
    say("finding layers")
    # Ranges and launches are compared on each report's own clock, so with the events as they were before alignment.
    bare = named.drop(*LINK_SCHEMA, "bytes")  # what layers do not need, so that no step copies it
    attributed = attribute_layers(bare, staged, loaded.reports, layer_regex=layer_regex, progress=progress)
    events = collective_kinds(found.events.hstack(attributed.events.select(_LAYER_COLUMNS)))
    say("summing up")
    return _result(loaded, spec, ruleset, reference, attributed, found, events, staged)


def _result(
    loaded: Run,
    spec: WindowSpec,
    rules: RuleSet,
    reference: pl.DataFrame,
    attributed: LayerAttribution,
    found: CrossRank,
    events: pl.DataFrame,
    staged: pl.DataFrame,
) -> Result:
    stages = staged.select("rank", pl.col("pp_rank").alias("stage"), "stage_source")
    forwards = forward_table(events, staged, attributed.host_forwards)
    captures = capture_windows(events)
    windows, info = _windows(spec, captures, forwards, loaded.ranks, attributed.marked)
    counted = in_window(events, windows)
    collectives = within(found.collectives, windows, "rank", "start_utc_ns")
    pairs = within(found.pairs, windows, "dst_rank", "recv_start_utc_ns")
    sent = within(found.pairs, windows, "src_rank", "send_start_utc_ns")
    inside = within(forwards, windows, "rank", "start_utc_ns")
    gaps = stage_gaps(events, found.pairs.select(pl.col("recv_event").alias("event"), "kind"))
    by_rank = budgets(events, windows, gaps)
    recordings = _recordings(loaded.reports, found.clocks)
    steady = stability(loaded.ranks, captures, recordings, counted, inside)
    shares = attributed_shares(counted).select("rank", "attributed_share", "boundary_share")
    moe = moe_shares(counted).select("rank", "moe_share")
    ranks = rank_table(loaded.ranks, windows, counted, by_rank, steady)
    ranks = ranks.join(shares, on="rank", how="left").join(moe, on="rank", how="left").sort("rank")
    kernels = kernel_table(counted, loaded.names)
    budget = budget_table(by_rank)
    layers = layer_table(counted, staged)
    per_layer = layer_summary(layers, windows, inside)
    timeline, drawn = timeline_table(events, loaded.names, inside, found.collectives, windows)
    kind = events["collective_kind"].gather(collectives["event"]).alias("kind")
    tables = {
        "rank_metrics": ranks.select(*RankMetrics.model_fields),
        "nsys_device_metrics": device_table(ranks),
        "budget": budget,
        "budget_summary": budget_summary(budget, ranks, stages),
        "top_kernels": _plain(top_kernels(kernels, ranks.height)),
        "roles": _plain(role_table(counted)),
        "categories": _plain(category_table(counted)),
        "kernels": _plain(kernels),
        "unclassified": unclassified_table(kernels),
        "collectives": _plain(collectives.rename({"role": "op"}).with_columns(kind).drop("event")),
        "p2p": pairs.drop("send_event", "recv_event"),
        "p2p_unmatched": found.lonely,
        "pipeline": pipeline_table(events, stages, windows, by_rank, pairs, inside.filter("whole")),
        "bandwidth": bandwidth_table(collectives, pairs, reference),
        "stragglers": straggler_table(collectives),
        "forwards": _plain(inside),
        "layers": _plain(layers),
        "layer_summary": _plain(per_layer),
        "layer_rows": _plain(layer_rows(per_layer)),
        "layer_categories": _plain(layer_categories(counted)),
        "unattributed": _plain(unattributed_reasons(counted)),
        "timeline": _plain(timeline),
    }
    tables |= report_tables(tables)
    about_layers = _layer_info(attributed, counted, ranks, inside, drawn)
    notes = [*rules.notes, *attributed.notes, *_attribution_note(about_layers)]
    opaque = not counted.filter(pl.col("kind") == "graph").is_empty()
    sp = sp_info(loaded.manifest, tables["kernels"], attributed.sp_calls, opaque)
    return Result(document(loaded, tables, found, info, about_layers, notes, sent, sp), tables)


def _plain(table: pl.DataFrame) -> pl.DataFrame:
    """Categories and enumerations as text: what parquet, CSV and JSON readers of any kind understand."""
    coded = [name for name, kind in table.schema.items() if isinstance(kind, pl.Categorical | pl.Enum)]
    return table.with_columns(pl.col(name).cast(pl.String) for name in coded)


def _windows(
    spec: WindowSpec, captures: pl.DataFrame, forwards: pl.DataFrame, ranks: pl.DataFrame, marked: pl.DataFrame
) -> tuple[pl.DataFrame, WindowInfo]:
    """The window of every rank, and what was asked for against what could be had."""
    if spec.start_ns is not None:
        found = explicit_windows(captures, spec)
        if (found["end"] <= found["start"]).all():
            length = (captures["end"].max() - captures["start"].min()) / 1e9  # type: ignore[operator]
            raise InputError(f"--window {spec.text}: no GPU work in it; the run's work lasts {length:.3f} s")
        return found, WindowInfo(asked=spec.text, used=spec.text)
    if spec.text == "capture":
        return captures, WindowInfo(asked="capture", used="capture")
    found = (
        prefill_windows(forwards, captures, ranks, marked)
        if spec.text == "prefill"
        else steady_windows(forwards, captures)
    )
    missing = found.filter(pl.col("reason").is_not_null())
    if missing.is_empty():
        return found.drop("reason"), WindowInfo(asked=spec.text, used=spec.text)
    # One window object for all numbers of a table: ranks are not mixed.
    reason = f"{missing.height} of {found.height} ranks: {missing['reason'][0]}"
    return captures, WindowInfo(asked=spec.text, used="capture", reason=reason)


def _layer_info(
    attributed: LayerAttribution, counted: pl.DataFrame, ranks: pl.DataFrame, forwards: pl.DataFrame, drawn: str
) -> LayerInfo:
    sources = counted["layer_source"].drop_nulls().unique().sort().cast(pl.String).to_list()
    confidence = attributed.fits["confidence"].drop_nulls().min()
    whole = forwards.filter("whole").group_by("rank").len()["len"]
    share, boundary = ranks["attributed_share"].min(), ranks["boundary_share"].max()
    return LayerInfo(
        sources=sources,
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


def _recordings(reports: Sequence[Report], clocks: Clocks) -> pl.DataFrame:
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
