"""Where the pipeline's time went: micro-batches over stages, bubble, boundaries."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from nsysk3.report.blocks import Block, Column, Figure, Legend, Prose, Raw, Section, Table, make_table, place
from nsysk3.report.draw.bars import NARROW, WIDE, Bar, Part, bars
from nsysk3.report.draw.gantt import Lane, Span, gantt
from nsysk3.report.text import duration
from nsysk3.report.units import count, percent
from nsysk3.report.view import Rows, View

_FORWARDS = 1200
_WAITS = 2000
_BUBBLE = ("exposed_wait_upstream", "exposed_wait_downstream", "idle_stage_idle", "idle_launch_gap", "idle_other")
_HUES = 6


def pipeline(view: View) -> Section:
    """Gantt, bubble, P2P table and the stages' numbers; one line where there is no pipeline."""
    if view.table("pipeline").is_empty() and view.table("p2p").is_empty():
        return view.section("pipeline", Prose(((view.texts("section.pipeline.absent"), view.texts.lang),)))
    blocks: list[Block | None] = [gantt_figure(view)]
    if view.table("pipeline").height:
        blocks.append(bubble_figure(view))
    blocks.append(p2p_table(view))
    if view.table("forwards").height:
        table = forward_table(view)
        blocks.append(Raw("details", {"summary": table.caption, "table": table}))
    return view.section("pipeline", *blocks)


def gantt_figure(view: View) -> Figure | None:
    """Stage by time; one rank stands for its stage.  Without forwards the boundaries are drawn alone."""
    chosen: dict[int, int] = {}
    for rank, stage in sorted(view.stages.items(), key=lambda item: (item[1], item[0] not in view.stable, item[0])):
        chosen.setdefault(stage, rank)
    if not chosen:
        return None
    forwards = [row for row in view.rows("forwards") if row["rank"] in chosen.values()]
    pairs = view.rows("p2p")
    times = [time for row in forwards for time in (row["start_utc_ns"], row["end_utc_ns"])]
    times += [row[f"{half}_{edge}_utc_ns"] for row in pairs for half in ("send", "recv") for edge in ("start", "end")]
    if not times:
        return None
    low, high = min(times), max(times)
    drawn = forwards[:_FORWARDS]
    lanes = [
        Lane(view.texts("ui.stage", stage=stage), _batches(view, drawn, rank), _boundary(view, pairs, rank))
        for stage, rank in sorted(chosen.items())
    ]
    phases = [
        (view.texts(f"phase.{row['phase']}"), low if row["start_utc_ns"] is None else row["start_utc_ns"])
        for row in view.rows("phases")
    ]
    notes = [view.texts("fig.gantt.note" if forwards else "fig.gantt.no_forwards")]
    if len(drawn) < len(forwards):
        notes.append(view.texts("fig.gantt.note_some", shown=len(drawn), total=len(forwards)))
    alt = view.texts("fig.gantt.alt")
    wide, narrow = (gantt(lanes, phases, low, high, alt, width=width) for width in (WIDE, NARROW))
    legend = [Legend("w-up", view.texts("col.exposed_wait_upstream_ns"))]
    legend += [Legend("w-down", view.texts("col.exposed_wait_downstream_ns"))]
    legend += [Legend("b-exposed_p2p", view.texts("col.transfer_ns"))]
    return Figure(
        "gantt", view.texts("fig.gantt.title"), alt, wide, narrow, stage_table(view), tuple(legend), tuple(notes)
    )


def _batches(view: View, forwards: Rows, rank: int) -> list[Span]:
    spans = []
    for row in forwards:
        if row["rank"] == rank:
            number = row["forward"]
            tip = f"{view.rank_name(rank)} · {view.texts('col.forward')} {number}: " + duration(
                row["end_utc_ns"] - row["start_utc_ns"]
            )
            if row.get("tokens"):
                tip += f" · {count(row['tokens'])} {view.texts('col.tokens')}"
            swatch = f"mb-{number % _HUES}" if row.get("whole", True) else "mb-cut"
            spans.append(Span(row["start_utc_ns"], row["end_utc_ns"], swatch, tip, str(number), f"f{number}"))
    return spans


def _boundary(view: View, pairs: Rows, rank: int) -> list[Span]:
    """What the rank's sends and receives waited, longest first where there are too many, and what they moved."""
    spans = []
    for row in pairs:
        for half, end, swatch in (("recv", "dst_rank", "w-up"), ("send", "src_rank", "w-down")):
            if row[end] != rank:
                continue
            start, wait = row[f"{half}_start_utc_ns"], row[f"{half}_wait_ns"] or 0
            kind = view.texts.get(f"kind.{row['kind']}", row["kind"])
            other = view.rank_name(row["src_rank" if half == "recv" else "dst_rank"])
            verb = view.texts(f"col.{half}s")
            # What ran beside compute held nothing up: it is paler.
            hidden = (row[f"{half}_wait_hidden_ns"] or 0) * 2 > wait
            tip = f"{verb} · {kind} · {other}: {view.texts('col.wait_ns')} {duration(wait)}"
            if wait:
                spans.append(Span(start, start + wait, swatch + (" pale" if hidden else ""), tip))
            moved = row[f"{half}_transfer_ns"] or 0
            if moved:
                tip = f"{verb} · {kind} · {other}: {view.texts('col.transfer_ns')} {duration(moved)}"
                spans.append(Span(start + wait, start + wait + moved, "b-exposed_p2p", tip))
    spans.sort(key=lambda span: span.start - span.end)
    return spans[:_WAITS]


