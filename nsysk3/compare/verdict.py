"""A comparison in two sentences: what changed, with numbers, and what limits that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nsysk3.compare.comparability import SAME_CAPTURE
from nsysk3.compare.model import Comparison, Delta, Layout, Row, RunSide, Scope, Unit
from nsysk3.compare.replaced import FUSED, fused, takers, told
from nsysk3.compare.samples import RunSamples
from nsysk3.compare.spoken import NO_STABLE, SHOWN_RANKS
from nsysk3.run.words import counted, ranks_in_words

_MOSTLY = 0.5
_MUCH = 0.2
_HARDLY_ANY = 0.01
_NEARLY_ALL = 0.6
_TOLD_OF_REPLACED = ("allreduce_count", "exposed_comm_ns", "fused_ns", "kernel_count")
_WALL_SCOPES: tuple[Scope, ...] = ("1k_tokens", "forward")
_TOLD = ("allreduce_count", "allreduce_total_ns", "allreduce_p50_ns", "overlap_ratio")


def verdict(comparison: Comparison) -> list[str]:
    """Two sentences."""
    return [_what_changed(comparison), _limits(comparison)]


def _what_changed(comparison: Comparison) -> str:
    replaced = takers(comparison)
    rows = _rows_of_replaced(comparison) if replaced else _main_rows(comparison)
    parts = [*told(comparison, replaced), *(text for row in rows if (text := _told(row)))]
    runs = _runs(comparison)
    if not parts:
        return f"{runs}: nothing could be compared."
    several = [f"changes are {comparison.labels[-1]} against {comparison.base.label}"] if comparison.ladder else []
    who = "; ".join(["median over stable ranks", *several, *_without_stable(comparison)])
    return f"{runs}, per active rank ({who}): {'; '.join(parts)}."


def _without_stable(comparison: Comparison) -> list[str]:
    """Which run has no stable rank of which stages: said once, for it is true of every row."""
    parts = (part for row in comparison.rows for part in (row.note or "").split("; "))
    return list(dict.fromkeys(part for part in parts if NO_STABLE in part))


def _runs(comparison: Comparison) -> str:
    if {side.layout.text for side in comparison.others} == {comparison.base.layout.text}:
        # What all have is told once.
        return f"{' -> '.join(comparison.labels)} at {comparison.base.layout.text}"
    return " -> ".join(_named(side) for side in (comparison.base, *comparison.others))


def _named(side: RunSide) -> str:
    return side.layout.text if side.layout.text.startswith(side.label) else f"{side.label} ({side.layout.text})"


def _main_rows(comparison: Comparison) -> Iterator[Row]:
    """The user's table as it is shown, and the wall time of the same work where forwards tell it."""
    for metric in _TOLD:
        row = comparison.row(metric, "window")
        if row and (any(value.value for value in row.values) or metric == "overlap_ratio"):
            yield row
    yield from _wall_time(comparison)
    row = comparison.row("stage_wait_ns", "window")
    if row and any(value.value for value in row.values):
        yield row


def _rows_of_replaced(comparison: Comparison) -> Iterator[Row]:
    """Where other kernels do what AllReduce did, its time says little: what all of them cost does."""
    for metric in _TOLD_OF_REPLACED:
        row = comparison.row(metric)
        if row and any(value.value for value in row.values):
            yield row
    yield from _wall_time(comparison)
    row = comparison.row("forward_p50_ns")
    # Of the same work too, and where there are enough forwards with the interval that wall time has not.
    if row and row.deltas[-1].low_share is not None:
        yield row


def _wall_time(comparison: Comparison) -> Iterator[Row]:
    for scope in _WALL_SCOPES:
        row = comparison.row("window_ns", scope)
        if row and all(value.value is not None for value in row.values):
            yield row
            break


