"""The tables and sentences of a sweep's report, as text that terminal, Markdown and page share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nsysk3.run.words import counted
from nsysk3.sweep.findings import SATURATED, Findings, Rung, Step, as_printed
from nsysk3.sweep.folder import Point
from nsysk3.sweep.matrix import Layout
from nsysk3.sweep.record import Record

NONE = "-"


@dataclass(frozen=True)
class TextTable:
    """Cells as they are shown; the first column is flush left, the others right.  ``notes``: why cells are empty."""

    id: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


def all_tables(findings: Findings, record: Record) -> list[TextTable]:
    """Every table that has rows, in the order of the report."""
    made = [ladder(findings, record), steps(findings), memory(findings), pressure(findings), starts(findings, record)]
    return [table for table in made if table.rows]


def ladder(findings: Findings, record: Record) -> TextTable:
    """Throughput and TTFT of every point, and their change against the base at the same concurrency."""
    columns = (
        "PP / TP / EP", "C", "input TPS", "TTFT p50", "TTFT p95", "input TPS change", "TTFT p50 change", "spread"
    )  # fmt: skip
    notes = []
    if any(_spread(rung.point) == NONE for rung in findings.rungs):
        reason = record.not_measured.get("input_tps_spread", "fewer than two repeats")
        notes.append(f"spread (of input TPS over the repeats, largest less smallest) {NONE}: {reason}")
    if any(not rung.base and rung.tps_change is None for rung in findings.rungs):
        notes.append(f"change {NONE}: {findings.base.label} was not measured at this concurrency")
    return TextTable(
        "ladder", f"Throughput and TTFT against {_short(findings.base)}", columns,
        tuple(_rung(rung) for rung in findings.rungs), tuple(notes),
    )  # fmt: skip


def _rung(rung: Rung) -> tuple[str, ...]:
    point = rung.point
    changes = ("baseline", "baseline") if rung.base else (change(rung.tps_change), change(rung.ttft_change))
    return (
        three(point.layout), str(point.concurrency), rate(point.input_tps), seconds(point.ttft_p50_ms),
        seconds(point.ttft_p95_ms), *changes, _spread(point),
    )  # fmt: skip


def _spread(point: Point) -> str:
    if point.input_tps_spread is not None:
        return f"{point.input_tps_spread:.2%}"
    bound = point.input_tps_spread_at_most
    return NONE if bound is None else f"<={bound:.2%}"


def steps(findings: Findings) -> TextTable:
    """The change of each step to the next deeper layout."""
    rows = tuple(
        (_step(step), str(step.after.concurrency), change(step.judgement.change), change(step.ttft_change),
         step.judgement.verdict)
        for step in findings.steps
    )  # fmt: skip
    note = "gain, loss: the repeats of the two do not overlap; changes of TTFT are between the times as printed"
    columns = ("step", "C", "input TPS", "TTFT p50", "input TPS against the repeats")
    return TextTable("steps", "Marginal change of each step", columns, rows, (note,))


def _step(step: Step) -> str:
    before, after = step.before.layout, step.after.layout
    if before.pp == after.pp:
        return f"{before.label} -> {after.label}"
    return f"PP{before.pp} -> PP{after.pp}"


def memory(findings: Findings) -> TextTable:
    """The fullest GPU of every layout."""
    totals = {room.total_mib for room in findings.rooms if room.total_mib is not None}
    of = f" of {next(iter(totals)):,} MiB" if len(totals) == 1 else ""
    rows = tuple(
        (three(room.layout), mib(room.peak_mib), mib(room.headroom_mib), room.gpu or NONE) for room in findings.rooms
    )
    notes = dict.fromkeys(f"{NONE}: {room.reason}" for room in findings.rooms if room.reason)
    columns = ("PP / TP / EP", "peak", f"headroom{of}", "GPU")
    return TextTable("memory", "Memory of the fullest GPU after the repeats", columns, rows, tuple(notes))


def pressure(findings: Findings) -> TextTable:
    """What more concurrency brings each layout."""
    rows = []
    for each in findings.pressures:
        ratio = NONE if each.ttft_ratio is None else f"x{each.ttft_ratio:.2f}"
        levels = f"{each.low.concurrency} -> {each.high.concurrency}"
        slower = ", and slower" if each.tps_change < -SATURATED else ""
        said = f"saturated{slower}" if each.saturated else "not saturated"
        rows.append((three(each.low.layout), levels, change(each.tps_change), ratio, said))
    return TextTable(
        "pressure", "More concurrency", ("PP / TP / EP", "C", "input TPS", "TTFT p50", ""), tuple(rows),
        (f"saturated: less than {SATURATED:.0%} more input TPS, so that further requests only wait longer",),
    )  # fmt: skip


def starts(findings: Findings, record: Record) -> TextTable:
    """How long each service took to become healthy."""
    rows = []
    known = {rung.point.layout: rung.point.startup_s for rung in findings.rungs if rung.point.startup_s is not None}
    for layout, startup in known.items():
        each = record.of(layout)
        rows.append(
            (
                three(layout),
                f"{startup:,.{0 if startup >= 10 else 1}f} s",
                str(len(each.starts)) if each and each.starts else NONE,
            )
        )
    return TextTable("starts", "Service", ("PP / TP / EP", "healthy after", "starts"), tuple(rows))


def headline(record: Record, findings: Findings) -> str:
    """Which sweep, and what it measured."""
    return f"{record.run_id or 'sweep'}: {measured(record, findings)}"


def measured(record: Record, findings: Findings) -> str:
    """Load, requests and repeats."""
    say = record.settings
    parts = [f"{_number(say.get('load.input_len'))} -> {_number(say.get('load.output_len'))} tokens"]
    if say.get("load.chunk"):
        parts.append(f"chunk {_number(say['load.chunk'])}")
    parts.append(f"{'? requests' if record.requests is None else counted(record.requests, 'request')} a repeat")
    counts = sorted({rung.point.repeats for rung in findings.rungs})
    repeats = counted(counts[0], "repeat") if len(counts) == 1 else f"{counts[0]} to {counts[-1]} repeats"
    parts.append(f"medians of {repeats}")
    return ", ".join(parts)


def verdict(findings: Findings) -> list[str]:
    """Knee, its evidence, recommendation and fallback, a sentence each."""
    knee = findings.knee
    name = knee.layout.label if knee.layout else ""
    said = [
        {
            "knee": f"Knee: {name}. Up to it a deeper pipeline gains, beyond it no more.",
            "still rising": f"No knee in this ladder: throughput still rises at {name}, the deepest layout measured.",
            "never rises": f"No knee: no deeper layout gains more over {name} than repeats differ by.",
            "not shown": "No knee is shown.",
        }[knee.kind]
    ]
    said += [f"{text}." for text in knee.why]
    if knee.over:
        said.append(f"{over_words(findings).capitalize()}: {', '.join(layout.label for layout in knee.over)}.")
    if knee.recommended:
        said.append(f"Recommended: {knee.recommended.label} ({'; '.join(knee.recommended_why)}).")
    if knee.fallback:
        said.append(f"Fallback: {knee.fallback.label} ({'; '.join(knee.fallback_why)}).")
    return said


def over_words(findings: Findings) -> str:
    """What deeper layouts are that lose: over the knee, where there is one."""
    return "over the knee" if findings.knee.kind == "knee" else "deeper and slower"


def three(layout: Layout) -> str:
    """``8 / 4 / 4``."""
    return f"{layout.pp} / {layout.tp} / {layout.ep}"


def rate(value: float) -> str:
    """Tokens a second."""
    return f"{value:,.2f}"


def seconds(ms: float | None) -> str:
    """A time as ``as_printed`` has it."""
    return NONE if ms is None else as_printed(ms)[1]


def change(share: float | None) -> str:
    """A relative change in percent; what rounds to nothing has no direction."""
    return NONE if share is None else f"{share:+.2%}".replace("-0.00%", "0.00%").replace("+0.00%", "0.00%")


def mib(value: int | None) -> str:
    """Memory."""
    return NONE if value is None else f"{value:,} MiB"


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else "?"


def _short(layout: Layout) -> str:
    return f"PP{layout.pp}"


def lists(findings: Findings) -> list[tuple[str, Sequence[str]]]:
    """The lists of sentences after the tables."""
    made = [
        ("Failed", findings.failures), ("Read with care", findings.caveats), ("Does not carry over to", findings.limits)
    ]  # fmt: skip
    return [each for each in made if each[1]]
