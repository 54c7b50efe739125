"""Collectives: distributions, who arrives late, what the links carried."""

from __future__ import annotations

import polars as pl

from nsysk3.report.blocks import Block, Column, Figure, Legend, Prose, Section, Table, make_table, place
from nsysk3.report.draw.bars import NARROW, WIDE
from nsysk3.report.draw.lines import Curve, Range, ecdf, ranges, thin
from nsysk3.report.text import clean, duration
from nsysk3.report.units import count
from nsysk3.report.view import Rows, View

_CURVES = 6
_RANGES = 40


def collectives(view: View) -> Section:
    """One distribution an operation, the table of communicators, lateness, and bandwidth against nccl-tests."""
    blocks: list[Block | None] = []
    if view.table("collectives").height:
        found = view.table("collective_summary")
        blocks += [_distribution(view, str(op)) for op in found["op"].unique(maintain_order=True)]
        blocks.append(skew_figure(view))
    else:
        blocks.append(Prose(((view.texts("section.collectives.absent"), view.texts.lang),)))
    if view.table("bandwidth").height:
        blocks.append(bandwidth_table(view))
    return view.section("collectives", *blocks)


def _distribution(view: View, op: str) -> Figure:
    table = view.table("collectives").filter(pl.col("op") == op)
    groups = [row for row in view.rows("collective_summary") if row["op"] == op]
    drawn, notes = _groups(view, groups)
    curves: list[Curve] = []
    legend: list[Legend] = []
    for number, (name, chosen) in enumerate(drawn):
        mine = table.filter(chosen)
        for column, dash in (("duration_ns", False), ("transfer_ns", True)):
            values = thin(mine[column].drop_nulls().sort().to_list())
            if values:
                tip = f"{name} · {view.texts(f'col.{column}')} · {count(mine.height)}"
                curves.append(Curve(values, f"c{number}", tip, dash))
        legend.append(Legend(f"c{number}", f"{name} · {view.texts('col.duration_ns')}"))
        legend.append(Legend(f"c{number}", view.texts("col.transfer_ns"), dash=True))
    title, alt = view.texts("fig.ecdf.title", op=view.texts.get(f"role.{op}", op)), view.texts("fig.ecdf.alt")
    wide, narrow = (ecdf(curves, alt, view.texts("fig.ecdf.axis"), width=width) for width in (WIDE, NARROW))
    behind = collective_table(view, op)
    said = (view.texts("fig.ecdf.note"), *notes)
    return Figure(f"ecdf-{op}", title, alt, wide, narrow, behind, tuple(legend), said)


def _groups(view: View, groups: Rows) -> tuple[list[tuple[str, pl.Expr]], list[str]]:
    """What gets a curve: each communicator and kind, or the kinds alone where those would be too many."""
    kinds = list(dict.fromkeys(row.get("kind") for row in groups))
    if len(groups) > _CURVES and len(kinds) > 1:
        chosen = [(_kind_name(view, kind), pl.col("kind").eq_missing(pl.lit(kind))) for kind in kinds[:_CURVES]]
        total = len({row["communicator"] for row in groups})
        return chosen, [view.texts("fig.ecdf.note_pooled", total=total)]
    chosen = []
    for row in groups[:_CURVES]:
        members = view.members.get(row["communicator"], clean(row["communicator"], 40))
        name = f"{_kind_name(view, row['kind'])} · {members}" if row.get("kind") else members
        mine = pl.col("communicator") == row["communicator"]
        if "kind" in row:
            mine &= pl.col("kind").eq_missing(pl.lit(row["kind"]))
        chosen.append((name, mine))
    notes = [view.texts("fig.ecdf.note_some", shown=_CURVES, total=len(groups))] if len(groups) > _CURVES else []
    return chosen, notes


def _kind_name(view: View, kind: object) -> str:
    return view.texts.get(f"kind.{kind}", str(kind)) if kind else view.texts("kind.unknown")


