"""A small SVG writer: every attribute and text escaped, colour by class so that the page's theme decides it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from markupsafe import Markup, escape

from nsysk3.report.text import clean

# Rough width of one character at the figure's text size; full-width characters count double.
_CHARACTER = 6.6


@dataclass
class Svg:
    """A drawing ``width`` wide; its height is set when it is rendered."""

    width: float
    parts: list[str] = field(default_factory=list)

    def rect(
        self, x: float, y: float, w: float, h: float, cls: str, *, tip: str | None = None, data: str | None = None
    ) -> None:
        """A filled box; ``tip`` is what hovering says, ``data`` groups boxes that light up together."""
        extra = f' data-tip="{_safe(tip)}"' if tip else ""
        extra += f' data-group="{_safe(data)}"' if data else ""
        self.parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" class="{cls}"{extra}/>')

    def line(self, x1: float, y1: float, x2: float, y2: float, cls: str = "axis", *, tip: str | None = None) -> None:
        """A straight line."""
        extra = f' data-tip="{_safe(tip)}"' if tip else ""
        self.parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{cls}"{extra}/>')

    def circle(self, x: float, y: float, r: float, cls: str, *, tip: str | None = None) -> None:
        """A dot."""
        extra = f' data-tip="{_safe(tip)}"' if tip else ""
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r:.1f}" class="{cls}"{extra}/>')

    def path(self, points: Sequence[tuple[float, float]], cls: str, *, tip: str | None = None) -> None:
        """A line through points."""
        steps = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        extra = f' data-tip="{_safe(tip)}"' if tip else ""
        self.parts.append(f'<path d="M{steps}" class="{cls}"{extra}/>')

    def text(self, x: float, y: float, text: str, cls: str = "", anchor: str = "start") -> None:
        """One line of text; ``anchor`` is start, middle or end."""
        where = "" if anchor == "start" else f' text-anchor="{anchor}"'
        kind = f' class="{cls}"' if cls else ""
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}"{where}{kind}>{_safe(text)}</text>')

    def render(self, height: float, label: str) -> Markup:
        """The whole drawing, named for who cannot see it."""
        head = f'<svg viewBox="0 0 {self.width:.0f} {height:.0f}" role="img" aria-label="{_safe(label)}" class="draw">'
        return Markup(head + "".join(self.parts) + "</svg>")


def _safe(text: str) -> Markup:
    return escape(clean(text))


def text_width(text: str) -> float:
    """About how wide a text is drawn."""
    return sum(_CHARACTER * (2 if ord(character) > 0x2E80 else 1) for character in text)


def fit(text: str, width: float) -> str:
    """The text cut to a width."""
    if text_width(text) <= width:
        return text
    while text and text_width(text + "…") > width:
        text = text[:-1]
    return text + "…"


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers that cover a range."""
    if high <= low:
        return [low]
    raw = (high - low) / max(about, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10, 20) if power * factor >= raw)
    first = math.ceil(low / step)
    return [step * i for i in range(first, math.floor(high / step + 1e-9) + 1)]
