"""What a page is made of: sections of tables, figures and paragraphs, before any HTML."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from markupsafe import Markup

from nsysk3.report.catalogue import Catalogue
from nsysk3.report.text import clean, shown

# Rows of one table that a page holds; the files have the rest.
ROWS = 400
_UNITS = {"ms": "ms", "ms3": "ms", "us": "us", "share": "share", "gbs": "gbs"}
_TEXTUAL = frozenset({"text", "name", "code", "said", "why", "metric", "metric_name", "bucket", "flag", "optional"})


@dataclass(frozen=True)
class Column:
    """One column: ``key`` in the rows, ``kind`` of value (see text.shown), the ``term`` whose definition it opens."""

    key: str
    kind: str = "text"
    term: str | None = None
    label: str | None = None
    unit: str | None = None


@dataclass(frozen=True)
class Cell:
    """One value: what is shown, what sorting and CSV use, the whole of a cut name, and the footnote of a null.

    ``swatch``: the class of a colour sample before the text.  ``term``: the definition that the text opens.
    """

    text: str
    raw: str
    full: str | None = None
    note: int | None = None
    swatch: str | None = None
    term: str | None = None
    unit: str = ""


@dataclass(frozen=True)
class Row:
    """Cells, and where in the timeline the row is: the value of ``data-goto``."""

    cells: tuple[Cell, ...]
    goto: str | None = None
    muted: bool = False


@dataclass(frozen=True)
class Table:
    """A table as the page shows it."""

    id: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    more: str | None = None


@dataclass(frozen=True)
class Legend:
    """One key of a figure: the class of its swatch and what it means."""

    swatch: str
    text: str
    dash: bool = False


@dataclass(frozen=True)
class Figure:
    """A drawing in two widths, with the table behind it."""

    id: str
    title: str
    alt: str
    wide: Markup
    narrow: Markup
    table: Table
    legend: tuple[Legend, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prose:
    """Paragraphs or a list; each item with its language and, where it has one, its weight."""

    items: tuple[tuple[str, str], ...]
    title: str | None = None
    kind: str = "list"


@dataclass(frozen=True)
class Raw:
    """A block with a template of its own: ``template`` gets ``data``."""

    template: str
    data: Mapping[str, Any] = field(default_factory=dict)


Block = Table | Figure | Prose | Raw


@dataclass(frozen=True)
class Section:
    """A part of the page with its anchor."""

    id: str
    title: str
    lede: str
    blocks: tuple[Block, ...]


def make_table(
    texts: Catalogue,
    identity: str,
    rows: Iterable[Mapping[str, Any]],
    columns: Sequence[Column],
    *,
    reasons: Mapping[str, str] | None = None,
    goto: Callable[[Mapping[str, Any]], str | None] | None = None,
    caption: str | None = None,
    file: str | None = None,
    limit: int = ROWS,
) -> Table:
    """Rows as a table, null cells with the reason why.

    ``reasons``: column key to the reason its nulls have (English, from the result); a row's own ``reason_of`` mapping
    goes before it.  Columns that no row has are left out.  ``file``: where all rows are, told when not all are shown.
    """
    every = list(rows)
    kept = [
        replace(column, label=column.label or texts.get(f"col.{column.key}", column.key), unit=_unit(texts, column))
        for column in columns
        if not every or any(_has(row, column) for row in every)
    ]
    notes: list[str] = []
    made = []
    for row in every[:limit]:
        own = row.get("reason_of") or {}
        cells = tuple(_cell(texts, column, row, {**(reasons or {}), **own}, notes) for column in kept)
        made.append(Row(cells, goto(row) if goto else None, bool(row.get("muted"))))
    more = None
    if len(every) > limit:
        more = texts("ui.rows_shown", shown=f"{limit:,}", total=f"{len(every):,}", file=file or "the result's files")
    title = caption if caption is not None else texts(f"tab.{identity}")
    return Table(identity, title, tuple(kept), tuple(made), tuple(notes), more)


def _has(row: Mapping[str, Any], column: Column) -> bool:
    return row.get(column.key) is not None if column.kind == "optional" else column.key in row


def _unit(texts: Catalogue, column: Column) -> str:
    if column.unit is not None:
        return column.unit
    key = _UNITS.get(column.kind)
    return texts(f"unit.{key}") if key else ""


def _cell(
    texts: Catalogue, column: Column, row: Mapping[str, Any], reasons: Mapping[str, str], notes: list[str]
) -> Cell:
    value = row.get(column.key)
    if value is None:
        if column.kind == "optional":
            return Cell("", "")
        reason = texts.said(clean(reasons.get(column.key, texts("ui.no_reason"))))[0]
        if reason not in notes:
            notes.append(reason)
        return Cell(texts("ui.not_measured"), "", reason, notes.index(reason) + 1)
    kind = row.get("kind_of", column.kind) if column.kind == "any" else column.kind
    if isinstance(value, bool):
        return Cell(texts("ui.yes" if value else "ui.no"), str(value).lower())
    raw = clean(value)
    if kind in ("metric", "metric_name"):
        return Cell(texts.get(f"col.{value}", raw), raw, term=row.get("term_of"))
    if kind == "bucket":
        return Cell(texts.get(f"bucket.{value}", raw), raw, swatch=f"b-{raw}")
    if kind == "said":
        return Cell(texts.said(raw)[0], raw)
    text = shown(value, kind)
    unit = _UNITS.get(kind) if column.kind == "any" else None
    return Cell(text, raw, raw if kind == "name" and text != raw else None, unit=texts(f"unit.{unit}") if unit else "")


def place(**keys: object) -> str:
    """Where in the timeline a row is, as the page's script reads it."""
    return json.dumps(keys, ensure_ascii=True)


def numeric(column: Column) -> bool:
    """Whether a column is set flush right."""
    return column.kind not in _TEXTUAL
