"""A heat map: rows by columns, darker is more."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from nsysk3.report.draw.svg import Svg, fit, text_width

STEPS = 8


def heat(
    rows: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float | None]],
    tips: Sequence[Sequence[str]], texts: Sequence[Sequence[str]], label: str, *, width: int,
) -> Markup:  # fmt: skip
    """Cells in STEPS shades, each column from 0 to its own largest value; a missing value is crossed out, not pale.

    ``texts`` are written into cells that are wide enough.
    """
    svg = Svg(width)
    left = min(max((text_width(row) for row in rows), default=0) + 22, width * 0.4)
    highs = [max((row[place] or 0 for row in values), default=0) or 1 for place in range(len(columns))]
    cell_w = min((width - left - 4) / max(len(columns), 1), 140)
    cell_h = 18 if len(rows) <= 40 else 9
    head = 20.0
    if any(text_width(column) + 6 > cell_w for column in columns):
        head = 74.0
    for place, column in enumerate(columns):
        at = left + cell_w * (place + 0.5)
        if head > 20:
            svg.parts.append(f'<g transform="translate({at - 4:.1f} {head - 6:.1f}) rotate(-50)">')
            svg.text(0, 0, fit(column, 84), "tick")
            svg.parts.append("</g>")
        else:
            svg.text(at, head - 6, column, "tick", "middle")
    every = 1 if cell_h > 12 else 4
    for line, row in enumerate(rows):
        y = head + line * cell_h
        if line % every == 0:
            svg.text(left - 8, y + cell_h / 2 + 4, fit(row, left - 14), "", "end")
        for place, value in enumerate(values[line]):
            x = left + cell_w * place
            shade = "heat-none" if value is None else f"heat-{min(int(value / highs[place] * STEPS), STEPS - 1)}"
            if value == 0:
                shade = "heat-zero"
            svg.rect(x, y, cell_w - 1.5, cell_h - 1.5, shade, tip=tips[line][place])
            text = texts[line][place]
            if cell_h > 12 and value is not None and text_width(text) + 8 < cell_w:
                strong = value > highs[place] * 5 / STEPS
                svg.text(x + cell_w - 8, y + cell_h / 2 + 3.5, text, "inside" if strong else "tick ink", "end")
            if value is None:
                svg.line(x + 2, y + cell_h - 4, x + cell_w - 4, y + 2, "axis")
    return svg.render(head + cell_h * len(rows) + 4, label)
