"""Whether a difference in throughput is more than the repeats differ among themselves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from nsysk3.sweep.folder import Point

Verdict = Literal["gain", "loss", "no difference shown", "not known"]


@dataclass(frozen=True)
class Range:
    """Where the repeats of a point lie, and how that is known."""

    low: float
    high: float
    known: str


@dataclass(frozen=True)
class Judgement:
    """What a step from one point to another is, and on what evidence."""

    verdict: Verdict
    change: float
    evidence: str


class Repeats:
    """The repeats of all points of a sweep; one with none of its own is judged by the widest spread that is known."""

    def __init__(self, points: Iterable[Point]) -> None:
        known = [spread for point in points if (spread := _spread(point)) is not None]
        self.widest = max(known, default=None)

    def range(self, point: Point) -> Range | None:
        """Where its repeats lie; None where no point's spread is known."""
        if point.input_tps_min is not None and point.input_tps_max is not None and point.repeats > 1:
            return Range(point.input_tps_min, point.input_tps_max, "measured")
        if point.input_tps_spread_at_most is not None:
            return _around(point, point.input_tps_spread_at_most, "bounded")
        return None if self.widest is None else _around(point, self.widest, "assumed")

    def judge(self, before: Point, after: Point) -> Judgement:
        """A gain or a loss only where the repeats of the two do not overlap."""
        change = after.input_tps / before.input_tps - 1
        a, b = self.range(before), self.range(after)
        if a is None or b is None or self.widest is None:
            return Judgement("not known", change, "no repeats to judge by")
        if b.low > a.high:
            verdict: Verdict = "gain"
        elif b.high < a.low:
            verdict = "loss"
        else:
            return Judgement("no difference shown", change, f"{change:+.2%} is inside what repeats differ by")
        return Judgement(verdict, change, f"{change:+.2%} ({self._said(before, after, (a.known, b.known))})")

    def _said(self, before: Point, after: Point, known: tuple[str, str]) -> str:
        """How much the repeats of both differ."""
        spreads = {
            f"{'at most ' if how == 'bounded' else ''}{_spread(point) or 0:.2%}"
            for point, how in zip((before, after), known, strict=True)
            if how != "assumed"
        }
        assumed = [f"PP{point.pp}" for point, how in zip((before, after), known, strict=True) if how == "assumed"]
        said = [f"repeats differ by {' and '.join(sorted(spreads))}"] if spreads else []
        if assumed:
            said.append(f"those of {' and '.join(assumed)} are not known and taken to differ by {self.widest:.2%}")
        return "; ".join(said)


def _spread(point: Point) -> float | None:
    return point.input_tps_spread if point.input_tps_spread is not None else point.input_tps_spread_at_most


def _around(point: Point, spread: float, known: str) -> Range:
    """The median lies somewhere in its repeats, so they reach at most one spread to either side."""
    return Range(point.input_tps * (1 - spread), point.input_tps * (1 + spread), known)