def collective_table(view: View, op: str) -> Table:
    """One row a communicator and kind of one operation."""
    columns = (
        Column("members", "text"), Column("communicator", "code"), Column("kind", "text", "kinds"),
        Column("ranks", "count"),
        Column("instances", "count"), Column("count", "count"), Column("duration_p50_ns", "ms3", "allreduce"),
        Column("duration_p95_ns", "ms3"), Column("duration_max_ns", "ms3"), Column("total_ns", "ms"),
        Column("wait_ns", "ms", "wait_transfer"), Column("transfer_ns", "ms", "wait_transfer"),
        Column("wait_share", "share", "wait_transfer"), Column("transfer_p50_ns", "ms3", "wait_transfer"),
    )  # fmt: skip
    rows = [row for row in view.rows("collective_summary") if row["op"] == op]
    for row in rows:
        if "kind" in row:
            row["kind"] = _kind_name(view, row["kind"])
        row["members"] = view.members.get(row["communicator"])
    name = view.texts.get(f"role.{op}", op)
    reason = "no partner of the rank's communication is in this run"
    return make_table(
        view.texts, f"collectives-{op}", rows, columns, caption=f"{view.texts('tab.collectives')}: {name}",
        reasons=dict.fromkeys(("wait_ns", "transfer_ns", "wait_share", "transfer_p50_ns"), reason),
        goto=lambda row: place(communicator=clean(row['communicator']), role=op),
    )  # fmt: skip


def skew_figure(view: View) -> Figure | None:
    """How late each rank starts against the others of its communicator."""
    rows = [row for row in view.rows("stragglers") if row["late_p50_ns"] is not None]
    if not rows:
        return None
    chosen, notes = _most_waiting(view, rows)
    drawn = []
    for row in chosen:
        op = view.texts.get(f"role.{row['role']}", row["role"])
        tip = f"{view.rank_name(row['rank'])}: p50 {duration(row['late_p50_ns'])}, p95 {duration(row['late_p95_ns'])}"
        drawn.append(
            Range(
                view.texts("ui.rank", rank=view.world.get(row["rank"])), row["late_p50_ns"], row["late_p95_ns"], tip,
                "late" if row["straggler"] else "even",
                f"{op} · {view.members.get(row['communicator'], clean(row['communicator'], 40))}",
            )
        )  # fmt: skip
    alt = view.texts("fig.skew.alt")
    wide, narrow = (ranges(drawn, alt, view.texts("fig.skew.axis"), width=width) for width in (WIDE, NARROW))
    columns = (
        Column("communicator", "code"), Column("role", "text"), Column("world_rank", "count", "identity"),
        Column("instances", "count"), Column("last_count", "count", "lateness"),
        Column("last_share", "share", "lateness"), Column("late_p50_ns", "us", "lateness"),
        Column("late_p95_ns", "us", "lateness"), Column("caused_wait_ns", "ms", "lateness"),
        Column("uncertainty_ns", "us", "clock"), Column("straggler", "flag", "lateness"),
    )  # fmt: skip
    listed = [
        {**row, "world_rank": view.world.get(row["rank"]), "role": view.texts.get(f"role.{row['role']}", row["role"])}
        for row in rows
    ]
    table = make_table(view.texts, "skew", listed, columns, file="stragglers.parquet")
    return Figure(
        "skew", view.texts("fig.skew.title"), alt, wide, narrow, table, (), (view.texts("fig.skew.note"), *notes)
    )


def _most_waiting(view: View, rows: Rows) -> tuple[Rows, list[str]]:
    """Whole communicators, those in which most was waited first, as many as a figure bears."""
    groups: dict[tuple[str, str], Rows] = {}
    for row in rows:
        groups.setdefault((row["role"], row["communicator"]), []).append(row)
    ordered = sorted(groups.values(), key=lambda group: -max(row["caused_wait_ns"] or 0 for row in group))
    chosen = ordered[:1]
    for group in ordered[1:]:
        if sum(map(len, chosen)) + len(group) <= _RANGES:
            chosen.append(group)
    note = view.texts("fig.skew.note_some", shown=len(chosen), total=len(ordered))
    return [row for group in chosen for row in group], [note] if len(chosen) < len(ordered) else []


def bandwidth_table(view: View) -> Table:
    """Measured rates by message size, beside nccl-tests where it was given."""
    columns = (
        Column("communicator", "code"), Column("role", "text"), Column("ranks", "count"), Column("bytes", "bytes"),
        Column("count", "count"), Column("transfer_p50_ns", "ms3", "wait_transfer"),
        Column("algbw_gbs", "gbs", "bandwidth"), Column("busbw_gbs", "gbs", "bandwidth"),
        Column("reference_busbw_gbs", "gbs", "bandwidth"), Column("of_reference", "share", "bandwidth"),
    )  # fmt: skip
    rows = [{**row, "role": view.texts.get(f"role.{row['role']}", row["role"])} for row in view.rows("bandwidth")]
    missing = view.texts("ev.no_reference")
    return make_table(
        view.texts, "bandwidth", rows, columns, reasons={"reference_busbw_gbs": missing, "of_reference": missing}
    )
