"""Runs against a base: what may be compared, what changed with its interval, and what must not be compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from nsysk3.compare.model import Comparability, Comparison, Delta, Row
from nsysk3.report.blocks import Block, Column, Figure, Prose, Raw, Section, Table, make_table
from nsysk3.report.catalogue import Catalogue
from nsysk3.report.compare_terminal import caption, change, grouped, samples, span, why_apart
from nsysk3.report.draw.bars import NARROW, WIDE
from nsysk3.report.draw.forest import Change, forest
from nsysk3.report.text import clean, duration, origin, shown

_FIRST = ("headline", "forward", "comm")
_KINDS = {"ns": "ms3", "share": "share", "count": "number"}
_LONG_NS = 1e7


def make_section(texts: Catalogue, identity: str, *blocks: Block | None) -> Section:
    """A section of the comparison page."""
    return Section(
        identity, texts(f"section.{identity}.title"), texts.get(f"section.{identity}.lede", ""),
        tuple(block for block in blocks if block is not None),
    )  # fmt: skip


def verdict(comparison: Comparison, texts: Catalogue) -> Section:
    """The comparison's own two sentences."""
    said = [texts.said(clean(sentence, 3000))[0].replace(" -> ", " → ") for sentence in comparison.verdict]
    return make_section(texts, "verdict", Raw("verdict", {"sentences": said, "long": True}))


def headline(comparison: Comparison, texts: Catalogue) -> Section:
    """The user's own table, the time of the same work, and communication where it compares like with like."""
    found = dict(grouped(comparison))
    section = make_section(
        texts, "headline", *(_group(comparison, texts, group, found[group]) for group in _FIRST if group in found)
    )
    # That a deeper pipeline has fewer layers on a rank explains nothing where no run is deeper.
    same = all(pair.same_layout for pair in comparison.comparability)
    return replace(section, lede=texts("section.headline.lede_same")) if same else section


def comparable(comparison: Comparison, texts: Catalogue) -> Section:
    """Each pair: the summary in words, and every fact with its state."""
    blocks: list[Block] = []
    for pair in comparison.comparability:
        said = tuple(_arrows(*texts.said(clean(line, 1000))) for line in pair.summary)
        blocks.append(Prose(said, f"{clean(pair.base)} → {clean(pair.other)}"))
        blocks.append(_facts(pair, texts))
    return make_section(texts, "comparable", *blocks)


def _arrows(text: str, lang: str) -> tuple[str, str]:
    return text.replace(" -> ", " → "), lang


def _facts(pair: Comparability, texts: Catalogue) -> Raw:
    order = {"differs": 0, "not known": 1, "same": 2}
    rows = [
        {
            "item": texts.said(fact.label)[0],
            "base": fact.base,
            "other": fact.other,
            "status": texts.said(fact.status)[0],
            "muted": fact.status == "same",
        }
        for fact in sorted(pair.facts, key=lambda fact: order[fact.status])
    ]
    columns = (
        Column("item", "text"), Column("base", "code", label=clean(pair.base)),
        Column("other", "code", label=clean(pair.other)), Column("status", "text"),
    )  # fmt: skip
    no = texts("why.no_fact")
    caption_text = f"{texts('tab.facts')}: {clean(pair.base)} → {clean(pair.other)}"
    table = make_table(
        texts, f"facts-{pair.other}", rows, columns, reasons={"base": no, "other": no}, caption=caption_text
    )
    return Raw("details", {"summary": caption_text, "table": table})


def changes(comparison: Comparison, texts: Catalogue) -> Section:
    """Every like-for-like change with its interval on one axis, then the tables behind."""
    groups = [(group, rows) for group, rows in grouped(comparison) if group not in (*_FIRST, "apart")]
    blocks: list[Block | None] = [_forest(comparison, texts)]
    blocks += [_group(comparison, texts, group, rows) for group, rows in groups]
    return make_section(texts, "changes", *blocks)


def apart(comparison: Comparison, texts: Catalogue) -> Section | None:
    """What is not like for like across PP degrees, apart and with the reason."""
    found = dict(grouped(comparison)).get("apart")
    if not found:
        return None
    said = tuple(texts.said(clean(text, 1000)) for text in why_apart(found))
    return make_section(
        texts, "apart", Prose(said, kind="warning") if said else None, _group(comparison, texts, "apart", found)
    )


def _group(comparison: Comparison, texts: Catalogue, group: str, rows: Sequence[Row]) -> Table:
    """One row a metric and scope; with several runs, one block of columns a run."""
    labels = [clean(label, 40) for label in comparison.labels]
    columns = [Column("metric", "metric"), Column("scope", "text")]
    columns += [Column(f"v{i}", "any", label=label) for i, label in enumerate(labels)]
    single = len(comparison.others) == 1
    for i, label in enumerate(labels[1:]):
        of = "" if single else f" {label}"
        columns += [
            Column(f"change{i}", "figure", label=texts("col.change") + of),
            Column(f"span{i}", "figure", label=texts("col.interval") + of),
        ]
        if single:
            columns += [Column(f"n{i}", "figure", label=texts("col.n"))]
        columns += [Column(f"verdict{i}", "text", label=texts("col.verdict") + of)]
    made = [_row(texts, row) for row in rows]
    note = caption(comparison, group, rows, cells=False)  # type: ignore[arg-type]
    table = make_table(texts, f"rows-{group}", made, columns, caption=texts(f"group.{group}"))
    said = f"{texts.said(note)[0]}" if note and group != "apart" else None
    return Table(table.id, table.caption, table.columns, table.rows, table.notes, said)