def _told(row: Row) -> str | None:
    if any(value.value is None for value in row.values) or row.doubted:
        return None
    where = {"window": "", "forward": " per forward", "1k_tokens": " per 1,000 tokens"}[row.scope]
    numbers = " -> ".join(shown(value.value, row.unit) for value in row.values)
    # A single change is told; of a ladder the last against the base.
    said = [*_change(row.deltas[-1], row.unit)]
    # The limits tell of fused kernels, the beginning of the sentence of stages without a stable rank.
    said += [part for part in (row.note or "").split("; ") if part and part != FUSED and NO_STABLE not in part]
    return f"{row.label}{where} {numbers}" + (f" ({', '.join(said)})" if said else "")


def _change(delta: Delta, unit: Unit) -> Iterator[str]:
    """The change as the tables have it, and its interval or that there is none."""
    points = unit == "share" or delta.change_share is None
    change = delta.change if points else delta.change_share
    if change is None:
        return
    yield _signed(change, unit, points)
    points = points or delta.low_share is None
    low, high = (delta.low, delta.high) if points else (delta.low_share, delta.high_share)
    if low is not None and high is not None:
        yield f"95 % interval {_signed(low, unit, points)} to {_signed(high, unit, points)}"
    if delta.verdict == "no difference shown":
        yield "no difference shown"
    elif delta.verdict == "not enough samples":
        yield "too few samples for an interval"


def _signed(value: float, unit: Unit, points: bool) -> str:
    if not points:
        return f"{value:+.1%}"
    return f"{value * 100:+.1f} pt" if unit == "share" else f"{'+' if value > 0 else ''}{shown(value, unit)}"


def _limits(comparison: Comparison) -> str:
    sides = (comparison.base, *comparison.others)
    parts = [limit for side in sides for limit in _rank_limits(side)] + _without_stable(comparison)
    parts += [*_comparability_limits(comparison), *_work_limits(comparison), *_layout_limits(comparison)]
    if any(side.simulated for side in sides):
        which = "all runs are" if all(side.simulated for side in sides) else "some runs are"
        parts.insert(0, f"{which} simulated")
    return f"Limits: {'; '.join(dict.fromkeys(parts))}." if parts else "Limits: none that the manifests show."


def _rank_limits(side: RunSide) -> Iterator[str]:
    """Ranks of a run that its numbers do not stand for: those that no trace holds, and those that are not stable."""
    every = (side.layout.pp or 0) * (side.layout.tp or 0)
    if side.layout.ranks < every:
        yield f"the traces of {side.label} hold {side.layout.ranks} of {every} ranks"
    if side.left_out:
        found = (entry.removeprefix("rank ").partition(": ") for entry in side.left_out)
        pairs = sorted((int(world), reason) for world, _, reason in found)
        reasons = list(dict.fromkeys(reason.replace("; ", ", ") for _, reason in pairs))
        which = ranks_in_words([world for world, _ in pairs], most=SHOWN_RANKS)
        why = f"{which}: {reasons[0]}" if len(reasons) == 1 else f"{which}, the first: {reasons[0]}"
        yield f"{side.label}: {len(pairs)} of {counted(side.layout.ranks, 'rank')} not stable and left out ({why})"


def _comparability_limits(comparison: Comparison) -> Iterator[str]:
    for pair in (*comparison.comparability, *(step.comparability for step in comparison.ladder)):
        if SAME_CAPTURE in pair.summary:
            yield f"{pair.base} and {pair.other} are the same capture" if comparison.ladder else SAME_CAPTURE
    for pair in comparison.comparability:
        if pair.differences and pair.single_variable is False:
            yield f"{pair.base} -> {pair.other} is not a single-variable comparison ({', '.join(pair.differences[:4])})"
    bare = [side.label for side in (comparison.base, *comparison.others) if not side.manifest]
    if bare:
        yield f"no manifest for {', '.join(bare)}, so whether the same work was run is not known"
    elif unknown := dict.fromkeys(label for pair in comparison.comparability for label in pair.unknown):
        yield f"not known to be the same: {', '.join(unknown)}"


