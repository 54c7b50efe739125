"""Medians over the repeats of a point."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import median

from nsysk3.sweep.folder import DONE, Folder, Point, Repeat
from nsysk3.sweep.memory import Peak, peak_of
from nsysk3.sweep.record import Record


def summarise(folder: Folder, record: Record | None) -> list[Point]:
    """The points of a sweep: from its repeats where it has any, else those of its summary.csv.

    Memory is that of the fullest GPU once a layout's repeats were over, and the same at every concurrency of it.
    """
    repeats = folder.results()
    if not repeats:
        return sorted(folder.summary(), key=_order)
    groups: dict[tuple[int, int, int, int], list[Repeat]] = defaultdict(list)
    for row in repeats:
        if row.status == DONE and row.input_tps:
            groups[row.pp, row.tp, row.ep, row.concurrency].append(row)
    peaks: dict[str, Peak | None] = {}
    points = []
    for rows in groups.values():
        layout = rows[0].layout
        if layout.name not in peaks:
            peaks[layout.name] = peak_of(folder, layout)
        known = record.of(layout) if record else None
        startups = [start.startup_s for start in known.starts if start.startup_s is not None] if known else []
        points.append(_point(rows, peaks[layout.name], startups[-1] if startups else None))
    return sorted(points, key=_order)


def _order(point: Point) -> tuple[int, ...]:
    return point.concurrency, point.pp, point.tp, point.ep


def _point(rows: Sequence[Repeat], peak: Peak | None, startup_s: float | None) -> Point:
    first = rows[0]
    rates = sorted(row.input_tps for row in rows if row.input_tps is not None)
    middle = float(median(rates))
    return Point(
        first.pp, first.tp, first.ep, first.concurrency, len(rates), middle, rates[0], rates[-1],
        (rates[-1] - rates[0]) / middle if len(rates) > 1 else None, None,
        _median(rows, lambda row: row.ttft_p50_ms), _median(rows, lambda row: row.ttft_p95_ms),
        _median(rows, lambda row: row.ttft_mean_ms), _median(rows, lambda row: row.e2e_p50_ms),
        _median(rows, lambda row: row.output_tps), startup_s,
        peak.used_mib if peak else None, peak.total_mib if peak else None, peak.gpu if peak else None,
    )  # fmt: skip


def _median(rows: Iterable[Repeat], of: Callable[[Repeat], float | None]) -> float | None:
    values = [value for row in rows if (value := of(row)) is not None]
    return float(median(values)) if values else None
