"""The doctor's findings on a terminal: equal lines of several hosts once, then what will work."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nsysk3.doctor.lines import HERE, Diagnosis, Line
from nsysk3.report.text import clean

_STYLES = {"ok": "green", "warning": "yellow", "cannot": "bold red"}
_WORKS = {True: ("yes", "green"), False: ("no", "bold red"), None: ("-", "dim")}
_LONGEST = 1000


def print_diagnosis(found: Diagnosis, console: Console) -> None:
    """Tables that wrap at the console's width."""
    hosts = list(dict.fromkeys(line.where for line in found.lines if line.where != HERE))
    console.print(Text("This machine, for reading traces", "bold"))
    console.print(_table([((), line) for line in found.lines if line.where == HERE]))
    if hosts:
        console.print(Text(f"\nTo run servers on: {', '.join(hosts)}", "bold"))
        console.print(_table(list(_grouped(found.lines, hosts))))
    console.print(Text("\nWhat will work", "bold"))
    table = _grid()
    width = max(len(each.name) for each in found.abilities)
    for each in found.abilities:
        word, style = _WORKS[each.works]
        table.add_row(Text(word, style), Text(each.name.ljust(width)), Text(clean(each.text, _LONGEST)))
    console.print(table)


def _grouped(lines: Sequence[Line], hosts: Sequence[str]) -> Iterator[tuple[tuple[str, ...], Line]]:
    """Lines of hosts by their names; what is said of several, but for their own names, once.  No hosts: of all."""
    for name in dict.fromkeys(line.name for line in lines if line.where != HERE):
        same: dict[Line, list[Line]] = {}
        for line in lines:
            if line.name == name and line.where != HERE:
                same.setdefault(_of_any(line), []).append(line)
        for general, each in same.items():
            alone = len(same) == 1 and (len(each) > 1 or len(hosts) == 1)
            yield () if alone else tuple(line.where for line in each), general if len(each) > 1 else each[0]


def _of_any(line: Line) -> Line:
    own = re.compile(rf"(?<![\w.-]){re.escape(line.where)}(?![\w.-])")
    return replace(
        line, where="", text=own.sub("HOST", line.text), fix=line.fix and own.sub("HOST", line.fix), brief=""
    )


def _table(rows: Sequence[tuple[tuple[str, ...], Line]]) -> Table:
    table = _grid()
    for where, line in rows:
        text = Text(clean(line.text, _LONGEST))
        if where:
            text = Text(f"{', '.join(where)}: ", "bold").append(text)
        if line.fix:
            text.append(f"\n-> {clean(line.fix, _LONGEST)}", "cyan")
        table.add_row(Text(line.state, _STYLES[line.state]), Text(line.name), text)
    return table


def _grid() -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    return table
