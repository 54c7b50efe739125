"""Cumulative distributions and ranges: lines on a measured axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from nsysk3.report.draw.svg import Svg, fit, text_width, ticks
from nsysk3.report.text import duration

POINTS = 200


@dataclass(frozen=True)
class Curve:
    """A sorted sample, thinned to at most POINTS values; ``dash`` for the second curve of a pair."""

    values: Sequence[float]
    swatch: str
    tip: str
    dash: bool = False


def thin(values: Sequence[float]) -> list[float]:
    """At most POINTS of sorted values, evenly by rank, first and last among them."""
    if len(values) <= POINTS:
        return list(values)
    return [values[round(i * (len(values) - 1) / (POINTS - 1))] for i in range(POINTS)]


def ecdf(curves: Sequence[Curve], label: str, axis: str, *, width: int) -> Markup:
    """Cumulative distributions over a logarithmic axis of nanoseconds."""
    svg = Svg(width)
    left, right, top, bottom = 42.0, width - 12.0, 8.0, 210.0
    every = [max(value, 1) for curve in curves for value in curve.values]
    first, last = math.log10(min(every)), math.log10(max(every))
    first, last = math.floor(first * 4) / 4, max(math.ceil(last * 4) / 4, math.floor(first * 4) / 4 + 0.5)

    def x(value: float) -> float:
        return left + (right - left) * (math.log10(max(value, 1)) - first) / (last - first)

    def y(share: float) -> float:
        return bottom - (bottom - top) * share

    for percent in (0, 25, 50, 75, 100):
        svg.line(left, y(percent / 100), right, y(percent / 100), "grid")
        svg.text(left - 6, y(percent / 100) + 4, f"{percent} %", "tick", "end")
    for power in range(math.ceil(first), math.floor(last) + 1):
        _tick(svg, x(10.0**power), top, bottom, 10.0**power)
    if math.floor(last) - math.ceil(first) < 2:
        for mark in (2, 5):
            for power in range(math.floor(first), math.ceil(last) + 1):
                if first <= math.log10(mark) + power <= last:
                    _tick(svg, x(mark * 10.0**power), top, bottom, mark * 10.0**power)
    svg.text(right, bottom + 30, axis, "tick", "end")
    for curve in curves:
        count = len(curve.values)
        points = [(x(curve.values[0]), y(0))]
        for place, value in enumerate(curve.values):
            points += [(x(value), points[-1][1]), (x(value), y((place + 1) / count))]
        svg.path(points, f"curve {curve.swatch}{' dash' if curve.dash else ''}", tip=curve.tip)
    return svg.render(bottom + 36, label)


def _tick(svg: Svg, x: float, top: float, bottom: float, value: float) -> None:
    svg.line(x, top, x, bottom, "grid")
    number, unit = duration(value).split(" ")
    svg.text(x, bottom + 15, f"{float(number):g} {unit}", "tick", "middle")


@dataclass(frozen=True)
class Range:
    """A dot and how far it reaches."""

    label: str
    at: float
    to: float
    tip: str
    swatch: str
    head: str = ""


def ranges(rows: Sequence[Range], label: str, axis: str, *, width: int) -> Markup:
    """One row an item: a dot at ``at``, a line to ``to`` (ns); rows with a new ``head`` start a group."""
    narrow = width < 500
    svg = Svg(width)
    left = 64.0 if narrow else min(max((text_width(row.label) for row in rows), default=0) + 20, width * 0.4)
    right = width - 16.0
    low = min(0.0, *(min(row.at, row.to) for row in rows))
    high = max(1.0, *(max(row.at, row.to) for row in rows))
    y, shown = 6.0, ""

    def x(value: float) -> float:
        return left + (right - left) * (value - low) / (high - low)

    body = Svg(width)
    for row in rows:
        if row.head != shown:
            body.text(0, y + 12, fit(row.head, width), "strong")
            y, shown = y + 20, row.head
        body.text(left - 10, y + 12, fit(row.label, left - 10), "", "end")
        body.line(x(row.at), y + 8, x(row.to), y + 8, f"range {row.swatch}", tip=row.tip)
        body.circle(x(row.at), y + 8, 4, f"f {row.swatch}", tip=row.tip)
        y += 20
    unit, name = next(
        ((size, unit) for size, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "µs")) if high >= size), (1, "ns")
    )
    for tick in ticks(low / unit, high / unit, 4 if narrow else 7):
        svg.line(x(tick * unit), 2, x(tick * unit), y, "zero" if tick == 0 else "grid")
        svg.text(x(tick * unit), y + 14, f"{tick:,.10g}", "tick", "middle")
    svg.text(right, y + 28, f"{axis}, {name}", "tick", "end")
    svg.parts += body.parts
    return svg.render(y + 34, label)
