"""What a sweep measures: layouts x concurrency x repeats."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nsysk3.errors import InputError


@dataclass(frozen=True, order=True)
class Layout:
    """``pp`` stages of ``tp`` ranks, experts over ``ep`` of them; ``args``: what this layout's server gets besides."""

    pp: int
    tp: int
    ep: int
    args: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """As part of a file's name."""
        return f"pp{self.pp}_tp{self.tp}_ep{self.ep}"

    @property
    def label(self) -> str:
        """For a reader."""
        return f"PP{self.pp}/TP{self.tp}/EP{self.ep}"

    @property
    def key(self) -> tuple[int, int, int]:
        """What tells layouts apart; the arguments only serve it."""
        return self.pp, self.tp, self.ep

    @property
    def gpus(self) -> int:
        """GPUs it needs."""
        return self.pp * self.tp


@dataclass(frozen=True, order=True)
class Cell:
    """One repeat: a layout at a concurrency."""

    layout: Layout
    concurrency: int
    repeat: int

    @property
    def name(self) -> str:
        """As part of a file's name."""
        return f"{self.layout.name}_c{self.concurrency}_r{self.repeat}"

    @property
    def key(self) -> tuple[int, int, int, int, int]:
        """What a row of results.csv is found by."""
        return *self.layout.key, self.concurrency, self.repeat


@dataclass(frozen=True)
class Matrix:
    """The whole experiment; ``requests`` of each repeat."""

    layouts: tuple[Layout, ...]
    concurrency: tuple[int, ...]
    repeats: int
    requests: int

    def cells(self, layout: Layout) -> Iterator[Cell]:
        """The repeats of one layout, in the order they are run."""
        for concurrency in self.concurrency:
            for repeat in range(1, self.repeats + 1):
                yield Cell(layout, concurrency, repeat)


def numbers(text: str, option: str, *, once: bool = True) -> tuple[int, ...]:
    """``2,4,8`` as numbers in the order given, ``once``: each only once.  Raises InputError that names the option."""
    parts = [part for part in text.replace(",", " ").split() if part]
    if not parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise InputError(f"{option} {text!r}: positive numbers with commas between, such as 2,4,8,16")
    values = [int(part) for part in parts]
    return tuple(dict.fromkeys(values) if once else values)


def layout_args(given: Sequence[str], depths: Sequence[int]) -> dict[int, tuple[str, ...]]:
    """``PP16=--disable-decode-cuda-graph`` by pipeline depth; several for one depth add up.

    Raises InputError for what is not of that form or for a depth that is not in ``depths``.
    """
    found: dict[int, tuple[str, ...]] = {}
    for text in given:
        name, equals, arguments = text.partition("=")
        match = re.fullmatch(r"(?:pp)?(\d+)", name.strip(), re.IGNORECASE)
        if not match or not equals or not arguments.strip():
            raise InputError(f"--layout-args {text!r}: write PP16='--option value', the depth and what its server gets")
        depth = int(match[1])
        if depth not in depths:
            raise InputError(f"--layout-args {text!r}: PP{depth} is not in --pp")
        try:
            found[depth] = found.get(depth, ()) + tuple(shlex.split(arguments))
        except ValueError as error:
            raise InputError(f"--layout-args {text!r}: {error}") from error
    return found
