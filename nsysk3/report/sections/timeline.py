"""Swim lanes of GPU events: the packed data that the page's script draws, and the longest events as a table."""

from __future__ import annotations

import base64
import gzip
import json
from typing import Any

import polars as pl
from markupsafe import Markup

from nsysk3.report.blocks import Column, Prose, Raw, Section, make_table, place
from nsysk3.report.text import TIMELINE_NAME, clean
from nsysk3.report.view import View

# What one page carries; the files have the rest.
EVENTS = 100_000
LONGEST = 200
_SHARED = ("name", "role", "category", "wait_state", "communicator")
_NUMBERS = ("layer", "forward", "wait_ns", "seq")


def timeline(view: View) -> Section:
    """The canvas and its controls, then the longest events."""
    table = _sorted(view.table("timeline"))
    if table.is_empty():
        return view.section("timeline", Prose(((view.texts("section.timeline.absent"), view.texts.lang),)))
    kept = table.head(EVENTS) if table.height <= EVENTS else _whole_forwards(table)
    data = {
        "packed": pack(view, kept),
        "forwards": kept["forward"].drop_nulls().unique().sort().to_list() if "forward" in kept.columns else [],
        "shown": f"{kept.height:,}",
        "total": f"{table.height:,}",
        "some": kept.height < table.height,
        "drawn": view.texts.said(clean(view.document.layers.timeline)),
    }
    return view.section("timeline", Raw("timeline", data), _longest(view, kept))


def _sorted(table: pl.DataFrame) -> pl.DataFrame:
    return table.sort("rank", "stream", "start_ns", "end_ns") if table.height else table


def _whole_forwards(table: pl.DataFrame) -> pl.DataFrame:
    """The first events in time up to the limit: a cut in time is one that a reader can see."""
    last = table["start_ns"].sort()[EVENTS - 1]
    return table.filter(pl.col("start_ns") <= last).head(EVENTS)


def pack(view: View, table: pl.DataFrame) -> Markup:
    """Columns as JSON, gzip and base64: starts as steps inside a lane, repeated texts by number."""
    lanes = table.select("rank", "stream").unique(maintain_order=True)
    numbered = table.join(lanes.with_row_index("lane"), on=["rank", "stream"], how="left", maintain_order="left")
    step = pl.col("start_ns") - pl.col("start_ns").shift(1).over("lane").fill_null(0)
    data: dict[str, Any] = {
        "lanes": [
            {"rank": view.world.get(rank, rank), "label": view.rank_name(rank), "stream": str(stream)}
            for rank, stream in lanes.iter_rows()
        ],
        "lane": numbered["lane"].to_list(),
        "step": numbered.select(step)["start_ns"].to_list(),
        "dur": (numbered["end_ns"] - numbered["start_ns"]).to_list(),
    }
    for column in _SHARED:
        if column in numbered.columns:
            texts = numbered[column].cast(pl.String)
            known = texts.drop_nulls().unique(maintain_order=True)
            number = {text: place for place, text in enumerate(known.to_list())}
            data[f"{column}s"] = [clean(text, TIMELINE_NAME) for text in known.to_list()]
            data[column] = texts.replace_strict(number, default=None, return_dtype=pl.Int32).fill_null(-1).to_list()
    for column in _NUMBERS:
        if column in numbered.columns:
            data[column] = numbered[column].cast(pl.Int64).fill_null(-1).to_list()
    text = json.dumps(data, separators=(",", ":")).encode()
    return Markup(base64.b64encode(gzip.compress(text, 9, mtime=0)).decode())


def _longest(view: View, table: pl.DataFrame) -> Raw:
    columns = (
        Column("name", "name"), Column("world_rank", "count", "identity"), Column("stream", "code"),
        Column("role", "text"), Column("forward", "optional", "forward"), Column("layer", "optional", "layer"),
        Column("start_ns", "ms3"), Column("duration_ns", "ms3"), Column("wait_ns", "wait", "wait_transfer"),
        Column("wait_state", "optional"),
    )  # fmt: skip
    spent = pl.col("end_ns") - pl.col("start_ns")
    longest = table.with_row_index("event").with_columns(spent.alias("duration_ns")).sort(
        "duration_ns", "event", descending=[True, False]
    )  # fmt: skip
    rows = [
        {
            **row,
            "world_rank": view.world.get(row["rank"], row["rank"]),
            "role": view.texts.get(f"role.{row['role']}", row["role"]),
            "wait_state": row.get("wait_state") and view.texts.get(f"state.{row['wait_state']}", row["wait_state"]),
        }
        for row in longest.head(LONGEST).to_dicts()
    ]
    made = make_table(
        view.texts, "timeline", rows, columns, file="timeline.parquet",
        goto=lambda row: place(event=row["event"]),
    )  # fmt: skip
    return Raw("details", {"summary": view.texts("tab.timeline"), "table": made})
