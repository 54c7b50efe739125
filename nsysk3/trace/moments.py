"""When reports were recorded: in words, and whether at the same time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nsysk3.run.words import first_of
from nsysk3.trace.facts import ReportFacts

# From how many seconds on, and how many each is.
_UNITS = ((172_800, 86_400, "d"), (7_200, 3_600, "h"), (120, 60, "min"), (1, 1, "s"))
_SHOWN = 3


def span_in_words(ns: float) -> str:
    """``98 s``, ``5 min``, ``3 h``, ``2 d``; below a second ``0.3 s``, or ``2 ms``."""
    seconds = ns / 1e9
    for least, size, unit in _UNITS:
        if seconds >= least:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s" if seconds >= 0.1 else f"{max(seconds * 1e3, 1):.0f} ms"


def recorded_apart(reports: Sequence[ReportFacts]) -> list[str]:
    """A note of the reports of one host between which nothing was recorded, though a run is recorded all at once."""
    pairs = list(_apart(reports))
    if not pairs:
        return []
    return [
        f"{first_of(pairs, _SHOWN)} were not recorded at the same time: if these are different runs, analyse each alone"
    ]


def _apart(reports: Sequence[ReportFacts]) -> Iterator[str]:
    by_host: dict[str, list[tuple[int, int, str]]] = {}
    for report in reports:
        if report.recorded_utc_ns:
            by_host.setdefault(report.host, []).append((*report.recorded_utc_ns, report.name))
    for spans in by_host.values():
        spans.sort()
        _, last, before = spans[0]
        for begin, end, name in spans[1:]:
            if begin > last:
                yield f"{before} and {name} ({span_in_words(begin - last)} apart)"
            if end > last:
                last, before = end, name