def _work_limits(comparison: Comparison) -> Iterator[str]:
    sides = (comparison.base, *comparison.others)
    counts = [side.forwards for side in sides]
    per_forward = comparison.row("window_ns", "forward")
    if per_forward and per_forward.doubted:
        yield per_forward.why_apart or ""
    elif None in counts:
        yield "how many forwards the windows hold is not known, so totals compare only if they hold the same work"
    elif len(set(counts)) > 1:
        shown = ", ".join(f"{side.label} {side.forwards:g}" for side in sides)
        yield f"the windows hold different numbers of forwards ({shown}): use the rows per forward"
    if fused(comparison):
        yield FUSED
    if all(pair.same_layout for pair in comparison.comparability):
        # An interval over the forwards of one run says nothing of the next start of the same server.
        yield "one run of each, so how much runs of the same settings differ is not known"


def _layout_limits(comparison: Comparison) -> Iterator[str]:
    base = comparison.base.layout
    last = comparison.others[-1]
    if base.pp and _deeper(base, last.layout):
        part = base.pp / (last.layout.pp or 1)
        if not _of_last(comparison, "allreduce_count"):
            yield f"a rank of {last.label} makes no AllReduce at all (TP{last.layout.tp or '?'})"
        else:
            yield (
                f"a rank of {last.label} holds about {part:.3g} of the layers of a rank of {comparison.base.label}, so "
                f"{part - 1:+.1%} of its AllReduce calls is the layout itself and other ranks make the rest"
            )
        total = _of_last(comparison, "p2p_total_ns")
        waits = [_of_last(comparison, f"wait_{side}_ns") for side in ("upstream", "downstream")]
        known = [wait for wait in waits if wait is not None]
        share = sum(known) / total if total and len(known) == 2 else None
        if share is not None and share > _MUCH:
            yield f"{share:.0%} of the Send/Recv time of {last.label} is Stage wait, so it does not measure the network"


def _of_last(comparison: Comparison, metric: str) -> float | None:
    row = comparison.row(metric, "window")
    return row.values[-1].value if row else None


def _deeper(base: Layout, other: Layout) -> bool:
    return base.pp is not None and other.pp is not None and other.pp > base.pp


def notes(sides: Sequence[RunSide]) -> list[str]:
    """What a reader of any row should know."""
    found = [f"{side.label}: {reason}" for side in sides for reason in _left_out(side)]
    found += [f"{side.label}: window {side.window}: {side.window_reason}" for side in sides if side.window_reason]
    return found


def _left_out(side: RunSide) -> list[str]:
    if not side.left_out:
        return []
    more = f" and {len(side.left_out) - 3} more" if len(side.left_out) > 3 else ""
    return [f"not in medians: {'; '.join(side.left_out[:3])}{more}"]


def row_note(metric: str, scope: Scope, runs: Sequence[RunSamples], names: Sequence[str]) -> str | None:
    """What stands behind a number that is easily misread."""
    found = []
    for name, run in zip(names, runs, strict=True):
        if scope == "window" and run.without_stable:
            found.append(f"{name}: {run.without_stable}")
        held = run.held if metric.startswith("allreduce_") and scope != "window" else None
        if held is not None and held < _NEARLY_ALL:
            found.append(f"whole forwards hold only {held:.0%} of the AllReduce calls of {name}")
        some = metric == "overlap_ratio" and (run.share_of("overlap_ns", "comm_ns") or 0) > _HARDLY_ANY
        waiting = run.share_of("overlap_wait_ns", "overlap_ns") if some else None
        if waiting is not None and waiting > _MOSTLY:
            found.append(f"{waiting:.0%} of the overlap of {name} is waiting beside compute and hides no transfer")
    return "; ".join(found) or None


def shown(value: float | None, unit: Unit) -> str:
    """A number as prose has it."""
    if value is None:
        return "not known"
    if unit == "ns":
        return f"{value / 1e6:,.{decimals(value)}f} ms"
    return f"{value:,.4g}" if unit == "count" and value % 1 else f"{value:,.0f}" if unit == "count" else f"{value:.1%}"


def decimals(ns: float) -> int:
    """Of a time in ms: what is less than a tenth of one has digits left."""
    return 1 if abs(ns) >= 1e7 else 3 if 0 < abs(ns) < 1e5 else 2
