"""Points of a sweep that was never made."""

from __future__ import annotations

from nsysk3.sweep.folder import Point


def point(pp: int, tps: float, *, concurrency: int = 8, spread: float | None = 0.01, repeats: int = 3) -> Point:
    """A point whose repeats lie evenly around their median; nothing is known of them with ``spread`` None."""
    low, high = (None, None) if spread is None else (tps * (1 - spread / 2), tps * (1 + spread / 2))
    return Point(pp, 16 // pp, 1, concurrency, repeats, tps, low, high, spread, None, 8e6 / tps, 9e6 / tps)
