"""Horizontal bars, stacked or single, one row an item."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from nsysk3.report.draw.svg import Svg, fit, text_width, ticks

WIDE, NARROW = 940, 340
_ROW, _BAR = 26, 17
# Text on a pattern or a pale grey needs ground of its own.
_HATCHED = ("b-exposed_wait", "b-exposed_unresolved", "b-idle", "b-graph")


@dataclass(frozen=True)
class Part:
    """One piece of a bar: ``value`` in the axis' unit, ``swatch`` its class, ``label`` drawn where it fits."""

    value: float
    swatch: str
    tip: str
    label: str = ""


@dataclass(frozen=True)
class Bar:
    """One row; ``mark`` draws a line across it, ``strong`` sets it apart, ``gap`` leaves room above it."""

    label: str
    parts: Sequence[Part]
    strong: bool = False
    mark: float | None = None
    mark_tip: str = ""
    gap: bool = False
    end: str = ""


def bars(rows: Sequence[Bar], label: str, *, width: int, top: float, unit: str, scale: float = 1.0) -> Markup:
    """Bars on an axis from 0 to ``top``; tick labels are ``value * scale`` with ``unit``."""
    narrow = width < 500
    svg = Svg(width)
    ends = max((text_width(row.end) for row in rows), default=0)
    left = 0 if narrow else min(max((text_width(row.label) for row in rows), default=0) + 14, width * 0.4)
    right = width - 8 - (ends + 6 if ends else 14)
    step = _ROW + (14 if narrow else 0)
    y = 4.0
    places = []
    for row in rows:
        y += 10 if row.gap else 0
        places.append(y)
        y += step
    bottom = y

    def x(value: float) -> float:
        return left + (right - left) * (value / top if top else 0)

    def said(tick: float) -> str:
        return f"{tick * scale:,.10g} {unit}" if tick else "0"

    about = 4 if narrow else 8
    marks = ticks(0, top, about)
    while about > 1 and len(marks) > 1 and max(map(text_width, map(said, marks))) + 8 > x(marks[1]) - x(marks[0]):
        about -= 1  # labels that would run into each other
        marks = ticks(0, top, about)
    for tick in marks:
        svg.line(x(tick), 2, x(tick), bottom, "grid")
        svg.text(x(tick), bottom + 15, said(tick), "tick", "start" if narrow and not tick else "middle")
    for row, at in zip(rows, places, strict=True):
        cls = "strong" if row.strong else ""
        if narrow:
            svg.text(0, at + 11, fit(row.label, width), cls)
        else:
            svg.text(left - 8, at + _BAR / 2 + 4.5, fit(row.label, left), cls, "end")
        _row(svg, row, x, at + (14 if narrow else 0))
        if row.end:
            svg.text(right + 6, at + (14 if narrow else 0) + _BAR / 2 + 4.5, row.end, "tick")
    return svg.render(bottom + 22, label)


def _row(svg: Svg, row: Bar, x: Callable[[float], float], y: float) -> None:
    reach = 0.0
    for part in row.parts:
        start, end = x(reach), x(reach + part.value)
        reach += part.value
        if end - start <= 0:
            continue
        # A hair of a gap between pieces; a sliver is still a sliver that can be seen.
        shown = max(end - start - (0.8 if end - start > 2.5 else 0), 0.4)
        svg.rect(start, y, shown, _BAR, f"f {part.swatch}", tip=part.tip)
        if part.label and text_width(part.label) + 10 < end - start:
            cls = "inside hatch" if part.swatch.startswith(_HATCHED) else "inside"
            svg.text(start + 6, y + _BAR / 2 + 4.3, part.label, cls)
    if row.mark is not None:
        svg.line(x(row.mark), y - 3, x(row.mark), y + _BAR + 3, "mark", tip=row.mark_tip)
