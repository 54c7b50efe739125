"""The knee: the depth after which a deeper pipeline pays no more, and what to run because of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from nsysk3.sweep.folder import Point
from nsysk3.sweep.matrix import Layout
from nsysk3.sweep.record import Record
from nsysk3.sweep.spread import Repeats

Kind = Literal["knee", "still rising", "never rises", "not shown"]


@dataclass(frozen=True)
class Knee:
    """Where throughput stops rising with depth.

    ``kind``: ``knee`` only where, at every concurrency, the same layout gains more than repeats differ by over every
    shallower one and no deeper one gains that much over it; ``still rising`` where it is the deepest measured, ``never
    rises`` where it is the shallowest, ``not shown`` where repeats are unknown or concurrencies disagree.
    ``over``: the deeper layouts that are slower by more than repeats differ.
    """

    kind: Kind
    layout: Layout | None
    why: list[str] = field(default_factory=list)
    over: list[Layout] = field(default_factory=list)
    recommended: Layout | None = None
    recommended_why: list[str] = field(default_factory=list)
    fallback: Layout | None = None
    fallback_why: list[str] = field(default_factory=list)


def find_knee(points: Sequence[Point], judge: Repeats, rooms: Mapping[Layout, int | None], record: Record) -> Knee:
    """The knee over all concurrencies, with its evidence."""
    ladders = _ladders(points)
    best = {ladder[0].concurrency: _knee_at(ladder, judge) for ladder in ladders}
    winners = set(best.values())
    layouts = sorted({point.layout for point in points})
    if len(layouts) == 1:
        return _recommend(Knee("not shown", None, ["only one layout was measured"]), points, judge, rooms, record)
    if len(winners) != 1 or None in winners:
        return _recommend(Knee("not shown", None, _undecided(best, ladders, judge)), points, judge, rooms, record)
    layout = next(each for each in winners if each is not None)
    kind: Kind = "knee"
    if layout == layouts[-1]:
        kind = "still rising"
    elif layout == layouts[0]:
        kind = "never rises"
    over = [each for each in layouts if each > layout and _loses(each, layout, ladders, judge)]
    knee = Knee(kind, layout, _evidence(layout, ladders, judge), over)
    return _recommend(knee, points, judge, rooms, record)


def _ladders(points: Sequence[Point]) -> list[list[Point]]:
    """Points by concurrency, the shallowest layout first."""
    levels = sorted({point.concurrency for point in points})
    return [sorted((p for p in points if p.concurrency == level), key=lambda p: p.layout) for level in levels]


def _knee_at(ladder: Sequence[Point], judge: Repeats) -> Layout | None:
    """The shallowest layout that no other one clearly beats, if it clearly beats every shallower one."""
    for place, point in enumerate(ladder):
        verdicts = [judge.judge(point, other).verdict for other in ladder if other is not point]
        if "gain" in verdicts or "not known" in verdicts:
            continue
        shallower = [judge.judge(other, point).verdict for other in ladder[:place]]
        return point.layout if all(verdict == "gain" for verdict in shallower) else None
    return None


def _loses(layout: Layout, best: Layout, ladders: Sequence[Sequence[Point]], judge: Repeats) -> bool:
    for ladder in ladders:
        points = {point.layout: point for point in ladder}
        if layout in points and best in points and judge.judge(points[best], points[layout]).verdict != "loss":
            return False
    return True


def _undecided(best: Mapping[int, Layout | None], ladders: Sequence[Sequence[Point]], judge: Repeats) -> list[str]:
    said = []
    for (level, layout), ladder in zip(best.items(), ladders, strict=True):
        if layout is not None:
            said.append(f"C={level}: the knee would be {layout.label}")
            continue
        first, second = sorted(ladder, key=lambda point: -point.input_tps)[:2] if len(ladder) > 1 else (ladder[0], None)
        if second is None:
            said.append(f"C={level}: only {first.layout.label} was measured")
        else:
            evidence = judge.judge(second, first).evidence
            said.append(f"C={level}: {first.layout.label} against {second.layout.label}: {evidence}")
    return said


def _evidence(layout: Layout, ladders: Sequence[Sequence[Point]], judge: Repeats) -> list[str]:
    """One sentence a concurrency about the steps into and out of the layout."""
    said = []
    for ladder in ladders:
        at = next(i for i, point in enumerate(ladder) if point.layout == layout)
        words = []
        if at:
            step = judge.judge(ladder[at - 1], ladder[at])
            words.append(f"PP{ladder[at - 1].pp} -> PP{layout.pp} {step.evidence}")
        if at + 1 < len(ladder):
            step = judge.judge(ladder[at], ladder[at + 1])
            words.append(f"PP{layout.pp} -> PP{ladder[at + 1].pp} {step.evidence}")
        said.append(f"C={ladder[at].concurrency}: input TPS {', '.join(words)}")
    return said


def _recommend(
    knee: Knee, points: Sequence[Point], judge: Repeats, rooms: Mapping[Layout, int | None], record: Record
) -> Knee:
    """What to run and what to go back to: the knee and the next best; without a knee the shallowest that none beats."""
    ladder = sorted(points, key=lambda point: (-point.concurrency, -point.input_tps))
    ranked = list(dict.fromkeys(point.layout for point in ladder))
    chosen = knee.layout or min((each for each in ranked if not _beaten(each, points, judge)), default=ranked[0])
    rest = [layout for layout in ranked if layout != chosen]
    plain = [layout for layout in rest if not _special(layout, chosen, record)]
    fallback = next(iter(plain or rest), None)
    why = _merits(fallback, points, rooms) if fallback else []
    if len(rest) == 1 and _loses(rest[0], chosen, _ladders(points), judge):
        why = ["the only other layout measured, and slower by more than repeats differ", *why]
    merits = _merits(chosen, points, rooms)
    return Knee(knee.kind, knee.layout, knee.why, knee.over, chosen, merits, fallback, why)


def _beaten(layout: Layout, points: Sequence[Point], judge: Repeats) -> bool:
    """Whether at any concurrency another layout is faster by more than repeats differ."""
    mine = {point.concurrency: point for point in points if point.layout == layout}
    return any(
        judge.judge(mine[other.concurrency], other).verdict == "gain" for other in points if other.concurrency in mine
    )


def _special(layout: Layout, chosen: Layout, record: Record) -> bool:
    """Whether it needs arguments of its own, or differs from the chosen one in more than depth."""
    known = record.of(layout)
    return bool(known and known.args) or layout.ep != chosen.ep


def _merits(layout: Layout, points: Sequence[Point], rooms: Mapping[Layout, int | None]) -> list[str]:
    """Its place in throughput, times and room."""
    said = []
    for name, sign, words in (
        ("input_tps", -1, "input TPS"),
        ("ttft_p50_ms", 1, "TTFT p50"),
        ("ttft_p95_ms", 1, "TTFT p95"),
    ):
        places = {}
        for level in sorted({point.concurrency for point in points}):
            ladder = [p for p in points if p.concurrency == level and getattr(p, name) is not None]
            order = [point.layout for point in sorted(ladder, key=lambda point: sign * getattr(point, name))]
            if layout in order:
                places[level] = _place(order.index(layout) + 1, "highest" if sign < 0 else "lowest")
        if len(set(places.values())) == 1:
            said.append(f"{words}: {next(iter(places.values()))}")
        elif places:
            said.append(f"{words}: {', '.join(f'{place} at C={level}' for level, place in places.items())}")
    known = {each: room for each, room in rooms.items() if room is not None}
    if layout in known:
        place = sorted(known.values(), reverse=True).index(known[layout]) + 1
        said.append(f"headroom of the fullest GPU {known[layout]:,} MiB: {_place(place, 'most')}")
    return said


def _place(place: int, first: str) -> str:
    return {1: first, 2: f"second {first}", 3: f"third {first}"}.get(place, f"place {place}")
