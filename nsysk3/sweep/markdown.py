"""A sweep's report as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from nsysk3.report.text import clean
from nsysk3.sweep.findings import Findings
from nsysk3.sweep.record import Record
from nsysk3.sweep.tables import TextTable, all_tables, headline, lists, verdict

# What could start an element, a link, a mention or a cell.
_SPECIAL = re.compile(r"([\\`*_\[\]#|<&@$])")
_ENTITIES = {"<": "&lt;", "&": "&amp;", "@": "@\u200b"}


def render_markdown(findings: Findings, record: Record, more: Sequence[TextTable] = ()) -> str:
    """Verdict, tables (``more`` after the sweep's own) and what to mind."""
    lines = [f"### {_text(headline(record, findings))}", ""]
    for sentence in verdict(findings):
        lines += [_text(sentence), ""]
    for table in (*all_tables(findings, record), *more):
        lines += [f"**{_text(table.title)}**", "", *_table(table), ""]
        lines += [line for note in table.notes for line in (f"_{_text(note)}_", "")]
    for title, texts in lists(findings):
        lines += [f"**{title}**", "", *(f"- {_text(text)}" for text in texts), ""]
    return "\n".join(lines).rstrip() + "\n"


def _table(table: TextTable) -> Iterator[str]:
    yield f"| {' | '.join(_text(name) for name in table.columns)} |"
    yield f"|{'|'.join([':--', *['--:'] * (len(table.columns) - 1)])}|"
    for row in table.rows:
        yield f"| {' | '.join(_text(cell) for cell in row)} |"


def _text(value: str) -> str:
    """Text that stays text, a minus at its start too."""
    plain = _SPECIAL.sub(lambda found: _ENTITIES.get(found[1], "\\" + found[1]), clean(value, 2000))
    return re.sub(r"^(?=[-+>] )", r"\\", plain)
