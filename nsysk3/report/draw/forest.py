"""Changes with their intervals: a dot, a line, and where nothing changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from nsysk3.report.draw.svg import Svg, fit, text_width, ticks


@dataclass(frozen=True)
class Change:
    """One relative change; ``low`` and ``high`` are None where no interval could be made."""

    label: str
    at: float
    low: float | None
    high: float | None
    swatch: str
    tip: str
    text: str
    head: str = ""


def forest(rows: Sequence[Change], label: str, *, width: int) -> Markup:
    """Rows on one axis in percent, cut at +100 %: what lies beyond ends in an arrow."""
    narrow = width < 500
    svg, body = Svg(width), Svg(width)
    left = 0.0 if narrow else min(max((text_width(row.label) for row in rows), default=0) + 16, width * 0.4)
    right = width - 16.0 - max((text_width(row.text) for row in rows), default=0)
    low = min(0.0, *(row.at if row.low is None else row.low for row in rows))
    high = min(1.0, max(0.05, *(row.at if row.high is None else row.high for row in rows)))
    low = max(-1.0, low)

    def x(value: float) -> float:
        return left + 6 + (right - left - 12) * (min(max(value, low), high) - low) / (high - low)

    y, head = 4.0, ""
    for row in rows:
        if row.head != head:
            head = row.head
            body.text(0, y + 13, fit(head, width), "strong")
            y += 22
        if narrow:
            body.text(0, y + 11, fit(row.label, width))
            y += 14
        else:
            body.text(left - 10, y + 13, fit(row.label, left - 10), "", "end")
        if row.low is not None and row.high is not None:
            body.line(x(row.low), y + 9, max(x(row.high), x(row.low) + 1), y + 9, f"range {row.swatch}", tip=row.tip)
        if row.at > high:
            body.text(x(high) - 2, y + 13, "→", "strong", "middle")
        else:
            body.circle(x(row.at), y + 9, 4.5, f"f {row.swatch}", tip=row.tip)
        body.text(right + 8, y + 13, row.text, "tick")
        y += 22
    for tick in ticks(low * 100, high * 100, 4 if narrow else 9):
        svg.line(x(tick / 100), 0, x(tick / 100), y, "zero" if tick == 0 else "grid")
        svg.text(x(tick / 100), y + 15, f"{tick:+.10g} %" if tick else "0", "tick", "middle")
    svg.parts += body.parts
    return svg.render(y + 22, label)
