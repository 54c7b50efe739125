"""What a check of a host is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Level = Literal["ok", "note", "warning", "fatal"]
# Answers of a host's probe by question.
Answers = Mapping[str, Any]
# Level, what the table shows, and the problem with its way out.
Verdicts = Iterator[tuple[Level, str, str | None]]

GIB = 2**30


@dataclass(frozen=True)
class Check:
    """One fact about one host: what it is in a few characters and, where it is not well, what to do."""

    host: str
    name: str
    level: Level
    text: str
    problem: str | None = None
