"""Put the reports of several hosts on one clock: METRICS section 5.

Reports are the vertices of a graph; whatever two reports saw end together gives an edge.  No collective needs to span
all ranks: stages joined only by their pipeline boundaries are aligned through those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from nsysk3.analysis.sequences import MAX_DRIFT

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# Members of one collective, or both sides of a large send, end up to about this far apart on one and the same host
# (H200, NVLink: 13 to 24 us): more agreement between two clocks than this cannot be had from ends.
END_SPREAD_NS = 25_000
# A slope is believed when it moves the ends of the span by more than the scatter of the points.
_DRIFT_POINTS = 20
# Hosts differ by seconds at most: what fits only when a clock is off by more is two unrelated captures.  An offset as
# large as the date itself is that of a report without a clock, which may be anywhere.
_UTC_IS_NEVER_OFF_BY = 10 * 10**9
_NO_UTC = 10**17


@dataclass(frozen=True)
class Observations:
    """What a pair of reports saw: per instance ``time_ns`` (a's clock) and ``delta_ns`` (b's clock minus a's).

    ``low_ns``/``high_ns`` bound the offset by causality alone (a receive cannot end before its send starts).
    """

    time_ns: Ints
    delta_ns: Ints
    low_ns: float = -np.inf
    high_ns: float = np.inf


@dataclass(frozen=True)
class Edge:
    """One pair of reports: offset (b minus a) at ``origin_ns``, drift, and how well the instances agree with it."""

    a: int
    b: int
    count: int
    offset_ns: float
    drift_ppm: float
    residual_p50_ns: float
    residual_p95_ns: float
    uncertainty_ns: float
    origin_ns: int
    kind: str


@dataclass(frozen=True)
class Clocks:
    """Corrections of the reports of a run.

    Subtract ``offset_ns[r] + drift[r] * (t - origin_ns)`` from a time t of report r.  ``between[a, b]`` is the
    uncertainty of a time difference across two reports (ns; 0 within one, infinite between parts that nothing connects,
    which keep UTC).
    """

    offset_ns: Floats
    drift: Floats
    origin_ns: int
    between: Floats
    edges: tuple[Edge, ...]
    component: Ints

    def corrected(self, times: Ints, report: Ints) -> Ints:
        """Times on the common clock (ns)."""
        moved = self.offset_ns[report] + self.drift[report] * (times - self.origin_ns)
        return times - _whole(moved)

    @property
    def shifts(self) -> Ints:
        """By report, what to subtract from its times to have them on the common clock but for drift (ns)."""
        return _whole(self.offset_ns)

    @property
    def trivial(self) -> bool:
        """True when nothing is to be corrected."""
        return not self.offset_ns.any() and not self.drift.any()


def _whole(ns: Floats) -> Ints:
    """Nearest whole nanosecond, halves always up: rounding halves to even would depend on the size of the offset."""
    return np.floor(ns + 0.5).astype(np.int64)


def align(count: int, observed: Mapping[tuple[int, int], Sequence[Observations]], origin_ns: int) -> Clocks:
    """Solve the clocks of ``count`` reports from what pairs of them observed together.

    The first report of each connected part is its reference.  Offsets and drifts are a robust (iteratively reweighted)
    solution over all edges, so a few bad edges do not move the rest.
    """
    fitted = [edge for pair, seen in sorted(observed.items()) if (edge := fit_edge(*pair, seen, origin_ns)) is not None]
    edges = [edge for edge in fitted if not _UTC_IS_NEVER_OFF_BY < abs(edge.offset_ns) < _NO_UTC]
    component = _components(count, edges)
    offset = _solve(count, edges, component, [edge.offset_ns for edge in edges])
    drift = _solve(count, edges, component, [edge.drift_ppm * 1e-6 for edge in edges])
    misfit = [abs(offset[e.b] - offset[e.a] - e.offset_ns) for e in edges]
    return Clocks(offset, drift, origin_ns, _between(count, edges, misfit), tuple(edges), component)


def fit_edge(a: int, b: int, seen: Sequence[Observations], origin_ns: int) -> Edge | None:
    """The offset between two reports: a robust line through the differences, or the middle of the causal bounds."""
    time = np.concatenate([each.time_ns for each in seen])
    delta = np.concatenate([each.delta_ns for each in seen])
    low, high = max(each.low_ns for each in seen), min(each.high_ns for each in seen)
    if not len(delta):
        if not np.isfinite(low) or not np.isfinite(high) or low > high:
            return None
        half = (high - low) / 2
        return Edge(a, b, 0, low + half, 0.0, 0.0, 0.0, half + END_SPREAD_NS, origin_ns, "causality")
    offset, drift, error = _line((time - origin_ns).astype(np.float64), delta.astype(np.float64))
    residual = np.abs(delta - offset - drift * (time - origin_ns))
    p50, p95 = (float(value) for value in np.percentile(residual, (50, 95)))
    bounded = float(np.clip(offset, low, high)) if low <= high else offset
    uncertainty = END_SPREAD_NS + error + abs(bounded - offset)
    return Edge(a, b, len(delta), bounded, drift * 1e6, p50, p95, uncertainty, origin_ns, "ends")


def _line(x: Floats, y: Floats) -> tuple[float, float, float]:
    """Robust offset at x = 0, slope, and the error of the line over the span of x (two standard errors)."""
    level = float(np.median(y))
    scatter = 1.4826 * float(np.median(np.abs(y - level)))
    flat_error = 2 * 1.2533 * scatter / np.sqrt(len(y))
    span = float(np.ptp(x))
    if len(x) < _DRIFT_POINTS or span == 0:
        return level, 0.0, flat_error
    middle = float(np.median(x))
    slope, centre = 0.0, level
    weight = np.ones(len(x))
    for _ in range(20):
        # Least absolute deviations by reweighting: an outlier counts by its sign, not by its size.
        total = weight.sum()
        mean_x, mean_y = (weight * (x - middle)).sum() / total, (weight * y).sum() / total
        variance = (weight * (x - middle - mean_x) ** 2).sum()
        slope = float((weight * (x - middle - mean_x) * (y - mean_y)).sum() / variance) if variance > 0 else 0.0
        centre = float(mean_y - slope * mean_x)
        weight = 1 / np.maximum(np.abs(y - centre - slope * (x - middle)), 1_000.0)
    if abs(slope) > MAX_DRIFT:  # no clock does that: instances were matched wrongly, and say little of the offset
        return level, 0.0, float(np.ptp(y)) / 2
    left = 1.4826 * float(np.median(np.abs(y - centre - slope * (x - middle))))
    slope_error = 2 * 1.2533 * left / (np.sqrt(len(x)) * max(float(np.std(x)), 1.0))
    if abs(slope) < slope_error or abs(slope) * span < max(left, 2_000.0):
        return level, 0.0, flat_error + min(abs(slope) * span / 2, slope_error * span)
    error = 2 * 1.2533 * left / np.sqrt(len(x)) + slope_error * span / 2
    return centre - slope * middle, slope, error


def _components(count: int, edges: Sequence[Edge]) -> Ints:
    """The smallest report of each connected part, per report."""
    label = np.arange(count)
    for _ in range(count):
        before = label.copy()
        for edge in edges:
            label[[edge.a, edge.b]] = min(label[edge.a], label[edge.b])
        if (label == before).all():
            break
    return label


def _solve(count: int, edges: Sequence[Edge], component: Ints, wanted: Sequence[float]) -> Floats:
    """Values per report whose differences fit the edges; 0 at each part's reference."""
    solution = np.zeros(count)
    free = [report for report in range(count) if component[report] != report]
    if not free or not edges:
        return solution
    column = {report: index for index, report in enumerate(free)}
    design = np.zeros((len(edges), len(free)))
    for row, edge in enumerate(edges):
        for report, sign in ((edge.b, 1.0), (edge.a, -1.0)):
            if report in column:
                design[row, column[report]] += sign
    target = np.array(wanted)
    base = 1 / np.array([edge.uncertainty_ns for edge in edges])
    scale = max(float(np.median(np.abs(target))) * 1e-6, 1e-12)
    weight = base.copy()
    values: Floats = np.zeros(len(free))
    for _ in range(15):
        values[:] = np.linalg.lstsq(design * weight[:, None], target * weight, rcond=None)[0]
        misfit = np.abs(design @ values - target)
        weight = base / np.sqrt(np.maximum(misfit, scale + float(np.median(misfit))))
    solution[free] = values
    return solution


def _between(count: int, edges: Sequence[Edge], misfit: Sequence[float]) -> Floats:
    """Uncertainty across each pair of reports: along the best path, each edge with its own and what it misfits."""
    best = np.full((count, count), np.inf)
    np.fill_diagonal(best, 0.0)
    for edge, off in zip(edges, misfit, strict=True):
        cost = min(best[edge.a, edge.b], edge.uncertainty_ns + off)
        best[edge.a, edge.b] = best[edge.b, edge.a] = cost
    for via in range(count):
        best = np.minimum(best, best[:, via, None] + best[None, via, :])
    return best


def clock_document(clocks: Clocks, names: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """``clock`` of result.json: reports with offset, drift and uncertainty to their reference, and the edges."""
    reports = []
    for index, name in enumerate(names):
        reference = int(clocks.component[index])
        alone = bool((clocks.component == reference).sum() == 1) and len(names) > 1
        reports.append(
            {
                "report": name,
                "reference": names[reference],
                "offset_ns": round(float(clocks.offset_ns[index])),
                "drift_ppm": float(clocks.drift[index] * 1e6),
                "uncertainty_ns": None if alone else round(float(clocks.between[reference, index])),
                "reason": "nothing connects it to another report: it keeps UTC" if alone else None,
            }
        )
    edges = [
        {
            "a": names[edge.a],
            "b": names[edge.b],
            "kind": edge.kind,
            "count": edge.count,
            "offset_ns": round(edge.offset_ns),
            "drift_ppm": edge.drift_ppm,
            "residual_p50_ns": round(edge.residual_p50_ns),
            "residual_p95_ns": round(edge.residual_p95_ns),
            "uncertainty_ns": round(edge.uncertainty_ns),
        }
        for edge in clocks.edges
    ]
    return {"reports": reports, "edges": edges}


def shifted(events: pl.DataFrame, clocks: Clocks) -> pl.DataFrame:
    """Events moved to the common clock by each report's offset.

    Only the constant part is applied: every duration stays what the GPU measured, and drift moves no event of a window
    further than the window's length times a few parts per million.
    """
    if clocks.trivial:
        return events
    offset = pl.Series(clocks.shifts).gather(events["report"])
    times = [name for name in ("start", "end", "api_start", "api_end") if name in events.columns]
    return events.with_columns((pl.col(name) - offset).alias(name) for name in times)
