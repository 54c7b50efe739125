"""A comparison as tables for a terminal of 100 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nsysk3.compare.derived import NOT_MEASURED
from nsysk3.compare.model import Comparison, Delta, Group, Row, Unit, Value
from nsysk3.compare.samples import LAYERS, WHOLE
from nsysk3.compare.spoken import NO_WALL_TIME
from nsysk3.compare.statistics import ONE_RUN
from nsysk3.compare.verdict import decimals
from nsysk3.report.text import clean
from nsysk3.report.units import count, milliseconds, percent

TITLES: dict[Group, str] = {
    "headline": "AllReduce per active rank",
    "forward": "Time of the same work",
    "comm": "Communication",
    "allreduce": "Inside AllReduce",
    "scatter": "ReduceScatter and AllGather (waiting included)",
    "p2p": "Pipeline Send/Recv (waiting included)",
    "stage": "Stage wait and bubble",
    "time": "Where the window went",
    "launches": "Kernel launches",
    "apart": "NOT like for like",
}
# Runs in one table of a ladder, base included.
_ACROSS = 5
_LABEL = 34
_HEAD = 12
# From here on a relative change reads better as a factor.
_TIMES = 9.995
_PER = {"": "", " / forward": " per forward", " / 1k tokens": " per 1,000 tokens"}


def print_comparison(comparison: Comparison, out: Console) -> None:
    """Verdict, comparability and one table a group of metrics."""
    for sentence in comparison.verdict:
        out.print(Text(clean(sentence, 3000)))
    out.print()
    for pair in comparison.comparability:
        out.print(Text(f"{clean(pair.base)} -> {clean(pair.other)}", style="bold"))
        for line in pair.summary:
            out.print(Text(f"- {clean(line, 1000)}"))
    out.print()
    if comparison.ladder:
        out.print(Text(f"below a value: change against {clean(comparison.base.label)}, then against the run before it"))
        out.print(Text("v lower, ^ higher, = no difference shown, ? nothing can be said"))
    for group, rows in grouped(comparison):
        out.print(Text(TITLES[group], style="bold"))
        for table in _tables(comparison, rows):
            out.print(table)
        if said := caption(comparison, group, rows):
            out.print(Text(said))
        out.print()
    for note in comparison.notes:
        out.print(Text(f"note: {clean(note, 1000)}"))


def grouped(comparison: Comparison) -> Iterator[tuple[Group, list[Row]]]:
    """Groups with the rows worth showing, in order.

    The first groups are shown per window and per forward; of the others only one row a metric, per forward where every
    run has it.  A metric that is nothing on every run is left out, and so is the bubble where no run has a pipeline:
    there it is the idle time once more.
    """
    staged = any(side.layout.pp != 1 for side in (comparison.base, *comparison.others))
    for group in TITLES:
        if group == "stage" and not staged:
            continue
        rows = [row for row in comparison.rows if row.group == group]
        if group not in ("headline", "forward"):
            rows = [row for row in rows if row == comparison.row(row.metric) and any(v.value for v in row.values)]
        rows = [row for row in rows if any(value.value is not None or _unlike(value) for value in row.values)]
        if rows:
            yield group, rows


def _tables(comparison: Comparison, rows: Sequence[Row]) -> Iterator[Table]:
    if len(comparison.others) == 1:
        yield _pair_table(comparison, rows)
        return
    step = _ACROSS - 1
    for at in range(0, len(comparison.others), step):
        yield _ladder_table(comparison, rows, range(at, min(at + step, len(comparison.others))))


def _table(names: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for index, name in enumerate(names):
        table.add_column(Text(name), justify="right" if index else "left", no_wrap=index > 0)
    return table


def _pair_table(comparison: Comparison, rows: Sequence[Row]) -> Table:
    table = _table(["", *heads(comparison.labels), "change", "95 % interval", "n", "verdict"])
    for row in rows:
        delta = row.deltas[0]
        table.add_row(
            Text(_cut(f"{row.label}{scope(row)}", _LABEL)), *(number(value.value, row.unit) for value in row.values),
            change(delta, row.unit), span(delta, row.unit), samples(row.values), short(delta),
        )  # fmt: skip
    return table


def _ladder_table(comparison: Comparison, rows: Sequence[Row], chosen: range) -> Table:
    every = heads(comparison.labels)
    names = [every[0], *(every[i + 1] for i in chosen)]
    table = _table(["", *names])
    width = _LABEL - 8 if len(names) == _ACROSS else _LABEL
    for row in rows:
        cells = [number(row.values[0].value, row.unit)]
        for index in chosen:
            # The first of the others comes after the base itself.
            pairs = [row.deltas[index], *([row.steps[index]] if index else [])]
            changes = [f"{change(delta, row.unit)} {mark(delta)}" for delta in pairs]
            cells.append("\n".join([f"{number(row.values[index + 1].value, row.unit)}  ", *changes]))
        table.add_row(Text(_cut(f"{row.label}{scope(row)}", width)), *cells)
    return table


def caption(comparison: Comparison, group: Group, rows: Sequence[Row], *, cells: bool = True) -> str | None:
    """What must be read with these rows, and why others of the group, or ``cells`` in them, are missing."""
    said = why_apart(rows) + [clean(row.note) for row in rows if row.note]
    if any(value.low is not None and value.reason for row in rows for value in row.values):
        said.append("intervals from fewer than 8 ranks or forwards are rough")
    once = [row.label for row in rows if any(value.reason == ONE_RUN for value in row.values)]
    if once:
        said.append(f"{', '.join(dict.fromkeys(once))}: {ONE_RUN}")
    layered = [row.label for row in rows if row.samples == LAYERS and row.unit == "ns"]
    if layered:
        said.append(f"kernels that belong to a layer, no others: {', '.join(layered)}")
    spans = [f"{row.label}{scope(row)}" for row in rows if row.samples == WHOLE]
    if spans:
        said.append(f"{spans[0]}: from the first start to the last end of whole forwards, windows hold others too")
    return "; ".join(dict.fromkeys([*said, *_missing(comparison, group, rows, cells)])) or None


def why_apart(rows: Sequence[Row]) -> list[str]:
    """Why rows are not like for like; where not all for one reason, which are for which."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row.why_apart:
            found.setdefault(row.why_apart, []).append(row.label)
    if len(found) == 1:
        return list(found)
    return [f"{', '.join(dict.fromkeys(labels))}: {why}" for why, labels in found.items()]


