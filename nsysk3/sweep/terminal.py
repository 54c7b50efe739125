"""A sweep's report as tables for a terminal of 100 columns; plain text when piped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nsysk3.report.text import clean
from nsysk3.sweep.findings import Findings
from nsysk3.sweep.record import Record
from nsysk3.sweep.tables import TextTable, all_tables, headline, lists, verdict

WIDTH = 100
# Words of a cell that can go over several lines: fewer are a number with its unit.
WORDY = 4
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
    """One table with its notes; cells are never cut, for half a number is a wrong number.

    Where it is too wide, the wordiest column goes over several lines.
    """
    out.print(Text(clean(table.title), style="bold"))
    shown = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for place, column in enumerate(table.columns):
        shown.add_column(Text(clean(column)), justify="right" if place else "left", no_wrap=True)
    for row in table.rows:
        shown.add_row(*(Text(clean(cell)) for cell in row))
    if (over := _needed(shown, out) - out.width) > 0:
        _narrow(shown, table, over)
        shown.width = _needed(shown, out)
    out.print(shown, crop=False)
    for note in table.notes:
        out.print(Text(clean(note, _LONGEST)))
    out.print()


def _needed(shown: Table, out: Console) -> int:
    """Columns of the terminal that a table takes."""
    return max(out.measure(shown, options=out.options.update(max_width=10_000)).maximum, 1)


def _narrow(shown: Table, table: TextTable, over: int) -> None:
    """Let the column with the most words in a cell go over several lines, between words, where that is a text."""
    columns = [[clean(cell) for cell in cells] for cells in zip(*table.rows, strict=True)]
    words = [max((len(cell.split()) for cell in cells), default=0) for cells in columns]
    if max(words, default=0) < WORDY:
        return
    place = words.index(max(words))
    cells = [clean(table.columns[place]), *columns[place]]
    longest = max(cell_len(word) for cell in cells for word in cell.split())
    column = shown.columns[place]
    column.no_wrap, column.justify = False, "left"
    column.width = max(longest, max(map(cell_len, cells)) - over)
