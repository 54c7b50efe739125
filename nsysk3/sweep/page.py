"""A sweep's report as one self-contained page, made of the same parts as the report of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from nsysk3 import __version__
from nsysk3.errors import MissingToolError
from nsysk3.sweep.findings import Findings, as_printed
from nsysk3.sweep.folder import Point
from nsysk3.sweep.matrix import Layout
from nsysk3.sweep.record import Record
from nsysk3.sweep.tables import TextTable, all_tables, change, lists, measured, over_words, rate, seconds, verdict

if TYPE_CHECKING:
    from nsysk3.report.blocks import Block, Figure, Section, Table
    from nsysk3.report.catalogue import Catalogue

_LEDES = {
    "ladder": "Medians over the repeats that count; changes are against the shallowest layout at the same concurrency.",
    "steps": "What each deepening of the pipeline brings by itself.",
    "memory": "The fullest GPU decides what still fits.",
    "pressure": "Whether more requests at once bring throughput, or only wait.",
    "domains": "What the links give the ranks of a stage, and two neighbouring stages.",
}
_MADE_BY = (
    "Made by nsysk3 {version}. Every number comes from the tables of the sweep's folder; this page loads nothing from "
    "anywhere."
)


def render_page(findings: Findings, record: Record, more: Sequence[TextTable] = ()) -> str:
    """The page; it runs nothing but its own script and loads nothing.

    Raises MissingToolError where what draws pages is not installed, as on hosts that only launch.
    """
    try:
        from nsysk3.report.blocks import Prose, Raw, Section
        from nsysk3.report.catalogue import catalogue
        from nsysk3.report.html import render_page as render
    except ImportError as error:
        raise MissingToolError(f"a page needs all of nsysk3 ({error}); --format md needs less") from error

    texts = catalogue("en")
    sections = [Section("verdict", "Verdict", "", (Raw("verdict", {"sentences": verdict(findings), "long": True}),))]
    for table in (*all_tables(findings, record), *more):
        sections.append(_section(texts, table, findings))
    for title, said in lists(findings):
        identity = title.lower().replace(" ", "-")
        sections.append(Section(identity, title, "", (Prose(tuple((text, "en") for text in said)),)))
    return render(
        "report.html.j2", "nsysk3 sweep", "en", sections, headline=record.run_id or "sweep",
        facts=_facts(record, findings), strips=[], simulated=None, version=__version__,
        made_by=_MADE_BY.format(version=__version__),
    )  # fmt: skip


def _facts(record: Record, findings: Findings) -> list[tuple[str, str]]:
    say = record.settings
    gpus = sorted({str(each.facts["gpu"]) for each in record.layouts if each.facts.get("gpu")})
    pairs = (
        ("Load", measured(record, findings)), ("Model", say.get("model.path")), ("Engine", say.get("server.engine")),
        ("Image", say.get("container.image")), ("Hosts", ", ".join(map(str, say.get("cluster.hosts") or ()))),
        ("GPUs", ", ".join(gpus)), ("Measured", (record.created or "")[:10]),
    )  # fmt: skip
    return [(label, str(value)) for label, value in pairs if value]


def _section(texts: Catalogue, table: TextTable, findings: Findings) -> Section:
    from nsysk3.report.blocks import Section

    shown = _table(texts, table)
    blocks: list[Block] = []
    if table.id == "ladder":
        blocks += [
            _ladder(texts, findings, "tps", "Input tokens a second", "tok/s", lambda p: p.input_tps, rate, shown),
            _ladder(
                texts, findings, "ttft", "Median time to first token", "s",
                lambda p: None if p.ttft_p50_ms is None else as_printed(p.ttft_p50_ms)[0] / 1000,
                lambda value: seconds(value * 1000), shown,
            ),
        ]  # fmt: skip
        blocks = [block for block in blocks if block]
    return Section(table.id, table.title, _LEDES.get(table.id, ""), (*blocks, shown))


def _table(texts: Catalogue, table: TextTable) -> Table:
    from dataclasses import replace

    from nsysk3.report.blocks import Column, make_table

    keys = [f"c{place}" for place in range(len(table.columns))]
    columns = [
        Column(key, "figure" if place else "text", label=name or "outcome")
        for place, (key, name) in enumerate(zip(keys, table.columns, strict=True))
    ]
    rows = [dict(zip(keys, row, strict=True)) for row in table.rows]
    made = make_table(texts, table.id, rows, columns, caption=table.title)
    return replace(made, more="; ".join(table.notes) or None)


def _ladder(
    texts: Catalogue,
    findings: Findings,
    identity: str,
    title: str,
    unit: str,
    of: Callable[[Point], float | None],
    show: Callable[[float], str],
    table: Table,
) -> Figure:
    from dataclasses import replace

    from nsysk3.report.blocks import Figure, Legend
    from nsysk3.report.draw.bars import NARROW, WIDE, Bar, Part, bars

    rows: list[Bar] = []
    level: int | None = None
    for rung in findings.rungs:
        value = of(rung.point)
        if value is None:
            continue
        layout = rung.point.layout
        relative = rung.tps_change if identity == "tps" else rung.ttft_change
        tip = f"{layout.label}, C={rung.point.concurrency}: {show(value)}"
        tip += "" if relative is None else f", {change(relative)} against {findings.base.label}"
        part = Part(value, _swatch(layout, findings), tip)
        gap = bool(rows) and rung.point.concurrency != level
        level = rung.point.concurrency
        name = f"{layout.label}, C={rung.point.concurrency}"
        rows.append(Bar(name, (part,), strong=layout == findings.knee.layout, gap=gap, end=show(value)))
    top = max((part.value for row in rows for part in row.parts), default=1.0)
    alt = f"{title}: a bar for each layout and concurrency. The table below has the numbers."
    wide, narrow = (bars(rows, alt, width=width, top=top, unit=unit) for width in (WIDE, NARROW))
    words = {
        "b-compute": "measured",
        "good": "the knee" if findings.knee.kind == "knee" else "the fastest",
        "bad": over_words(findings),
    }
    drawn = {_swatch(rung.point.layout, findings) for rung in findings.rungs}
    legend = [Legend(swatch, text) for swatch, text in words.items() if swatch in drawn]
    behind = replace(table, id=f"{identity}-{table.id}")
    return Figure(identity, title, alt, wide, narrow, behind, tuple(legend))


def _swatch(layout: Layout, findings: Findings) -> str:
    if layout == findings.knee.layout:
        return "good"
    return "bad" if layout in findings.knee.over else "b-compute"
