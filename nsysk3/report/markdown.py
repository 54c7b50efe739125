"""Markdown for pull requests: one run, or a comparison."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from nsysk3.compare.model import Comparison, Delta, Row
from nsysk3.report.compare_terminal import TITLES, caption, change, grouped, number, samples, scope, span
from nsysk3.report.text import NO_MEDIANS, clean
from nsysk3.report.units import count, milliseconds, percent
from nsysk3.result import Result
from nsysk3.run.words import counted

# What could start an element, a link, a mention or a cell.
_SPECIAL = re.compile(r"([\\`*_\[\]#|~<&@$])")
_ENTITIES = {"<": "&lt;", "&": "&amp;", "@": "@\u200b"}
# Folded away: what only a reader with a question opens.
_OPEN = ("headline", "forward", "comm", "apart")
# Inputs that gave no rank, told one by one; stderr has all.
_PROBLEMS = 3


def render_result(result: Result) -> str:
    """One run: its findings in words, medians over stable ranks, and where the window went."""
    document = result.document
    stable = document.summary["stable_ranks"]
    ranks = counted(len(document.ranks), "rank")
    lines = [f"### nsysk3: {ranks}, {stable} stable, window {text(document.window.used)}", ""]
    if document.simulated:
        said = text(document.simulated)
        # What says so itself needs no word before it.
        own = said.lower().startswith("simulated")
        lines += [f"**{said[0].upper()}{said[1:]}**" if own else f"**Simulated**: {said}", ""]
    problems = [f"**Problem**: {text(problem.message)}" for problem in document.problems]
    more = [f"**Problem**: {len(problems) - _PROBLEMS} more"] if len(problems) > _PROBLEMS else []
    lines += [f"- {problem}" for problem in [*problems[:_PROBLEMS], *more]]
    lines += [f"- {text(sentence)}" for sentence in document.sentences]
    lines += ["", *(_medians(result) if stable else [NO_MEDIANS])]
    lines += ["", *(f"> {text(note)}" for note in document.notes)] if document.notes else []
    return "\n".join(lines) + "\n"


def _medians(result: Result) -> Iterator[str]:
    median = result.document.summary["median"]
    wanted = ("window", "compute", "overlap", "exposed_comm", "idle", "allreduce_total", "p2p_total")
    cells = [(name.replace("_", " "), milliseconds(median.get(f"{name}_ns"))) for name in wanted]
    cells.append(("allreduce count", count(median.get("allreduce_count"))))
    cells.append(("allreduce p50", milliseconds(median.get("allreduce_p50_ns"), 2)))
    yield from _table(["median over stable ranks", "ms"], cells)
    budget = result.tables["budget_summary"].select("group", "bucket", "ns", "share")
    spent = [
        (group, bucket.replace("_", " "), milliseconds(ns), percent(part)) for group, bucket, ns, part in budget.rows()
    ]
    yield from ("", *_table(["where the window went", "", "ms", "%"], spent))


def render_comparison(comparison: Comparison) -> str:
    """Verdict, what differs besides the layout, and the tables; all but the first folded."""
    lines = [
        f"### nsysk3: {' against '.join(text(label) for label in (comparison.labels[-1], comparison.labels[0]))}",
        "",
    ]
    lines += [line for sentence in comparison.verdict for line in (text(sentence, 3000), "")]
    for pair in comparison.comparability:
        lines.append(f"**{text(pair.base)} → {text(pair.other)}**")
        lines += [f"- {text(line, 1000)}" for line in pair.summary] + [""]
    for group, rows in grouped(comparison):
        folded = group not in _OPEN
        title = TITLES[group]
        lines += [f"<details><summary>{title}</summary>", ""] if folded else [f"**{title}**", ""]
        lines += _rows(comparison, rows)
        said = caption(comparison, group, rows)
        lines += ["", f"_{text(said, 2000)}_"] if said else []
        lines += ["", "</details>", ""] if folded else [""]
    lines += [f"> {text(note)}" for note in comparison.notes]
    return "\n".join(lines).rstrip() + "\n"


def _rows(comparison: Comparison, rows: Sequence[Row]) -> Iterator[str]:
    if len(comparison.others) == 1:
        head = ["", *comparison.labels, "change", "95 % interval", "n", "verdict"]
        return _table(head, [_pair(row) for row in rows])
    head = ["", comparison.labels[0]]
    for label in comparison.labels[1:]:
        head += [label, "change"]
    return _table(head, [_ladder(row) for row in rows])


def _pair(row: Row) -> list[str]:
    delta = row.deltas[0]
    values = [number(value.value, row.unit) for value in row.values]
    interval = span(delta, row.unit)
    return [f"{row.label}{scope(row)}", *values, change(delta, row.unit), interval, samples(row.values), delta.verdict]


def _ladder(row: Row) -> list[str]:
    cells = [f"{row.label}{scope(row)}", number(row.values[0].value, row.unit)]
    for value, delta, step in zip(row.values[1:], row.deltas, row.steps, strict=True):
        since = "" if step.base == delta.base else f", from {step.base} {_change(step, row)}"
        cells += [number(value.value, row.unit), _change(delta, row) + since]
    return cells


def _change(delta: Delta, row: Row) -> str:
    doubt = {"no difference shown": " (no difference shown)", "not enough samples": " (few samples)"}
    return change(delta, row.unit) + doubt.get(delta.verdict, "")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(_inline(cell) for cell in head)} |"
    yield f"|{'|'.join([':--', *['--:'] * (len(head) - 1)])}|"
    for row in rows:
        yield f"| {' | '.join(_inline(cell) for cell in row)} |"


def text(value: object, length: int = 400) -> str:
    """Text from a trace or a manifest that stays text in Markdown: no element, link, mention or cell of its own."""
    return re.sub(r"^(?=[-+>])", r"\\", _inline(value, length))


def _inline(value: object, length: int = 400) -> str:
    return _SPECIAL.sub(lambda found: _ENTITIES.get(found[1], "\\" + found[1]), clean(value, length))