def _missing(comparison: Comparison, group: Group, rows: Sequence[Row], cells: bool) -> Iterator[str]:
    """Why numbers of the group are not there, each reason once; with ``cells`` those of single runs in ``rows`` too."""
    mine = [row for row in comparison.rows if row.group == group]
    having = {row.metric for row in mine if any(value.value is not None for value in row.values)}
    told = {row.scope for row in mine if any(value.value is not None for value in row.values)}
    shown = {row.metric for row in rows}
    found: dict[tuple[str, str], list[str]] = {}
    for row in mine:
        none = all(value.value is None for value in row.values)
        if (row in rows and not cells) or (row not in rows and row.metric in having - shown):
            continue
        if row.scope == "1k_tokens" and group not in ("headline", "forward"):
            continue  # not shown there at all
        if why := _why(comparison, row, none):
            per = "" if none and row.scope != "window" and row.scope not in told else row.label
            found.setdefault((scope(row), why), []).append(per)
    for (per, why), labels in found.items():
        yield (f"no {', '.join(labels)}{per}" if all(labels) else f"nothing{_PER[per]}") + why


def _why(comparison: Comparison, row: Row, none: bool) -> str | None:
    """``: reason`` where it is that of all runs, else `` of RUN: reason`` of each."""
    reasons: dict[str, list[str]] = {}
    for label, value in zip(comparison.labels, row.values, strict=True):
        # That one run did nothing of a kind in its window is what its dash says.
        if value.value is None and (none or row.scope != "window" or _unlike(value)):
            reasons.setdefault(clean(value.reason or NOT_MEASURED), []).append(clean(label))
    if not reasons:
        return None
    if [len(labels) for labels in reasons.values()] == [len(row.values)]:
        return f": {next(iter(reasons))}"
    return " " + "; ".join(f"of {', '.join(labels)}: {reason}" for reason, labels in reasons.items())


def _unlike(value: Value) -> bool:
    """Whether the windows of a run are too unlike for a number of all of it: no dash says that."""
    return NO_WALL_TIME in (value.reason or "")


def scope(row: Row) -> str:
    """What a row is per, nothing for the window as a whole."""
    return {"window": "", "forward": " / forward", "1k_tokens": " / 1k tokens"}[row.scope]


def number(value: float | None, unit: Unit) -> str:
    """A value with its unit, a dash for null."""
    if value is None:
        return "-"
    if unit == "ns":
        return f"{milliseconds(value, decimals(value))} ms"
    if unit == "share":
        return f"{percent(value)} %"
    return count(value) if float(value).is_integer() or abs(value) >= 1000 else f"{value:,.3g}"


def change(delta: Delta, unit: Unit) -> str:
    """The relative change; the absolute one where the base is 0, and in percentage points of shares."""
    if unit == "share" or delta.change_share is None:
        return _signed(delta.change, unit)
    return f"x{delta.change_share + 1:,.1f}" if delta.change_share >= _TIMES else f"{delta.change_share:+.1%}"


def span(delta: Delta, unit: Unit) -> str:
    """The interval of what ``change`` gives; of the absolute change where the relative one has none."""
    if unit == "share" or delta.change_share is None or delta.low_share is None or delta.high_share is None:
        low, high = _signed(delta.low, unit), _signed(delta.high, unit)
        return "-" if delta.low is None else f"{low.removesuffix(' ms').removesuffix(' pt')}..{high}"
    if delta.change_share >= _TIMES:
        return f"x{delta.low_share + 1:,.1f}..{delta.high_share + 1:,.1f}"
    return f"{delta.low_share:+.1%}..{delta.high_share:+.1%}"


def _signed(value: float | None, unit: Unit) -> str:
    if value is None:
        return "-"
    if unit == "share":
        return f"{value * 100:+.1f} pt"
    return f"{'+' if value > 0 else ''}{number(value, unit)}"


def samples(values: Sequence[Value]) -> str:
    """Samples of each side."""
    return "/".join(str(value.n) for value in values)


_SHORT = {"no difference shown": "none shown", "not enough samples": "few samples", "not known": "-"}


def short(delta: Delta) -> str:
    """The verdict in a word or two."""
    return _SHORT.get(delta.verdict, delta.verdict)


def mark(delta: Delta) -> str:
    """The verdict in a sign: v lower, ^ higher, = no difference shown, ? nothing can be said."""
    return {"lower": "v", "higher": "^", "no difference shown": "="}.get(delta.verdict, "?")


def heads(labels: Sequence[str]) -> list[str]:
    """Labels cut to the width of a column: at the end, those that this makes equal at their beginning."""
    cut = [_cut(label, _HEAD) for label in labels]
    return [
        short if cut.count(short) == 1 else f"…{clean(label)[1 - _HEAD :]}"
        for label, short in zip(labels, cut, strict=True)
    ]


def _cut(text: str, width: int) -> str:
    shown = clean(text)
    return shown if len(shown) <= width else shown[: width - 1] + "…"
