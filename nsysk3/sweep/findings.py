"""What the points of a sweep say: ladders, steps, memory, saturation, the knee and what to run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from nsysk3.sweep.caveats import caveats, limits
from nsysk3.sweep.folder import Point, Repeat
from nsysk3.sweep.knee import Knee, find_knee
from nsysk3.sweep.matrix import Layout
from nsysk3.sweep.record import Record
from nsysk3.sweep.spread import Judgement, Repeats

# More than this is gained by more concurrency only where the pipeline was not full.
SATURATED = 0.02


@dataclass(frozen=True)
class Rung:
    """A point against the base of its concurrency; changes are None on the base and where it has no base."""

    point: Point
    base: bool
    tps_change: float | None
    ttft_change: float | None


@dataclass(frozen=True)
class Step:
    """From one layout to the next deeper one at a concurrency.

    ``ttft_change`` is between the two times as the ladder prints them, so that a reader can check it by hand.
    """

    before: Point
    after: Point
    judgement: Judgement
    ttft_change: float | None


@dataclass(frozen=True)
class Room:
    """Memory of the fullest GPU of a layout, MiB; None where nobody could look, with the reason."""

    layout: Layout
    peak_mib: int | None
    total_mib: int | None
    gpu: str | None
    reason: str | None = None

    @property
    def headroom_mib(self) -> int | None:
        """What was left on it."""
        return None if self.peak_mib is None or self.total_mib is None else self.total_mib - self.peak_mib


@dataclass(frozen=True)
class Pressure:
    """A layout at its least and its most concurrency."""

    low: Point
    high: Point
    tps_change: float
    ttft_ratio: float | None

    @property
    def saturated(self) -> bool:
        """Whether more concurrency brings no more throughput."""
        return self.tps_change < SATURATED


@dataclass(frozen=True)
class Findings:
    """Everything a report shows."""

    base: Layout
    rungs: list[Rung]
    steps: list[Step]
    rooms: list[Room]
    pressures: list[Pressure]
    knee: Knee
    failures: list[str] = field(default_factory=list)
    caveats: list[str] = field(default_factory=list)
    limits: list[str] = field(default_factory=list)


def find(points: Sequence[Point], record: Record, repeats: Sequence[Repeat] = ()) -> Findings:
    """All findings.  ``points`` are not empty; the base is the shallowest layout."""
    layouts = list(dict.fromkeys(sorted(point.layout for point in points)))
    base = layouts[0]
    judge = Repeats(points)
    steps = [step for concurrency in _levels(points) for step in _steps(_at(points, concurrency), judge)]
    rooms = [_room(layout, points, record) for layout in layouts]
    pressures = [each for layout in layouts if (each := _pressure([p for p in points if p.layout == layout]))]
    knee = find_knee(points, judge, rooms={room.layout: room.headroom_mib for room in rooms}, record=record)
    return Findings(
        base, _rungs(points, base), steps, rooms, pressures, knee, _failures(record, repeats),
        caveats(points, record, repeats), limits(points, record),
    )  # fmt: skip


def as_printed(ms: float) -> tuple[float, str]:
    """A time as the ladder prints it, in milliseconds and as text: hundredths from ten seconds on, else four digits."""
    if ms >= 1000:
        decimals = 2 if ms >= 10_000 else 3
        return round(ms / 1000, decimals) * 1000, f"{ms / 1000:,.{decimals}f} s"
    decimals = 1 if ms >= 100 else 2 if ms >= 10 else 3
    return round(ms, decimals), f"{ms:.{decimals}f} ms"


def _levels(points: Sequence[Point]) -> list[int]:
    return sorted({point.concurrency for point in points})


def _at(points: Sequence[Point], concurrency: int) -> list[Point]:
    return sorted((point for point in points if point.concurrency == concurrency), key=lambda point: point.layout)


def _rungs(points: Sequence[Point], base: Layout) -> list[Rung]:
    found = []
    for concurrency in _levels(points):
        mine = _at(points, concurrency)
        first = next((point for point in mine if point.layout == base), None)
        for point in mine:
            same = point is first
            tps = None if same or first is None else point.input_tps / first.input_tps - 1
            ttft = None if same or first is None else _ratio(point.ttft_p50_ms, first.ttft_p50_ms)
            found.append(Rung(point, same, tps, None if ttft is None else ttft - 1))
    return found


def _steps(points: Sequence[Point], judge: Repeats) -> list[Step]:
    found = []
    for before, after in pairwise(points):
        ratio = None
        if before.ttft_p50_ms and after.ttft_p50_ms:
            ratio = as_printed(after.ttft_p50_ms)[0] / as_printed(before.ttft_p50_ms)[0] - 1
        found.append(Step(before, after, judge.judge(before, after), ratio))
    return found


def _room(layout: Layout, points: Sequence[Point], record: Record) -> Room:
    known = [point for point in points if point.layout == layout and point.peak_memory_mib is not None]
    worst = max(known, key=lambda point: point.peak_memory_mib or 0, default=None)
    if worst is None:
        each = record.of(layout)
        reasons = each.not_measured if each else {}
        return Room(layout, None, None, None, reasons.get("peak_memory_mib", "no GPU snapshot was kept"))
    return Room(layout, worst.peak_memory_mib, worst.memory_total_mib, worst.peak_memory_gpu)


def _pressure(points: Sequence[Point]) -> Pressure | None:
    """None for a layout with a single concurrency."""
    ordered = sorted(points, key=lambda point: point.concurrency)
    if len(ordered) < 2:
        return None
    low, high = ordered[0], ordered[-1]
    change = high.input_tps / low.input_tps - 1
    return Pressure(low, high, change, _ratio(high.ttft_p50_ms, low.ttft_p50_ms))


def _ratio(value: float | None, other: float | None) -> float | None:
    return None if value is None or not other else value / other


def _failures(record: Record, repeats: Sequence[Repeat]) -> list[str]:
    """Layouts whose last start failed, and repeats that do not count."""
    found = []
    for each in record.layouts:
        cause = each.starts[-1].cause if each.starts else None
        if cause:
            advice = f"; {cause.advice}" if cause.advice else ""
            found.append(f"{each.layout.label}: {cause.kind}: {cause.message}{advice}")
    for row in repeats:
        if row.status != "done":
            where = f"{row.layout.label} C={row.concurrency} repeat {row.repeat}"
            found.append(f"{where}: {row.completed} of {row.requests} requests completed; {row.cause or 'not counted'}")
    return found
