"""Kernels by category, and those that took most time."""

from __future__ import annotations

from typing import Any

from nsysk3.report.blocks import Column, Figure, Section, Table, make_table, place
from nsysk3.report.draw.bars import NARROW, WIDE, Bar, Part, bars
from nsysk3.report.text import TIMELINE_NAME, clean, duration
from nsysk3.report.units import percent
from nsysk3.report.view import View

_BARS = 20


def kernels(view: View) -> Section:
    """The categories and the top of the list."""
    means = (category_figure(view), top_table(view))
    return view.section("kernels", *((view.no_medians,) if view.no_medians else means))


def category_figure(view: View) -> Figure | None:
    """One bar a category, coloured by role."""
    rows = [{**row, "category": _label(view, row)} for row in view.rows("category_summary")]
    if not rows:
        return None
    drawn = [
        Bar(
            clean(row["category"], 40),
            [
                Part(
                    row["total_ns"], f"r-{row['role']}",
                    f"{clean(row['category'], 60)} ({view.texts.get('role.' + row['role'], row['role'])}): "
                    f"{duration(row['total_ns'])} · {percent(row['share'])} %",
                )
            ],
            end=f"{percent(row['share'])} %",
        )
        for row in rows[:_BARS]
    ]  # fmt: skip
    alt = view.texts("fig.categories.alt")
    top = max((row["total_ns"] for row in rows), default=1)
    wide, narrow = (bars(drawn, alt, width=width, top=top, unit="ms", scale=1e-6) for width in (WIDE, NARROW))
    columns = (
        Column("category", "code"), Column("role", "text"), Column("total_ns", "ms"), Column("share", "share"),
        Column("count", "number"),
    )  # fmt: skip
    listed = [{**row, "role": view.texts.get(f"role.{row['role']}", row["role"])} for row in rows]
    table = make_table(view.texts, "categories", listed, columns, file="categories.parquet")
    note = view.texts("fig.categories.note")
    return Figure("categories", view.texts("fig.categories.title"), alt, wide, narrow, table, (), (note,))


def _label(view: View, row: dict[str, Any]) -> str:
    """The category; copies and replays have none of their own and go by their role."""
    return view.texts(f"role.{row['role']}") if row["role"] in ("copy", "graph") else str(row["category"])


def top_table(view: View) -> Table:
    """The kernels with most time over all ranks."""
    columns = (
        Column("name", "name"), Column("category", "code"), Column("role", "text"), Column("total_ns", "ms"),
        Column("share", "share"), Column("count", "number"), Column("p50_ns", "ms3"),
    )  # fmt: skip
    rows = [
        {**row, "category": _label(view, row), "role": view.texts.get(f"role.{row['role']}", row["role"])}
        for row in view.rows("top_kernels")
    ]
    return make_table(
        view.texts,
        "top_kernels",
        rows,
        columns,
        file="kernels.parquet",
        goto=lambda row: place(name=clean(row["short_name"], TIMELINE_NAME)),
    )
