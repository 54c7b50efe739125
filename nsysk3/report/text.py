"""Text and numbers of a report's cells: hostile strings made harmless, null never a number."""

from __future__ import annotations

import re
import unicodedata
from typing import Any

from nsysk3.report import units
from nsysk3.report.units import milliseconds, percent

# What simulations of ours begin with, and every banner says itself.
_SIMULATED = re.compile(r"simulated\b[\s,:;-]*", re.IGNORECASE)
NO_GPU = "no GPU made these traces"
# In place of tables over ranks; pages have it in their catalogue.
NO_MEDIANS = "No rank is stable: no medians over ranks, and no kernel means."
# A name longer than this is cut in the middle: symbols differ at both ends.
NAME_LENGTH = 160
# What a cell or a hover may hold at all.
LONGEST = 400
# Names in the timeline's data.
TIMELINE_NAME = 240


def clean(value: object, length: int = LONGEST) -> str:
    """Text from a trace as one line of visible characters, at most ``length`` of them.

    Control characters and bidirectional marks would hide or reorder what a reader sees: each becomes its code point in
    words.  What is not valid Unicode becomes the replacement character.  Escaping for HTML is the template's work.
    """
    text = str(value)
    cut = len(text) - length
    if cut > 0:
        half = length // 2
        text = f"{text[:half]}…[{cut:,}]…{text[-half:]}"
    if text.isprintable():
        return text
    text = text.encode("utf-8", "replace").decode("utf-8")
    return "".join(_visible(character) for character in text)


def origin(simulated: str) -> str:
    """What made simulated traces, without the word simulated before it; empty where nothing else is said."""
    return _SIMULATED.sub("", clean(simulated), count=1) if _SIMULATED.match(simulated) else clean(simulated)


def _visible(character: str) -> str:
    if character in "\t\n\r":
        return " "
    # Cc and Cf: control and format characters, the bidi marks among them; Zl, Zp: line and paragraph separators.
    if unicodedata.category(character) in ("Cc", "Cf", "Co", "Cs", "Cn", "Zl", "Zp"):
        return f"‹U+{ord(character):04X}›"
    return character


def shown(value: Any, kind: str) -> str:
    """A value that is not null, as its column shows it.  Never rounds something small but real to nothing."""
    if kind == "ms":
        return _at_least(value / 1e6, milliseconds(value), 1)
    if kind == "ms3":
        return _at_least(value / 1e6, milliseconds(value, 3), 3)
    if kind == "us":
        return _at_least(value / 1e3, f"{value / 1e3:,.1f}", 1)
    if kind == "share":
        return percent(value) if value >= 0 else f"{value * 100:.1f}"
    if kind == "count":
        return f"{value:,.0f}"
    if kind == "number":
        return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"
    if kind == "ratio":
        return f"{value:.2f}"
    if kind == "gbs":
        return f"{value:,.1f}" if value >= 1 or value == 0 else f"{value:.2f}" if value >= 0.01 else "<0.01"
    if kind == "bytes":
        return size(value)
    if kind == "time":
        return duration(value)
    if kind == "name":
        return clean(value, NAME_LENGTH)
    return clean(value)


def duration(ns: float | None) -> str:
    """Nanoseconds with a fitting unit, for prose and hovering."""
    return units.duration(ns).replace(" us", " µs")


def _at_least(value: float, text: str, decimals: int) -> str:
    least = 10.0**-decimals
    if value == 0:
        return "0"
    return f"<{least:.{decimals}f}" if 0 < value < least / 2 else text


def size(value: float) -> str:
    """Bytes with a binary unit; the exact count where it is small."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= unit:
            return f"{value / unit:,.4g} {name}"
    return f"{value:,.0f} B"
