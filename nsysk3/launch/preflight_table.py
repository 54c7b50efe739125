"""Preflight as a table, checks down and hosts across, and a line for each problem."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nsysk3.launch.checks import Check
from nsysk3.launch.preflight import Preflight

_STYLES = {"ok": "green", "note": "dim", "warning": "yellow", "fatal": "bold red"}
_SIGNS = {"ok": "", "note": "", "warning": " !", "fatal": " ✗"}
_ORDER = ("ok", "note", "warning", "fatal")


def print_preflight(found: Preflight, console: Console) -> None:
    """The table, then every problem with its way out; the worst first."""
    hosts = list(found.answers)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for host in hosts:
        table.add_column(Text(host), overflow="fold")
    for name in dict.fromkeys(check.name for check in found.checks if check.host in hosts):
        table.add_row(Text(name), *(_cell(found.checks, host, name) for host in hosts))
    console.print(table)
    for check in found.problems:
        line = Text(f"{check.level}: ", _STYLES[check.level])
        console.print(line.append(f"{check.host}: {check.problem}", "default"), soft_wrap=True)


def _cell(checks: tuple[Check, ...], host: str, name: str) -> Text:
    """The worst of a host's checks of one name."""
    own = [check for check in checks if check.host == host and check.name == name]
    if not own:
        return Text("")
    worst = max(own, key=lambda check: _ORDER.index(check.level))
    return Text(worst.text + _SIGNS[worst.level], _STYLES[worst.level])
