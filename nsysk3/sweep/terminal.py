"""A sweep's report as tables for a terminal of 100 columns; plain text when piped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nsysk3.report.text import clean
from nsysk3.sweep.findings import Findings
from nsysk3.sweep.record import Record
from nsysk3.sweep.tables import TextTable, all_tables, headline, lists, verdict

WIDTH = 100
_LONGEST = 2000


def console(file: IO[str] | None = None) -> Console:
    """A console that wraps at 100 columns where the output is not a terminal."""
    made = Console(file=file, highlight=False)
    return made if made.is_terminal else Console(file=file, highlight=False, width=WIDTH)


def print_report(findings: Findings, record: Record, out: Console, more: Sequence[TextTable] = ()) -> None:
    """Verdict, tables (``more`` after the sweep's own) and what to mind."""
    out.print(Text(clean(headline(record, findings)), style="bold"))
    out.print()
    for sentence in verdict(findings):
        out.print(Text(clean(sentence, _LONGEST)))
    out.print()
    for table in (*all_tables(findings, record), *more):
        print_table(table, out)
    for title, texts in lists(findings):
        out.print(Text(title, style="bold"))
        for text in texts:
            out.print(Text(f"- {clean(text, _LONGEST)}"))
        out.print()


def print_table(table: TextTable, out: Console) -> None:
    """One table with its notes; cells are never cut, for half a number is a wrong number."""
    out.print(Text(clean(table.title), style="bold"))
    shown = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for place, column in enumerate(table.columns):
        shown.add_column(Text(clean(column)), justify="right" if place else "left", no_wrap=True)
    for row in table.rows:
        shown.add_row(*(Text(clean(cell)) for cell in row))
    needed = out.measure(shown, options=out.options.update(max_width=10_000)).maximum
    shown.width = max(needed, 1) if needed > out.width else None
    out.print(shown, crop=False)
    for note in table.notes:
        out.print(Text(clean(note, _LONGEST)))
    out.print()
