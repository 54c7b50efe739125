"""Where each rank's window went."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from nsysk3.report.blocks import Column, Figure, Legend, Raw, Section, Table, make_table
from nsysk3.report.draw.bars import NARROW, WIDE, Bar, Part, bars
from nsysk3.report.text import duration
from nsysk3.report.units import percent
from nsysk3.report.view import View

# More bars than this no eye compares; the table has the others.
BARS = 40


def budget(view: View) -> Section:
    """The stacked bars, the table of medians behind them, and every rank's buckets."""
    return view.section("budget", view.no_medians, budget_figure(view), _every_rank(view) if view.stable else None)


def budget_figure(view: View) -> Figure:
    """Medians of the groups first, then ranks."""
    seen = set(view.table("budget_summary")["bucket"].to_list())
    spent = [row for row in view.rows("budget") if row["ns"] > 0]
    seen |= {row["bucket"] for row in spent}
    order = [bucket for bucket in view.texts.texts["bucket"] if bucket in seen]
    order += sorted(seen - set(order))
    groups: dict[str, dict[str, Any]] = defaultdict(dict)
    for row in view.rows("budget_summary"):
        groups[row["group"]][row["bucket"]] = row
    single = len(groups) == len(view.document.ranks)
    rows = [] if single else [
        Bar(view.texts("ui.median", group=view.group_name(group)), _parts(view, cells, order), strong=True)
        for group, cells in groups.items()
    ]  # fmt: skip
    ranks: dict[int, dict[str, Any]] = defaultdict(dict)
    for row in spent:
        ranks[row["rank"]][row["bucket"]] = row
    chosen = list(ranks)[:: -(-len(ranks) // BARS)] if ranks else []
    rows += [
        Bar(view.rank_name(rank), _parts(view, ranks[rank], order), gap=place == 0 and not single)
        for place, rank in enumerate(chosen)
    ]
    notes = [view.texts("fig.budget.note")]
    if len(chosen) < len(ranks):
        notes.append(view.texts("fig.budget.note_some", shown=len(chosen), total=len(ranks)))
    drawn = {
        width: bars(rows, view.texts("fig.budget.alt"), width=width, top=1.0, unit="%", scale=100)
        for width in (WIDE, NARROW)
    }
    table = _rank_table(view) if view.no_medians else make_table(
        view.texts, "groups", [_named(view, row) for row in view.rows("budget_summary")],
        (Column("group", "code", "stable"), Column("bucket", "bucket", "budget"), Column("ns", "ms"),
         Column("share", "share"), Column("low_ns", "ms"), Column("high_ns", "ms")),
    )  # fmt: skip
    legend = tuple(Legend(f"b-{bucket}", view.texts.get(f"bucket.{bucket}", bucket)) for bucket in order)
    return Figure(
        "budget", view.texts("fig.budget.title"), view.texts("fig.budget.alt"), drawn[WIDE], drawn[NARROW], table,
        legend, tuple(notes),
    )  # fmt: skip


def group_parts(view: View, cells: dict[str, Any]) -> list[Part]:
    """One group's medians as the pieces of a bar, in the order of precedence."""
    return _parts(view, cells, list(view.texts.texts["bucket"]))


def _parts(view: View, cells: dict[str, Any], order: list[str]) -> list[Part]:
    parts = []
    for bucket in order:
        cell = cells.get(bucket)
        if cell and cell["share"]:
            label = view.texts.get(f"bucket.{bucket}", bucket)
            said = f"{percent(cell['share'])} %"
            parts.append(Part(cell["share"], f"b-{bucket}", f"{label}: {duration(cell['ns'])} · {said}", said))
    return parts


def _named(view: View, row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "group": view.group_name(row["group"])}


def _every_rank(view: View) -> Raw:
    table = _rank_table(view)
    return Raw("details", {"summary": table.caption, "table": table})


def _rank_table(view: View) -> Table:
    rows = [{**row, "world_rank": view.world.get(row["rank"])} for row in view.rows("budget") if row["ns"]]
    columns = (
        Column("world_rank", "count", "identity"), Column("bucket", "bucket", "budget"), Column("ns", "ms"),
        Column("share", "share"),
    )  # fmt: skip
    return make_table(view.texts, "budget", rows, columns, file="budget.parquet")