def bubble_figure(view: View) -> Figure:
    """One bar a rank: exposed Stage wait and idle as shares of the window, with the ideal marked."""
    shares: dict[int, dict[str, Any]] = defaultdict(dict)
    for row in view.rows("budget"):
        shares[row["rank"]][row["bucket"]] = row
    stages = sorted(view.rows("pipeline"), key=lambda row: (row["stage"], row["rank"]))
    rows = []
    for row in stages:
        parts = []
        for bucket in _BUBBLE:
            cell = shares[row["rank"]].get(bucket)
            if cell and cell["share"]:
                label = view.texts(f"bucket.{bucket}")
                said = f"{percent(cell['share'])} %"
                parts.append(Part(cell["share"], f"b-{bucket}", f"{label}: {duration(cell['ns'])} · {said}", said))
        end = "" if row["bubble_share"] is None else f"{percent(row['bubble_share'])} %"
        ideal = row["ideal_bubble_share"]
        tip = f"{view.texts('col.ideal_bubble_share')}: {percent(ideal)} %"
        rows.append(Bar(view.rank_name(row["rank"]), parts, mark=ideal, mark_tip=tip, end=end))
    known = [row["ideal_bubble_share"] for row in stages if row["ideal_bubble_share"] is not None]
    top = max([*(row["bubble_share"] or 0 for row in stages), *known, 0.01]) * 1.05
    alt = view.texts("fig.bubble.alt")
    wide, narrow = (bars(rows, alt, width=width, top=top, unit="%", scale=100) for width in (WIDE, NARROW))
    legend = tuple(Legend(f"b-{bucket}", view.texts(f"bucket.{bucket}")) for bucket in _BUBBLE)
    note = view.texts("fig.bubble.note" if known else "fig.bubble.no_ideal")
    return Figure("bubble", view.texts("fig.bubble.title"), alt, wide, narrow, stage_table(view), legend, (note,))


def stage_table(view: View) -> Table:
    """The pipeline's numbers, one row a rank with a stage."""
    no_forward = view.texts("fig.bubble.no_ideal")
    columns = (
        Column("stage", "count"), Column("world_rank", "count", "identity"), Column("busy_ns", "ms", "imbalance"),
        Column("stage_wait_ns", "ms", "stage_wait"), Column("exposed_wait_upstream_ns", "ms", "stage_wait"),
        Column("exposed_wait_downstream_ns", "ms", "stage_wait"), Column("stage_idle_ns", "ms", "stage_wait"),
        Column("wait_fill_ns", "ms", "phases"), Column("wait_steady_ns", "ms", "phases"),
        Column("wait_drain_ns", "ms", "phases"), Column("idle_ns", "ms", "idle"), Column("bubble_ns", "ms", "bubble"),
        Column("bubble_share", "share", "bubble"), Column("ideal_bubble_share", "share", "bubble"),
        Column("micro_batches", "count", "forward"), Column("forward_p50_ns", "ms", "forward"),
        Column("forward_p95_ns", "ms", "forward"), Column("imbalance", "ratio", "imbalance"),
    )  # fmt: skip
    rows = [{**row, "world_rank": view.world.get(row["rank"])} for row in view.rows("pipeline")]
    reasons = dict.fromkeys(("ideal_bubble_share", "micro_batches", "forward_p50_ns", "forward_p95_ns"), no_forward)
    return make_table(view.texts, "pipeline", rows, columns, reasons=reasons)


def p2p_table(view: View) -> Table:
    """One row a channel and kind of message."""
    columns = (
        Column("channel", "text", "p2p"), Column("kind", "text", "kinds"), Column("count", "count", "p2p"),
        Column("bytes", "bytes", "bandwidth"), Column("recv_wait_ns", "ms", "wait_transfer"),
        Column("recv_wait_hidden_ns", "ms", "wait_transfer"), Column("recv_transfer_ns", "ms", "wait_transfer"),
        Column("send_wait_ns", "ms", "wait_transfer"), Column("send_transfer_ns", "ms", "wait_transfer"),
        Column("gbs", "gbs", "bandwidth"), Column("uncertainty_ns", "us", "clock"),
    )  # fmt: skip
    rows = [
        {
            **row,
            "channel": f"{view.rank_name(row['src_rank'])} → {view.rank_name(row['dst_rank'])}",
            "kind": view.texts.get(f"kind.{row['kind']}", row["kind"]),
        }
        for row in view.rows("p2p_summary")
    ]
    return make_table(view.texts, "p2p", rows, columns, file="p2p.parquet")


def forward_table(view: View) -> Table:
    """Every forward of every rank."""
    columns = (
        Column("world_rank", "count", "identity"), Column("stage", "optional"), Column("forward", "count", "forward"),
        Column("duration_ns", "ms", "forward"), Column("kernels", "count"), Column("tokens", "count"),
        Column("whole", "flag", "forward"), Column("reason", "optional"), Column("source", "text"),
    )  # fmt: skip
    rows = [
        {
            **row,
            "world_rank": view.world.get(row["rank"]),
            "duration_ns": row["end_utc_ns"] - row["start_utc_ns"],
            "muted": not row.get("whole", True),
        }
        for row in view.rows("forwards")
    ]
    return make_table(
        view.texts, "forwards", rows, columns, file="forwards.parquet",
        goto=lambda row: place(rank=row['world_rank'], forward=row['forward']),
    )  # fmt: skip
