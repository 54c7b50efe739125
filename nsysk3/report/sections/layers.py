"""Time of each layer by class of kernel."""

from __future__ import annotations

from typing import Any

from nsysk3.report.blocks import Column, Figure, Prose, Raw, Section, Table, make_table
from nsysk3.report.draw.bars import NARROW, WIDE
from nsysk3.report.draw.heat import heat
from nsysk3.report.text import duration, shown
from nsysk3.report.units import percent
from nsysk3.report.view import View

_CLASSES = (
    "compute_ns", "fused_ns", "allreduce_transfer_ns", "allreduce_wait_ns", "exposed_comm_ns", "p50_ns",
)  # fmt: skip


def layers(view: View) -> Section:
    """The heat map and its table; the reason where the result has no layers."""
    rows = view.rows("layer_rows")
    if not rows:
        return view.section("layers", Prose(((view.texts("section.layers.absent"), view.texts.lang),)))
    return view.section("layers", heat_figure(view, rows), _unattributed(view))


def _unattributed(view: View) -> Raw | None:
    rows = [{**row, "world_rank": view.world.get(row["rank"])} for row in view.rows("unattributed")]
    columns = (
        Column("world_rank", "count", "identity"), Column("reason", "said", "attributed"),
        Column("kernels", "count"), Column("ns", "ms"),
    )  # fmt: skip
    if not rows:
        return None
    table = make_table(view.texts, "unattributed", rows, columns, file="unattributed.parquet")
    return Raw("details", {"summary": table.caption, "table": table})


def heat_figure(view: View, rows: list[dict[str, Any]]) -> Figure:
    """One row a layer, one column a class; medians over forwards and the layer's ranks."""
    rows = sorted(rows, key=lambda row: (row["stage"] is None, row["stage"], row["layer"]))
    columns = [name for name in _CLASSES if any(row.get(name) for row in rows)]
    labels = [view.texts(f"col.layer_{name}") for name in columns]
    names = [_name(view, row) for row in rows]
    values = [[row.get(name) for name in columns] for row in rows]
    tips = [
        [
            f"{name} · {label}: " + (view.texts("ui.not_measured") if value is None else duration(value))
            for label, value in zip(labels, line, strict=True)
        ]
        for name, line in zip(names, values, strict=True)
    ]
    cells = [["" if value is None else shown(value, "ms3") for value in line] for line in values]
    alt = view.texts("fig.layers.alt")
    wide, narrow = (heat(names, labels, values, tips, cells, alt, width=width) for width in (WIDE, NARROW))
    note = view.texts("fig.layers.note", unit="ms")
    about = view.document.layers
    share = view.texts("ui.not_measured") if about.attributed_share is None else f"{percent(about.attributed_share)} %"
    found = view.texts(
        "fig.layers.found", sources=", ".join(view.texts.said(name)[0] for name in about.sources), share=share
    )
    return Figure(
        "layers", view.texts("fig.layers.title"), alt, wide, narrow, layer_table(view, rows), (), (note, found)
    )


def _name(view: View, row: dict[str, Any]) -> str:
    kind = f" {row['layer_kind']}" if row.get("layer_kind") else ""
    stage = f"{view.texts('ui.stage', stage=row['stage'])} · " if row["stage"] is not None else ""
    return f"{stage}{row['layer']}{kind}"


def layer_table(view: View, rows: list[dict[str, Any]]) -> Table:
    """The layers' numbers; those that stand out say on how many ranks."""
    columns = (
        Column("layer", "count", "layer"), Column("stage", "optional"), Column("layer_kind", "text", "layer"),
        Column("ranks", "count"), Column("forwards", "count", "forward"), Column("p50_ns", "ms3", "layer"),
        Column("p95_ns", "ms3", "layer"), Column("compute_ns", "ms3", "compute"), Column("fused_ns", "ms3", "fused"),
        Column("allreduce_ns", "ms3", "allreduce"), Column("allreduce_wait_ns", "ms3", "wait_transfer"),
        Column("allreduce_transfer_ns", "ms3", "wait_transfer"), Column("exposed_comm_ns", "ms3", "exposed"),
        Column("window_share", "share"), Column("vs_kind", "ratio"), Column("outlier_ranks", "count"),
    )  # fmt: skip
    reasons = {
        "layer_kind": view.texts("why.layer_kind"), "vs_kind": view.texts("why.layer_kind"),
        "allreduce_wait_ns": view.texts("why.no_split"), "allreduce_transfer_ns": view.texts("why.no_split"),
    }  # fmt: skip
    return make_table(view.texts, "layers", rows, columns, reasons=reasons, file="layers.parquet")
