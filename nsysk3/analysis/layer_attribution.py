"""Layers and forwards of a run, by what its traces allow: NVTX, the order of graph nodes, or the period of names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import polars as pl

from nsysk3.analysis.attribution import attribute_by_ranges
from nsysk3.analysis.forward_ranges import forward_ranges
from nsysk3.analysis.graph_layers import attribute_graphs, captured_nodes
from nsysk3.analysis.layer_names import parse_names
from nsysk3.analysis.marked_ranges import main_stack, mark_ranges
from nsysk3.analysis.period import attribute_by_period
from nsysk3.analysis.sp_collectives import add_calls, sp_calls
from nsysk3.trace.nvtx import read_nvtx
from nsysk3.trace.report import Report

SP_MARK = "k3."


@dataclass(frozen=True)
class LayerAttribution:
    """What launched each event.

    ``events``: as given, with ``layer``, ``module``, ``forward``, ``host_forward``, ``layer_source`` and ``reason``.
    ``marked`` and ``host_forwards``: the ranges they come from (host times, UTC ns).  ``fits``: how well the period
    fits on ranks without NVTX layers.  ``sp_calls``: what marks say of SP collectives.  ``notes``: what a reader of the
    layers should know.
    """

    events: pl.DataFrame
    marked: pl.DataFrame
    host_forwards: pl.DataFrame
    fits: pl.DataFrame
    sp_calls: pl.DataFrame
    notes: tuple[str, ...]


def attribute_layers(
    events: pl.DataFrame,
    ranks: pl.DataFrame,
    reports: Sequence[Report],
    *,
    layer_regex: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> LayerAttribution:
    """Give events their layer, module and forward.

    ``events`` are assign_roles's on the reports' own clocks, not yet aligned: they are compared with the ranges of
    their report.  ``ranks`` need report, pid and pp_rank (null where the stage is unknown).  Raises InputError for a
    ``layer_regex`` that cannot be used.
    """
    marked, calls, notes = _marked(reports, layer_regex, progress)
    host_forwards = forward_ranges(marked)
    found = attribute_by_ranges(events, ranks, marked, host_forwards)
    if events["graph_node"].null_count() < events.height:
        found = attribute_graphs(found, ranks, marked, captured_nodes(reports))
    found, fits = attribute_by_period(found, ranks)
    graphs = found.filter((pl.col("reason").cast(pl.String) == "graph replay") & (pl.col("kind") == "kernel"))
    inside = graphs.select("rank").unique().sort("rank")
    if inside.height:
        notes.append(
            f"{_ranks(inside)}: kernels of CUDA graph replays have no layers: neither the graphs' capture nor an eager "
            "forward is in the trace"
        )
        # What is left beside the graphs is no sequence of forwards, and says nothing about its period.
        fits = fits.filter(pl.col("reason").is_null() | ~pl.col("rank").is_in(inside["rank"].implode()))
    return LayerAttribution(found, marked, host_forwards, fits, calls, (*notes, *_fit_notes(fits)))


def _marked(
    reports: Sequence[Report], layer_regex: str | None, progress: Callable[[str], None] | None
) -> tuple[pl.DataFrame, pl.DataFrame, list[str]]:
    """The ranges that matter of all reports; one report's whole NVTX table is in memory at a time."""
    parts, calls, notes = [], [], []
    for index, report in enumerate(reports):
        if progress:
            progress(f"reading the ranges of {report.name} ({index + 1}/{len(reports)})")
        every = read_nvtx(report, lambda names: _of_use(names, layer_regex))
        ranges, dropped = mark_ranges(every, index, layer_regex)
        parts.append(ranges)
        calls.append(sp_calls(every["name"].filter(every["name"].cat.starts_with(SP_MARK))))
        if dropped:
            notes.append(
                f"{report.name}: {dropped} start/end ranges that name layers were not used: "
                "they cross threads or other ranges"
            )
    return main_stack(pl.concat(parts)), add_calls(calls), notes


def _of_use(names: pl.Series, layer_regex: str | None) -> pl.Series:
    return pl.concat([parse_names(names, layer_regex)["name"], names.filter(names.str.starts_with(SP_MARK))])


def _fit_notes(fits: pl.DataFrame) -> list[str]:
    notes = []
    found = fits.filter(pl.col("reason").is_null())
    if found.height:
        notes.append(
            f"{_ranks(found)}: no NVTX layers; layers and forwards were found from the period of the kernel sequence "
            f"(confidence {min(found['confidence'].to_list()):.0%} of kernel time)"
        )
    local = found.filter(pl.col("first_layer").is_null())
    if local.height:
        notes.append(f"{_ranks(local)}: the pipeline stages are unknown, so layers count from 0 on each rank")
    for reason in fits["reason"].drop_nulls().unique(maintain_order=True).to_list():
        notes.append(f"{_ranks(fits.filter(pl.col('reason') == reason))}: no layers: no NVTX, and {reason}")
    return notes


def _ranks(rows: pl.DataFrame) -> str:
    numbers = rows["rank"].sort().to_list()
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
