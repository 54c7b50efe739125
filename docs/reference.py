"""Write cli.md and man/nsysk3.1 from the commands themselves: ``python docs/reference.py``.  A test compares."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import typer
from typer.main import get_command

from nsysk3.cli import app

DOCS = Path(__file__).parent
MARKDOWN, MAN = "cli.md", "man/nsysk3.1"
EXIT_CODES = (
    (0, "done"),
    (1, "a gate of compare --fail-on was exceeded"),
    (2, "wrong arguments, settings or inputs; or some inputs could not be used and the others were"),
    (3, "the environment lacks something: nsys, room, a host"),
    (4, "a run failed"),
    (70, "a fault of nsysk3; --verbose shows where"),
    (130, "interrupted"),
)
ENVIRONMENT = (
    ("NSYSK3_NSYS", "the nsys that exports .nsys-rep files and profiles (nsys.path)"),
    ("NSYSK3_CONFIG", "the settings, in place of ./nsysk3.toml"),
    ("NSYSK3_SECTION_NAME", "any setting: NSYSK3_LOAD_CHUNK is load.chunk (docs/launching.md)"),
    ("NSYSK3_CACHE", "where exports go when the report's folder cannot be written, and what analyze --cache keeps"),
)


class Entry(NamedTuple):
    """A command: its words behind ``nsysk3``, how it is called, what it does, arguments and options with their help."""

    words: str
    usage: str
    text: str
    arguments: list[tuple[str, str]]
    options: list[tuple[str, str]]


def entries() -> Iterator[Entry]:
    """Every command in the order of the help, those of a group behind it."""
    root = typer.Context(get_command(app), info_name="nsysk3")
    for name, command in root.command.commands.items():  # type: ignore[attr-defined]
        context = typer.Context(command, parent=root, info_name=name)
        if command.invoke_without_command if hasattr(command, "commands") else True:
            yield _entry(name, command, context)
        for below, each in getattr(command, "commands", {}).items():
            yield _entry(f"{name} {below}", each, typer.Context(each, parent=context, info_name=below))


def _entry(words: str, command: Any, context: typer.Context) -> Entry:
    pieces = " ".join(command.collect_usage_pieces(context))
    usage = f"nsysk3 {words} " + re.sub(r"\{(.+?)(?:\.\.\.)?\}", r"\1", pieces)
    records: dict[str, list[tuple[str, str]]] = {"argument": [], "option": []}
    for parameter in command.get_params(context):
        if "--help" not in parameter.opts and (record := parameter.get_help_record(context)):
            name, text = record[0], " ".join(record[1].split())
            if parameter.param_type_name == "argument":  # the usage says of what type it is, and whether it is required
                name, text = re.sub(r" <.*>$", "", name), text.removesuffix(" [required]")
            name = re.sub(r"<(?:list\[)?(\w+)(?:\]| range)>", lambda kind: f"<{kind[1].lower()}>", name)
            records[parameter.param_type_name].append((name, text))
    return Entry(words, usage, command.help, records["argument"], records["option"])


def markdown() -> str:
    """docs/cli.md."""
    parts = [
        "# Commands",
        "Made from the commands by `python docs/reference.py`. Every command has `--help`; those that take time have "
        "`--quiet`\nand `--verbose`; settings and environment: [launching.md](launching.md#settings). "
        "`nsysk3 --install-completion` completes commands and\noptions in your shell.",
        _table("exit code", [(str(code), meaning) for code, meaning in EXIT_CODES]),
        _table("environment", ENVIRONMENT),
    ]
    for entry in entries():
        parts += [f"## nsysk3 {entry.words}", f"```\n{entry.usage}\n```", entry.text]
        for title, rows in (("argument", entry.arguments), ("option", entry.options)):
            if rows:
                parts.append(_table(title, rows))
    return "\n\n".join(parts) + "\n"


def _table(title: str, rows: Sequence[tuple[str, str]]) -> str:
    return "\n".join((f"| {title} | |", "|---|---|", *(f"| `{_cell(name)}` | {_cell(text)} |" for name, text in rows)))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def man() -> str:
    """docs/man/nsysk3.1."""
    lines = ['.TH NSYSK3 1 "" "" "nsysk3"', ".SH NAME", f"nsysk3 \\- {_roff(app.info.help or '')}"]
    lines += [".SH SYNOPSIS", ".B nsysk3", "COMMAND [OPTIONS] [ARGUMENTS]", ".SH COMMANDS"]
    for entry in entries():
        lines += [f".SS {_roff(entry.usage)}"]
        for index, paragraph in enumerate(re.split(r"\n\s*\n", entry.text)):
            lines += [".PP"] * bool(index) + [_roff(" ".join(paragraph.split()))]
        for name, text in (*entry.arguments, *entry.options):
            lines += [".TP", f".B {_roff(name)}", _roff(text) or "\\&"]
    lines.append(".SH EXIT STATUS")
    for code, meaning in EXIT_CODES:
        lines += [".TP", f".B {code}", _roff(meaning)]
    lines.append(".SH ENVIRONMENT")
    for variable, meaning in ENVIRONMENT:
        lines += [".TP", f".B {variable}", _roff(meaning)]
    return "\n".join(lines) + "\n"


def _roff(text: str) -> str:
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return "\\&" + text if text[:1] in ".'" else text


if __name__ == "__main__":
    (DOCS / MARKDOWN).write_text(markdown(), "utf-8")
    (DOCS / MAN).write_text(man(), "utf-8")
