"""What the numbers rest on, and what they do not say."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from nsysk3.report.blocks import Block, Column, Prose, Section, Table, make_table
from nsysk3.report.text import clean
from nsysk3.report.view import View
from nsysk3.run.redact import redact

_NOTES = 200


def evidence(view: View) -> Section:
    """Identity, clocks, partners, classes, notes, diagnostics, versions, and the reasons for what is not measured."""
    document, texts = view.document, view.texts
    notes = tuple(texts.said(clean(note)) for note in document.notes[:_NOTES])
    diagnostics = tuple(
        (clean(f"{report.name}: {line}"), "en") for report in document.reports for line in report.diagnostics
    )
    edges = _clock_edges(view)
    blocks: list[Block | None] = [
        _identity(view),
        _clocks(view),
        edges or Prose(((texts("ev.no_edges"), texts.lang),), kind="note"),
        _matched(view),
        _table(view, "p2p_unmatched", _UNMATCHED),
        _table(view, "unclassified", _UNCLASSIFIED),
        _not_measured(view),
        Prose(notes or ((texts("ev.no_notes"), texts.lang),), texts("ev.notes")),
        Prose(diagnostics[:_NOTES] or ((texts("ev.no_diagnostics"), texts.lang),), texts("ev.diagnostics")),
        _reports(view),
        _problems(view),
        _manifest(view),
    ]
    return view.section("evidence", *blocks)


_UNMATCHED = (
    Column("world_rank", "count", "identity"), Column("send", "text"), Column("reason", "said", "matched"),
    Column("count", "count"), Column("total_ns", "ms"),
)  # fmt: skip
_UNCLASSIFIED = (
    Column("name", "name"), Column("count", "count"), Column("total_ns", "ms"),
    Column("share", "share", "unclassified"),
)  # fmt: skip


def _table(view: View, name: str, columns: tuple[Column, ...]) -> Table | None:
    halves: dict[Any, str] = {True: view.texts("ui.send"), False: view.texts("ui.receive")}
    rows = [
        {**row, "world_rank": view.world.get(row.get("rank", -1)), "send": halves.get(row.get("send"))}
        for row in view.rows(name)
    ]
    return make_table(view.texts, name, rows, columns) if rows else None


def _identity(view: View) -> Table:
    columns = (
        Column("world_rank", "count", "identity"), Column("pp_rank", "count"), Column("tp_rank", "count"),
        Column("ep_rank", "count"), Column("rank_source", "said", "identity"), Column("stable", "flag", "stable"),
        Column("reason", "why", "stable"), Column("coverage", "share", "coverage"), Column("host", "code"),
        Column("gpu_name", "text"), Column("gpu_uuid", "code"), Column("pid", "code"), Column("report", "code"),
        Column("kernel_count", "count"), Column("unclassified_share", "share", "unclassified"),
        Column("dropped_rows", "count"),
    )  # fmt: skip
    rows = []
    for rank in view.document.ranks:
        row = rank.model_dump()
        row["reason"] = view.texts.said(rank.reason)[0] if rank.reason else ""
        rows.append({**row, "muted": not rank.stable})
    return make_table(
        view.texts, "identity", rows, columns, reasons=view.document.not_measured, file="rank_metrics.csv"
    )


def _clocks(view: View) -> Table:
    columns = (
        Column("report", "code"), Column("reference", "code"), Column("offset_ns", "us", "clock"),
        Column("drift_ppm", "ratio", "clock", unit=view.texts("unit.ppm")), Column("uncertainty_ns", "us", "clock"),
    )  # fmt: skip
    rows = [
        {**clock.model_dump(), "reason_of": {"uncertainty_ns": clock.reason or ""}}
        for clock in view.document.clock.reports
    ]
    return make_table(view.texts, "clock", rows, columns)


def _clock_edges(view: View) -> Table | None:
    columns = (
        Column("a", "code"), Column("b", "code"), Column("kind", "text", "clock"), Column("count", "count"),
        Column("offset_ns", "us"), Column("drift_ppm", "ratio", unit=view.texts("unit.ppm")),
        Column("residual_p50_ns", "us"), Column("residual_p95_ns", "us"), Column("uncertainty_ns", "us"),
    )  # fmt: skip
    rows = [edge.model_dump() for edge in view.document.clock.edges]
    return make_table(view.texts, "edges", rows, columns) if rows else None


def _matched(view: View) -> Table | None:
    rows = [
        {**entry.model_dump(), "role": view.texts.get(f"role.{entry.role}", entry.role)}
        for entry in view.document.matched
    ]
    columns = (Column("role", "text"), Column("matched", "count", "matched"), Column("unmatched", "count", "matched"))
    return make_table(view.texts, "matched", rows, columns) if rows else None


def _not_measured(view: View) -> Table | None:
    rows = [{"metric": name, "reason": reason} for name, reason in sorted(view.document.not_measured.items())]
    columns = (Column("metric", "metric_name"), Column("reason", "said", "not_measured"))
    return make_table(view.texts, "not_measured", rows, columns) if rows else None


def _reports(view: View) -> Table:
    columns = (
        Column("name", "code", label=view.texts("col.report")), Column("path", "code"), Column("host", "code"),
        Column("kind", "text"), Column("exporter", "code"), Column("schema_version", "code"),
        Column("clock", "said", "clock"),
    )  # fmt: skip
    return make_table(view.texts, "reports", [report.model_dump() for report in view.document.reports], columns)


def _problems(view: View) -> Table | None:
    rows = [problem.model_dump() for problem in view.document.problems]
    columns = (Column("path", "code"), Column("message", "text"))
    return make_table(view.texts, "problems", rows, columns) if rows else None


def _manifest(view: View) -> Block:
    if not view.document.manifest:
        return Prose(((view.texts("ev.no_manifest"), view.texts.lang),), view.texts("tab.manifest"))
    rows = [
        {"item": key, "value": redact(key, value)}
        for key, value in _flat(view.document.manifest)
        if value not in ("", None)
    ]
    return make_table(view.texts, "manifest", rows, (Column("item", "code"), Column("value", "code")), file="run.json")


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The manifest as dotted names and values; lists stay whole."""
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            yield from _flat(inner, f"{prefix}{key}.")
        elif inner is not None:
            yield f"{prefix}{key}", inner if isinstance(inner, str) else json.dumps(inner, ensure_ascii=False)
