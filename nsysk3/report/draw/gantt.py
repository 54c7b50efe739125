"""Micro-batches of each stage over time, with what the stage's boundaries waited."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from nsysk3.report.draw.svg import Svg, fit, text_width, ticks

_UPPER, _LOWER, _STEP = 18, 8, 40


@dataclass(frozen=True)
class Span:
    """Something that lasted: times in ns on the figure's axis."""

    start: float
    end: float
    swatch: str
    tip: str
    label: str = ""
    group: str | None = None


@dataclass(frozen=True)
class Lane:
    """One stage: its forwards above, its boundaries' waits and transfers below."""

    label: str
    upper: Sequence[Span]
    lower: Sequence[Span]


def gantt(
    lanes: Sequence[Lane], phases: Sequence[tuple[str, float]], low: float, high: float, label: str, *, width: int
) -> Markup:
    """Lanes from ``low`` to ``high`` (ns); ``phases`` are names with the time they begin at."""
    narrow = width < 500
    svg = Svg(width)
    left = 0.0 if narrow else min(max((text_width(lane.label) for lane in lanes), default=0) + 14, width * 0.3)
    right = width - 10.0
    head = 20.0 if phases else 4.0
    step = _STEP + (14 if narrow else 0)
    bottom = head + step * len(lanes)

    def x(at: float) -> float:
        return left + (right - left) * ((at - low) / (high - low) if high > low else 0)

    for tick in ticks(0, high - low, 4 if narrow else 8):
        svg.line(x(low + tick), head, x(low + tick), bottom, "grid")
        svg.text(
            x(low + tick), bottom + 15, f"{tick / 1e6:,.10g} ms" if tick else "0", "tick", "middle" if tick else "start"
        )
    edges = [x(max(start, low)) for _, start in phases] + [float(width)]
    for place, (name, start) in enumerate(phases):
        at = edges[place]
        if start > low:
            svg.line(at, head - 14, at, bottom, "phase")
        if at + 6 + text_width(name) < edges[place + 1]:
            svg.text(at + 4, head - 6, name, "tick strong")
    for row, lane in enumerate(lanes):
        y = head + row * step + 4
        if narrow:
            svg.text(0, y + 10, fit(lane.label, width), "strong")
            y += 14
        else:
            svg.text(left - 8, y + 17, fit(lane.label, left), "strong", "end")
        for spans, top, tall in ((lane.upper, y, _UPPER), (lane.lower, y + _UPPER + 2, _LOWER)):
            for span in spans:
                _span(svg, span, x, top, tall)
    return svg.render(bottom + 22, label)


def _span(svg: Svg, span: Span, x: Callable[[float], float], y: float, tall: float) -> None:
    start, end = x(span.start), x(span.end)
    svg.rect(start, y, max(end - start - 0.6, 0.5), tall, f"f {span.swatch}", tip=span.tip, data=span.group)
    if span.label and text_width(span.label) + 6 < end - start:
        svg.text((start + end) / 2, y + tall / 2 + 4.3, span.label, "inside", "middle")