def _row(texts: Catalogue, row: Row) -> dict[str, Any]:
    cells: dict[str, Any] = {
        "metric": _label_key(row), "scope": texts(f"scope.{row.scope}"), "term_of": _term(row.metric),
        "kind_of": _kind(row), "muted": row.group == "apart", "reason_of": {},
    }  # fmt: skip
    for i, value in enumerate(row.values):
        cells[f"v{i}"] = value.value
        if value.reason:
            cells["reason_of"][f"v{i}"] = value.reason
    for i, delta in enumerate(row.deltas):
        cells |= {
            f"change{i}": change(delta, row.unit), f"span{i}": span(delta, row.unit).replace("..", " … "),
            f"n{i}": samples(row.values), f"verdict{i}": texts.said(delta.verdict)[0],
        }  # fmt: skip
    return cells


def _kind(row: Row) -> str:
    if row.unit == "ns":
        values = [abs(value.value) for value in row.values if value.value]
        return "ms" if values and min(values) >= _LONG_NS else "ms3"
    return _KINDS[row.unit]


def _term(metric: str) -> str | None:
    for start, term in (
        ("allreduce_wait", "wait_transfer"), ("allreduce_transfer", "wait_transfer"), ("allreduce", "allreduce"),
        ("overlap", "overlap"), ("window", "window"), ("forward", "forward"), ("p2p_transfer", "wait_transfer"),
        ("p2p", "p2p"), ("wait_", "wait_transfer"), ("stage_", "stage_wait"), ("bubble", "bubble"),
        ("compute", "compute"), ("fused", "fused"), ("exposed", "exposed"), ("idle", "idle"), ("comm", "communication"),
        ("reduce_scatter", "scatter"), ("all_gather", "scatter"), ("kernel", "kernel_count"),
        ("layer_kernel", "kernel_count"),
    ):  # fmt: skip
        if metric.startswith(start):
            return term
    return None


def _forest(comparison: Comparison, texts: Catalogue) -> Figure | None:
    drawn, listed = [], []
    metrics = list(dict.fromkeys(row.metric for group, rows in grouped(comparison) if group != "apart" for row in rows))
    for i, other in enumerate(comparison.others):
        for metric in metrics:
            row = comparison.row(metric)
            # Shares change in points, which have no place on an axis of relative change.
            if (
                row is None
                or row.unit == "share"
                or row.deltas[i].change_share is None
                or not row.deltas[i].like_for_like
            ):
                continue
            drawn.append(
                _change(texts, row, row.deltas[i], clean(other.label, 40) if len(comparison.others) > 1 else "")
            )
            listed.append(row)
    if not drawn:
        return None
    alt = texts("fig.forest.alt")
    wide, narrow = (forest(drawn, alt, width=width) for width in (WIDE, NARROW))
    table = _group(comparison, texts, "all", list({row.metric: row for row in listed}.values()))
    title = texts("fig.forest.title", base=clean(comparison.base.label, 40))
    return Figure("forest", title, alt, wide, narrow, table, (), (texts("fig.forest.note"),))


def _change(texts: Catalogue, row: Row, delta: Delta, head: str) -> Change:
    label = texts.get(f"col.{_label_key(row)}", row.label) + (
        "" if row.scope == "window" else f", {texts(f'scope.{row.scope}')}"
    )
    values = " → ".join(texts("ui.not_measured") if v.value is None else _text(row, v.value) for v in row.values)
    tip = f"{label}: {values} · {change(delta, row.unit)} · {span(delta, row.unit)} · {texts.said(delta.verdict)[0]}"
    share = delta.change_share or 0.0
    text = f"×{share + 1:,.1f}" if share >= 9.995 else f"{share:+.1%}"
    return Change(label, share, delta.low_share, delta.high_share, _swatch(row, delta), tip, text, head)


def _swatch(row: Row, delta: Delta) -> str:
    if delta.verdict not in ("lower", "higher"):
        return "none"
    return "neutral" if row.better is None else "good" if row.better == delta.verdict else "bad"


def _label_key(row: Row) -> str:
    """Across runs the window is the wall time of the same work."""
    return "wall_ns" if row.metric == "window_ns" else row.metric


def _text(row: Row, value: float) -> str:
    return (
        duration(value)
        if row.unit == "ns"
        else shown(value, "share") + " %"
        if row.unit == "share"
        else shown(value, "number")
    )


def sides(comparison: Comparison, texts: Catalogue) -> Table:
    """What each run was, side by side."""
    rows = [
        {
            **side.model_dump(exclude={"layout", "left_out"}), "layout": side.layout.text,
            "left_out": texts.said("; ".join(side.left_out))[0] or texts("ev.none"), "ranks": side.layout.ranks,
            "simulated": side.simulated and (texts.said(origin(side.simulated))[0] or texts("ui.yes")),
        }
        for side in (comparison.base, *comparison.others)
    ]  # fmt: skip
    columns = (
        Column("label", "text"), Column("layout", "text"), Column("ranks", "count", "identity"),
        Column("stable_ranks", "count", "stable"), Column("forwards", "number", "forward"), Column("tokens", "count"),
        Column("window", "text", "window"), Column("gpu_name", "text"), Column("manifest", "flag"),
        Column("clock_uncertainty_ns", "us", "clock"), Column("left_out", "text", "stable"),
        Column("simulated", "optional"),
    )  # fmt: skip
    no = texts("why.no_fact")
    reasons = dict.fromkeys(("forwards", "tokens", "gpu_name", "clock_uncertainty_ns"), no)
    return make_table(texts, "sides", rows, columns, reasons=reasons)
