"""The runs of a comparison drawn side by side: time budgets, AllReduce durations, pipelines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import polars as pl

from nsysk3.compare.model import Comparison
from nsysk3.report.blocks import Block, Column, Figure, Legend, Prose, Section, make_table
from nsysk3.report.catalogue import Catalogue
from nsysk3.report.draw.bars import NARROW, WIDE, Bar, bars
from nsysk3.report.draw.lines import Curve, ecdf, thin
from nsysk3.report.sections.budget import group_parts
from nsysk3.report.sections.compare import make_section, sides
from nsysk3.report.sections.layers import heat_figure
from nsysk3.report.sections.limits import limits
from nsysk3.report.sections.pipeline import bubble_figure, gantt_figure, p2p_table
from nsysk3.report.text import clean
from nsysk3.report.units import count
from nsysk3.report.view import View

Runs = Sequence[tuple[str, View]]
_CURVES = 6


def budgets(runs: Runs, texts: Catalogue) -> Section:
    """Medians of every run's groups, one bar each on one axis of shares."""
    rows: list[Bar] = []
    seen, listed = set(), []
    for label, view in runs:
        groups: dict[str, dict[str, Any]] = defaultdict(dict)
        for row in view.rows("budget_summary"):
            groups[row["group"]][row["bucket"]] = row
            seen.add(row["bucket"])
            listed.append({**row, "run": label, "group": view.group_name(row["group"])})
        for place, (group, cells) in enumerate(groups.items()):
            name = label if len(groups) == 1 else f"{label} · {view.group_name(group)}"
            rows.append(Bar(name, group_parts(view, cells), strong=place == 0, gap=place == 0 and bool(rows)))
    notes = [texts("fig.budget.note")]
    notes += [f"{label}: {texts('verdict.no_medians')}" for label, view in runs if not view.stable]
    order = [bucket for bucket in texts.texts["bucket"] if bucket in seen]
    alt = texts("fig.budget.alt")
    wide, narrow = (bars(rows, alt, width=width, top=1.0, unit="%", scale=100) for width in (WIDE, NARROW))
    columns = (
        Column("run", "text"), Column("group", "text", "stable"), Column("bucket", "bucket", "budget"),
        Column("ns", "ms"), Column("share", "share"), Column("low_ns", "ms"), Column("high_ns", "ms"),
    )  # fmt: skip
    table = make_table(texts, "groups", listed, columns)
    legend = tuple(Legend(f"b-{bucket}", texts(f"bucket.{bucket}")) for bucket in order)
    title = texts("fig.budget.title_runs")
    figure = Figure("budget", title, alt, wide, narrow, table, legend, tuple(notes))
    return make_section(texts, "budget", figure)


def collectives(runs: Runs, texts: Catalogue) -> Section:
    """The AllReduce durations of every run on one axis, and in the table all collectives."""
    curves, legend, listed, notes = [], [], [], [texts("fig.ecdf.note")]
    for number, (label, view) in enumerate(runs[:_CURVES]):
        every = view.table("collectives")
        mine = every.filter(pl.col("op") == "allreduce") if every.height else every
        listed += [
            {**row, "run": label, "op": texts.get(f"role.{row['op']}", row["op"])}
            for row in view.rows("collective_summary")
        ]
        if mine.is_empty():
            notes.append(f"{label}: {texts.said('no AllReduce in the window')[0]}")
            continue
        for column, dash in (("duration_ns", False), ("transfer_ns", True)):
            values = thin(mine[column].drop_nulls().sort().to_list())
            if values:
                tip = f"{label} · {texts(f'col.{column}')} · {count(mine.height)}"
                curves.append(Curve(values, f"c{number}", tip, dash))
        legend += [
            Legend(f"c{number}", f"{label} · {texts('col.duration_ns')}"),
            Legend(f"c{number}", texts("col.transfer_ns"), dash=True),
        ]
    if not curves:
        return make_section(texts, "collectives", Prose(((texts("section.collectives.absent"), texts.lang),)))
    alt = texts("fig.ecdf.alt")
    wide, narrow = (ecdf(curves, alt, texts("fig.ecdf.axis"), width=width) for width in (WIDE, NARROW))
    columns = (
        Column("run", "text"), Column("communicator", "code"), Column("op", "text"), Column("kind", "text", "kinds"),
        Column("ranks", "count"), Column("instances", "count"),
        Column("duration_p50_ns", "ms3", "allreduce"), Column("duration_p95_ns", "ms3"),
        Column("total_ns", "ms"), Column("wait_ns", "ms", "wait_transfer"),
        Column("transfer_ns", "ms", "wait_transfer"), Column("wait_share", "share", "wait_transfer"),
    )  # fmt: skip
    table = make_table(texts, "collectives", listed, columns)
    title = texts("fig.ecdf.title", op=texts("role.allreduce"))
    figure = Figure("ecdf", title, alt, wide, narrow, table, tuple(legend), tuple(notes))
    return make_section(texts, "collectives", figure)


def pipelines(runs: Runs, texts: Catalogue) -> Section:
    """Gantt, bubble and P2P of every run that has a pipeline; one line for all that have none."""
    blocks = [_absent(texts, "pipeline", [label for label, view in runs if view.table("p2p").is_empty()], len(runs))]
    for number, (label, view) in enumerate(runs):
        if view.table("p2p").is_empty():
            continue
        for figure in (gantt_figure(view), bubble_figure(view) if view.table("pipeline").height else None):
            if figure:
                blocks.append(_named(figure, label, number))
        table = p2p_table(view)
        blocks.append(replace(table, id=f"{table.id}-{number}", caption=f"{label}: {table.caption}"))
    return make_section(texts, "pipeline", *blocks)


def layers(runs: Runs, texts: Catalogue) -> Section:
    """The heat map of every run that has layers; one line for all that have none."""
    found = [(label, view, view.rows("layer_rows")) for label, view in runs]
    blocks = [_absent(texts, "layers", [label for label, _, rows in found if not rows], len(runs))]
    blocks += [
        _named(heat_figure(view, rows), label, number) for number, (label, view, rows) in enumerate(found) if rows
    ]
    return make_section(texts, "layers", *blocks)


def _absent(texts: Catalogue, section: str, without: Sequence[str], runs: int) -> Block | None:
    """What is not there in the runs ``without``, which are named unless they are all ``runs``."""
    said = texts(f"section.{section}.absent")
    named = said if len(without) == runs else f"{', '.join(without)}: {said}"
    return Prose(((named, texts.lang),), kind="note") if without else None


def _named(figure: Figure, label: str, number: int) -> Figure:
    table = replace(figure.table, id=f"{figure.table.id}-{number}")
    return replace(figure, id=f"{figure.id}-{number}", title=f"{label}: {figure.title}", table=table)


def evidence(comparison: Comparison, runs: Runs, texts: Catalogue) -> Section:
    """The runs side by side, what limits each, and what a reader of any row should know."""
    notes = tuple(texts.said(clean(note, 1000)) for note in comparison.notes)
    blocks: list[Block | None] = [sides(comparison, texts)]
    blocks += [limits(view, f"{label}: {texts('verdict.limits')}") for label, view in runs]
    blocks.append(Prose(notes or ((texts("ev.no_notes"), texts.lang),), texts("ev.notes")))
    return make_section(texts, "evidence", *blocks)
