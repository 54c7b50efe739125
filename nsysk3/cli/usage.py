"""A command line that cannot be understood: one line that says what is wrong with it, one with the way out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import typer

from nsysk3.run.closest import closest

# Typer does not name them in public; what it raises for a wrong command line has always been a parent of this one.
UsageError, ClickError = cast(tuple[type[Exception], type[Exception]], typer.BadParameter.__mro__[1:3])


def explain(error: Any) -> str:
    """Two lines for a UsageError; the whole help where a group was called without a command."""
    context = error.ctx
    if type(error).__name__ == "NoArgsIsHelpError":
        return str(error.format_message())
    if context is None:
        return f"nsysk3: {_lower(error.format_message())}"
    return f"{context.command_path}: {_problem(error, context)}\n  {_usage(context)}"


def _problem(error: Any, context: Any) -> str:
    said = _lower(error.format_message())
    if (option := getattr(error, "option_name", None)) and type(error).__name__ == "NoSuchOption":
        return f"no such option {option}{_meant(option, context)}"
    if named := re.match(r"no such command '(.*?)'", said):
        return f"no such command {named[1]!r}{_meant_command(named[1], context)}"
    if wrong := re.match(r"invalid value(?: for '(.*?)')?: (?:Value error, )?(.*)", said):
        return f"{wrong[1]}: {_lower(wrong[2])}" if wrong[1] else wrong[2]
    return said


def _lower(text: str) -> str:
    line = " ".join(text.split()).rstrip(".")
    return line[:1].lower() + line[1:]


def _meant(option: str, context: Any) -> str:
    """The option that was meant, or the command that has it."""
    if found := closest(option, _options(context.command)):
        return f"; did you mean {found}?"
    having = [path for path, command in _commands(context.find_root()) if option in _options(command)]
    return f"; it is one of nsysk3 {' and '.join(having[:3])}" if having else ""


def _meant_command(word: str, context: Any) -> str:
    commands = context.command.commands
    if context.parent is None and (Path(word).exists() or "/" in word):
        return f"; did you mean nsysk3 analyze {word}?"
    if found := closest(word, commands):
        return f"; did you mean {found}?"
    return f": there are {', '.join(commands)}" if context.parent else ""


def _commands(root: Any) -> Iterator[tuple[str, Any]]:
    """Every command under its words behind ``nsysk3``."""
    for name, command in root.command.commands.items():
        yield name, command
        for below, each in getattr(command, "commands", {}).items():
            yield f"{name} {below}", each


def _options(command: Any) -> list[str]:
    return [name for each in command.params for name in (*each.opts, *each.secondary_opts) if name.startswith("-")]


def _usage(context: Any) -> str:
    """How the command is called, in one line."""
    words = " ".join(context.command.collect_usage_pieces(context))
    plain = re.sub(r"\{(.+?)(?:\.\.\.)?\}", r"\1", words)
    return f"usage: {context.command_path} {plain} (--help says more)"
