"""Rows that are not like for like whatever the layouts: time that may only have moved, forwards told in two ways."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import polars as pl

from nsysk3.compare.model import Comparison, Delta, Row
from nsysk3.compare.windowed import in_window
from nsysk3.result import Result

# Of the exposed communication of a run, and of a change: more than this without a split decides nothing.
_NOTABLE = 0.1
_SPLIT = ("exposed_wait_ns", "exposed_transfer_ns")
_TOLD_FROM = {
    "marker": "nsysk3's marker", "model range": "the model's range", "layer order": "the order of layers",
    "period": "the period of kernels",
}  # fmt: skip


def forward_sources(result: Result) -> str:
    """What the whole forwards in the windows of stable ranks were told from, in words; empty without any."""
    ranks = result.tables["rank_metrics"].with_row_index("rank").with_columns(pl.col("rank").cast(pl.Int32))
    found = in_window(result.tables.get("forwards"), ranks.filter("stable"), "start_utc_ns", "end_utc_ns")
    if found is None:
        return ""
    names = set(found.filter("whole")["source"].cast(pl.String).to_list())
    return " and ".join(words for name, words in _TOLD_FROM.items() if name in names)


def with_apart(comparison: Comparison, sources: Mapping[str, str]) -> list[Row]:
    """The rows; those are set apart, without a verdict, whose values differ for what nobody measured.

    ``sources``: by label what forward_sources gives.
    """
    return [_set_apart(row, comparison, sources) for row in comparison.rows]


def _set_apart(row: Row, comparison: Comparison, sources: Mapping[str, str]) -> Row:
    said: dict[str, None] = {}

    def judged(delta: Delta) -> Delta:
        if delta.change is None or not (why := [*_forwards(row, delta, sources), *_unresolved(row, delta, comparison)]):
            return delta
        said.update(dict.fromkeys(why))
        reason = "; ".join([*why, *([delta.reason] if delta.reason else [])])
        return delta.model_copy(update={"like_for_like": False, "verdict": "not known", "reason": reason})

    deltas, steps = [judged(each) for each in row.deltas], [judged(each) for each in row.steps]
    if not said:
        return row
    why = "; ".join([*([row.why_apart] if row.why_apart else []), *said])
    return row.model_copy(update={"deltas": deltas, "steps": steps, "group": "apart", "why_apart": why})


def _forwards(row: Row, delta: Delta, sources: Mapping[str, str]) -> Iterator[str]:
    """Forwards of two sources need not hold the same kernels, nor be as many."""
    if row.scope != "window" and sources[delta.base] != sources[delta.other]:
        found: dict[str, list[str]] = {}
        for label, source in sources.items():
            if source:
                found.setdefault(source, []).append(label)
        told = ", ".join(f"from {source} in {', '.join(labels)}" for source, labels in found.items())
        yield f"forwards are told {told}, so they need not begin and end at the same kernels"


def _unresolved(row: Row, delta: Delta, comparison: Comparison) -> Iterator[str]:
    """Exposed communication that could not be split is missing from its parts."""
    if row.metric not in _SPLIT:
        return
    parts, whole = comparison.row("exposed_unresolved_ns", "window"), comparison.row("exposed_comm_ns", "window")
    for label in (delta.base, delta.other):
        part, every = _of(parts, label, comparison), _of(whole, label, comparison)
        if part and every and part >= _NOTABLE * every:
            yield (
                f"{min(part / every, 1):.0%} of the exposed communication of {label} could not be split into wait and "
                "transfer, so time may only have moved"
            )
            return
    moved = comparison.row("exposed_unresolved_ns", row.scope)
    one, two = _of(moved, delta.base, comparison), _of(moved, delta.other, comparison)
    if one is None or two is None or delta.change is None or delta.verdict not in ("lower", "higher"):
        return
    if abs(two - one) > _NOTABLE * abs(delta.change):
        yield (
            f"what could not be split into wait and transfer differs between {delta.base} and {delta.other} by more "
            "than a tenth of the change"
        )


def _of(row: Row | None, label: str, comparison: Comparison) -> float | None:
    return row.values[comparison.labels.index(label)].value if row else None
