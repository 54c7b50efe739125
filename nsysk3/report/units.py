"""Numbers as a reader likes them; the exact ones are in the files."""

from __future__ import annotations

_STEPS = ((10**9, "s"), (10**6, "ms"), (10**3, "us"))


def duration(ns: float | None) -> str:
    """Nanoseconds with a fitting unit and three or four digits; a dash for null."""
    if ns is None:
        return "-"
    for size, unit in _STEPS:
        if abs(ns) >= size:
            value = ns / size
            return f"{value:.{2 if abs(value) < 10 else 1}f} {unit}"
    return f"{ns:.0f} ns"


def milliseconds(ns: float | None, decimals: int = 1) -> str:
    """Nanoseconds as milliseconds with thousands separators, for columns that must compare."""
    return "-" if ns is None else f"{ns / 1e6:,.{decimals}f}"


def percent(share: float | None) -> str:
    """A share in percent with one decimal; a dash for null, and never 0.0 for something small but real."""
    if share is None:
        return "-"
    return "<0.1" if 0 < share < 0.0005 else f"{share * 100:.1f}"


def count(number: float | None) -> str:
    """A count with thousands separators; a dash for null."""
    return "-" if number is None else f"{number:,.0f}"
