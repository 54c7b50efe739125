"""Known failures, recognised from what a server printed."""

from __future__ import annotations

import re
import signal
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from nsysk3.errors import RunFailedError

# What no pattern knows: the last lines that look like the reason.
_LOOKS_BAD = re.compile(
    r"^\s*(?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b|\b(?:ERROR|FATAL|CRITICAL)\b|^fatal:", re.MULTILINE
)
_LONGEST = 220
_LONGEST_LINE = 400
# What nsys prints in a server's log and that explains no failure.
_NOISE = re.compile(r"^\s*(?:Generated:|\[1/1\] \[.*|Generating '.*')\s*$")
# Of a log of hundreds of megabytes the end is read; what kills a server is there.
TAIL_BYTES = 2_000_000


@dataclass(frozen=True)
class Failure:
    """Why a server failed: ``kind`` (see failures.toml; else unknown) and the log line that says so."""

    kind: str
    message: str
    advice: str
    line: str = ""


class ServerFailedError(RunFailedError):
    """A server failed; ``failure`` says why, ``log`` is its log on this machine."""

    def __init__(self, failure: Failure, what: str, log: Path | None = None) -> None:
        where = f"; log: {log}" if log else ""
        super().__init__(f"{what}: {failure.message}; {failure.advice}{where}")
        self.failure = failure
        self.log = log


@dataclass(frozen=True)
class _Pattern:
    kind: str
    expression: re.Pattern[str]
    message: str
    advice: str


def recognise(log: str) -> Failure | None:
    """The first cause in failures.toml that the text shows, None where it shows none of them."""
    for pattern in _patterns():
        if found := pattern.expression.search(log):
            groups = ("", *(_short(group or "?").rstrip(".") for group in found.groups()))
            return Failure(
                pattern.kind,
                _fill(pattern.message, groups),
                _fill(pattern.advice, groups),
                _short(_line_at(log, found.start()), _LONGEST_LINE),
            )
    return None


def explain(logs: Iterable[str], codes: Sequence[int | None] = ()) -> Failure:
    """Why a server that ended or never became healthy failed; ``codes``: exit codes of its nodes, None while one runs.

    All logs are searched for each cause in turn: what one node died of explains what the others then said.
    """
    texts = list(logs)
    found = [failure for failure in map(recognise, texts) if failure]
    if found:
        order = [pattern.kind for pattern in _patterns()]
        return min(found, key=lambda failure: order.index(failure.kind))
    ended = [code for code in codes if code is not None]
    said = next(filter(None, map(last_words, texts)), "")
    if any(code in (-signal.SIGKILL, 128 + signal.SIGKILL) for code in ended):
        return Failure(
            "killed",
            "killed (SIGKILL), most often because the machine ran out of memory: the server",
            "`dmesg -T | grep -i oom` on the host says whether; else somebody ended it",
            said,
        )
    if ended:
        return Failure(
            "unknown",
            f"the server ended by itself ({how_it_ended(ended[0])}){': ' + said if said else ''}",
            "its log says more",
            said,
        )
    return Failure("unknown", "the server did not do what it should", "its log says more", said)


def how_it_ended(code: int) -> str:
    """An exit code in words."""
    number = -code if code < 0 else code - 128 if code > 128 else 0
    try:
        return f"killed by {signal.Signals(number).name}" if number else f"exit code {code}"
    except ValueError:
        return f"exit code {code}"


def last_words(log: str) -> str:
    """The last line of a log that looks like an error, empty where none does."""
    found = list(_LOOKS_BAD.finditer(log))
    return _short(_line_at(log, found[-1].start()), _LONGEST_LINE) if found else ""


def relevant_lines(log: str, failure: Failure | None, count: int = 12) -> list[str]:
    """Lines worth showing of a failed server: those up to the one that explains it, else the last ones."""
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", log) if line.strip() and not _NOISE.match(line)]
    end = len(lines)
    if failure and failure.line:
        matches = [index for index, line in enumerate(lines) if _short(line, _LONGEST_LINE) == failure.line]
        if matches:
            end = min(matches[0] + 3, len(lines))
    return [line if len(line) <= 240 else line[:237] + "..." for line in lines[max(0, end - count) : end]]


@cache
def _patterns() -> tuple[_Pattern, ...]:
    document = tomllib.loads(files("nsysk3.launch").joinpath("failures.toml").read_text("utf-8"))
    return tuple(
        _Pattern(entry["kind"], re.compile(pattern, re.MULTILINE), entry["message"], entry["advice"])
        for entry in document["failure"]
        for pattern in entry["patterns"]
    )


def _fill(text: str, groups: Sequence[str]) -> str:
    return re.sub(r"\{(\d)\}", lambda number: groups[int(number[1])] if int(number[1]) < len(groups) else "?", text)


def _line_at(text: str, place: int) -> str:
    """The line around a place in a text."""
    end = text.find("\n", place)
    return text[text.rfind("\n", 0, place) + 1 : len(text) if end < 0 else end]


def _short(text: str, longest: int = _LONGEST) -> str:
    """One printable line."""
    line = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return line if len(line) <= longest else f"{line[: longest - 3]}..."
