"""Fenced blocks of Markdown pages: what they are, which commands they hold, and whether output is as they show it.

* ```` ```console ````: lines with ``$`` are commands that run from a checkout, the lines below what they print; ``...``
  alone stands for any lines.  Nothing shown: nothing compared.  A command may fail only where ``$ echo $?`` follows.
* ```` ```pycon ````: doctests.  A ``title="NAME"`` names the file that a block is.
* Any other block is shown and not run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

ANY = "..."


class Block(NamedTuple):
    """A fenced block: its info string split, the line it begins at, its text."""

    kind: str
    title: str | None
    line: int
    text: str


class Step(NamedTuple):
    """A command of a console block, what it prints, and whether its exit code is shown next."""

    command: str
    shown: list[str]
    may_fail: bool


def blocks(path: Path) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    held: list[str] | None = None
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if not line.startswith("```"):
            if held is not None:
                held.append(line)
        elif held is None:
            kind, _, more = line[3:].partition(" ")
            title = re.search(r'title="([^"]+)"', more)
            begun, held = (kind, title[1] if title else None, number), []
        else:
            yield Block(*begun, "\n".join(held) + "\n")
            held = None


def steps(text: str) -> list[Step]:
    """The commands of a console block."""
    found: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            found[-1][1].append(line)
    after = [each[0] for each in found[1:]] + [""]
    return [Step(*each, following == "echo $?") for each, following in zip(found, after, strict=True)]


def commands(text: str) -> Iterator[str]:
    """Every command line of a block that begins with nsysk3, continued lines joined, ``$`` and comments left out."""
    for line in text.replace("\\\n", " ").splitlines():
        if re.match(r"(\$ )?nsysk3 ", line):
            yield re.sub(r"\s+# .*$", "", line.removeprefix("$ "))


def differs(shown: list[str], printed: str) -> str | None:
    """Where a command's output is not as shown, None where it is."""
    lines = [line.rstrip() for line in printed.strip("\n").splitlines()]
    at = 0
    anchored = True
    for part, last in _parts([line.rstrip() for line in shown]):
        end = len(lines) - len(part)
        places = range(end if last else at, (at if anchored else end) + 1)
        found = next((place for place in places if place >= at and lines[place : place + len(part)] == part), None)
        if found is None:
            return "\n".join(["not printed (in this order):", *part, "but:", *lines])
        at, anchored = found + len(part), False
    return None


def _parts(shown: list[str]) -> Iterator[tuple[list[str], bool]]:
    """Lines that stand together, with whether they must be the end."""
    cuts = [-1, *(number for number, line in enumerate(shown) if line == ANY), len(shown)]
    for low, high in pairwise(cuts):
        part = shown[low + 1 : high]
        if part or low == -1:
            yield part, high == len(shown) and bool(part)


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    found: set[str] = set()
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for heading in re.findall(r"^#+ +(.+)$", outside, re.MULTILINE):
        name = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.add(name if name not in found else f"{name}-1")
    return found
