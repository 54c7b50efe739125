"""Layers and forwards of a run, by what its traces allow: NVTX, the order of graph nodes, or the period of names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from nsysk3.analysis.layer_names import parse_names
from nsysk3.analysis.marked_ranges import mark_ranges
from nsysk3.analysis.sp_collectives import sp_calls
from nsysk3.trace.nvtx import read_nvtx
from nsysk3.trace.report import Report

SP_MARK = "k3."


@dataclass(frozen=True)
class ReportRanges:
    """The NVTX ranges of a report that matter: ``marked`` (MARKED_SCHEMA), ``calls`` of SP marks, and what to note."""

    marked: pl.DataFrame
    calls: pl.DataFrame
    notes: tuple[str, ...]


def report_ranges(report: Report, layer_regex: str | None, index: int = 0) -> ReportRanges:
    """Read them; ``index``: the number of the report."""
    every = read_nvtx(report, lambda names: _of_use(names, layer_regex))
    marked, dropped = mark_ranges(every, index, layer_regex)
    calls = sp_calls(every["name"].filter(every["name"].cat.starts_with(SP_MARK)))
    said = (
        f"{report.name}: {dropped} start/end ranges that name layers were not used: they cross threads or other ranges"
    )
    return ReportRanges(marked, calls, (said,) if dropped else ())


def unplaced_graphs(events: pl.DataFrame) -> list[int]:
    """Ranks with kernels of graph replays that have no layer."""
    graphs = events.filter((pl.col("reason").cast(pl.String) == "graph replay") & (pl.col("kind") == "kernel"))
    return graphs["rank"].unique().sort().to_list()


def layer_notes(
    ranges: Sequence[ReportRanges], graphs: Sequence[int], fits: pl.DataFrame
) -> tuple[tuple[str, ...], pl.DataFrame]:
    """What a reader of the layers should know, and the fits that say something.

    ``graphs``: unplaced_graphs of all reports, sorted.
    """
    notes = [note for each in ranges for note in each.notes]
    if graphs:
        notes.append(
            f"{_ranks(graphs)}: kernels of CUDA graph replays have no layers: neither the graphs' capture nor an eager "
            "forward is in the trace"
        )
        # What is left beside the graphs is no sequence of forwards, and says nothing about its period.
        fits = fits.filter(pl.col("reason").is_null() | ~pl.col("rank").is_in(graphs))
    return (*notes, *_fit_notes(fits)), fits


def _of_use(names: pl.Series, layer_regex: str | None) -> pl.Series:
    return pl.concat([parse_names(names, layer_regex)["name"], names.filter(names.str.starts_with(SP_MARK))])


def _fit_notes(fits: pl.DataFrame) -> list[str]:
    notes = []
    found = fits.filter(pl.col("reason").is_null())
    if found.height:
        notes.append(
            f"{_ranks_of(found)}: no NVTX layers; layers and forwards were found from the period of the kernel "
            f"sequence (confidence {min(found['confidence'].to_list()):.0%} of kernel time)"
        )
    local = found.filter(pl.col("first_layer").is_null())
    if local.height:
        notes.append(f"{_ranks_of(local)}: the pipeline stages are unknown, so layers count from 0 on each rank")
    for reason in fits["reason"].drop_nulls().unique(maintain_order=True).to_list():
        notes.append(f"{_ranks_of(fits.filter(pl.col('reason') == reason))}: no layers: no NVTX, and {reason}")
    return notes


def _ranks_of(rows: pl.DataFrame) -> str:
    return _ranks(rows["rank"].sort().to_list())


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
