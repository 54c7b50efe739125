"""Layers of all events of a run at once: the pieces that the steps apply report by report, for a look between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from nsysk3.analysis.attribution import launched_in, told_apart, with_numbers
from nsysk3.analysis.forward_ranges import forward_ranges
from nsysk3.analysis.graph_layers import attribute_graphs, captured_nodes
from nsysk3.analysis.layer_attribution import layer_notes, report_ranges, unplaced_graphs
from nsysk3.analysis.marked_ranges import main_stack
from nsysk3.analysis.period import fit_ranks, with_first_layers, with_period
from nsysk3.trace.report import Report


@dataclass(frozen=True)
class Layers:
    """Events with what launched them, and what was said of it."""

    events: pl.DataFrame
    marked: pl.DataFrame
    host_forwards: pl.DataFrame
    fits: pl.DataFrame
    notes: tuple[str, ...]


def attribute_layers(
    events: pl.DataFrame, ranks: pl.DataFrame, reports: Sequence[Report], *, layer_regex: str | None = None
) -> Layers:
    """From ranges, then from the order of graph nodes, then from the period of names."""
    ranges = [report_ranges(report, layer_regex, index) for index, report in enumerate(reports)]
    marked = main_stack(pl.concat(each.marked for each in ranges))
    host_forwards = forward_ranges(marked)
    found = attribute_by_ranges(events, ranks, marked, host_forwards)
    if events["graph_node"].null_count() < events.height:
        found = attribute_graphs(found, ranks, marked, captured_nodes(reports))
    found, fits = attribute_by_period(found, ranks)
    notes, fits = layer_notes(ranges, unplaced_graphs(found), fits)
    return Layers(found, marked, host_forwards, fits, notes)


def attribute_by_ranges(
    events: pl.DataFrame, ranks: pl.DataFrame, marked: pl.DataFrame, host_forwards: pl.DataFrame
) -> pl.DataFrame:
    found = launched_in(events, ranks, marked, host_forwards)
    return with_numbers(found, host_forwards, told_apart(host_forwards))


def attribute_by_period(events: pl.DataFrame, ranks: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    found, fits = fit_ranks(events)
    fits = with_first_layers(fits, ranks, bool((events["role"] == "p2p").any()))
    return with_period(events, found, fits), fits
