"""The folder of a sweep, and its two tables.

``results.csv`` is written whole beside itself and renamed after every repeat: whoever is killed leaves whole rows.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from nsysk3.errors import InputError
from nsysk3.run.files import write_text
from nsysk3.sweep.matrix import Cell, Layout

# What a row is of, and what cannot be 0: of a point too what others are divided by.
_KEYS = ("pp", "tp", "ep", "concurrency", "repeat")
_POSITIVE = frozenset({*_KEYS, "repeats", "attempt", "requests"})
_DIVISORS = frozenset({"input_tps", "input_tps_min", "input_tps_max", "ttft_p50_ms"})
RESULTS, SUMMARY = "results.csv", "summary.csv"
DONE, FAILED = "done", "failed"
# What a row is found by: pp, tp, ep, concurrency, repeat.
Key = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class Repeat:
    """A row of results.csv.  docs/sweep.md says what each column means."""

    pp: int
    tp: int
    ep: int
    concurrency: int
    repeat: int
    status: str
    requests: int
    completed: int
    errors: int
    duration_s: float | None = None
    input_tps: float | None = None
    output_tps: float | None = None
    ttft_mean_ms: float | None = None
    ttft_p50_ms: float | None = None
    ttft_p95_ms: float | None = None
    ttft_p99_ms: float | None = None
    e2e_p50_ms: float | None = None
    e2e_p95_ms: float | None = None
    input_tokens: int | None = None
    cached_tokens: int | None = None
    started: str | None = None
    attempt: int = 1
    client: str | None = None
    raw: str | None = None
    cause: str | None = None

    @property
    def layout(self) -> Layout:
        """Which layout was served."""
        return Layout(self.pp, self.tp, self.ep)

    @property
    def key(self) -> tuple[int, int, int, int, int]:
        """As ``Cell.key``."""
        return self.pp, self.tp, self.ep, self.concurrency, self.repeat


@dataclass(frozen=True)
class Point:
    """A row of summary.csv: medians over the repeats that are done.

    ``input_tps_spread``: largest less smallest over the median, None where there are not two repeats.
    ``input_tps_spread_at_most``: a bound of it, where only that is known.
    """

    pp: int
    tp: int
    ep: int
    concurrency: int
    repeats: int
    input_tps: float
    input_tps_min: float | None = None
    input_tps_max: float | None = None
    input_tps_spread: float | None = None
    input_tps_spread_at_most: float | None = None
    ttft_p50_ms: float | None = None
    ttft_p95_ms: float | None = None
    ttft_mean_ms: float | None = None
    e2e_p50_ms: float | None = None
    output_tps: float | None = None
    startup_s: float | None = None
    peak_memory_mib: int | None = None
    memory_total_mib: int | None = None
    peak_memory_gpu: str | None = None

    @property
    def layout(self) -> Layout:
        """Which layout was served."""
        return Layout(self.pp, self.tp, self.ep)


@dataclass(frozen=True)
class Folder:
    """Where things lie in the folder of a sweep; see docs/sweep.md."""

    path: Path

    @property
    def manifest(self) -> Path:
        """What was asked for and how far it got."""
        return self.path / "metadata" / "sweep.json"

    def metadata(self, layout: Layout, name: str) -> Path:
        """A file about one layout."""
        return self.path / "metadata" / f"{layout.name}_{name}"

    def service(self, layout: Layout, attempt: int) -> Path:
        """The folder of one start of a service: commands and logs of every node."""
        return self.path / "service" / (layout.name if attempt == 1 else f"{layout.name}_start{attempt}")

    def bench(self, cell: Cell) -> Path:
        """The benchmark's text."""
        return self.path / "bench" / f"{cell.name}.txt"

    def raw(self, cell: Cell) -> Path:
        """The benchmark's JSON line."""
        return self.path / "raw" / f"{cell.name}.jsonl"

    def gpu(self, layout: Layout, label: str, host: str) -> Path:
        """The memory of one host's GPUs at one moment."""
        return self.path / "gpu" / f"{layout.name}_{label}_{host}.csv"

    def results(self) -> list[Repeat]:
        """The rows of results.csv, none without the file.  Raises InputError when it cannot be understood."""
        return _read(self.path / RESULTS, Repeat)

    def summary(self) -> list[Point]:
        """The rows of summary.csv, none where there is no such file."""
        return _read(self.path / SUMMARY, Point)

    def unproven(self) -> dict[Key, str]:
        """Repeats that are done but whose JSON line nobody can look at any more, by key: which file, and why not."""
        found = {}
        for row in self.results():
            if row.status == DONE and row.raw and (why := _unread(self.path / row.raw)):
                found[row.key] = f"{row.raw} {why}"
        return found

    def looked_at(self) -> tuple[set[Key], dict[Key, str]]:
        """Keys of the repeats that need not be measured any more, for their JSON line is there; and ``unproven``."""
        unproven = self.unproven()
        return {row.key for row in self.results() if row.status == DONE} - unproven.keys(), unproven

    def done(self) -> set[Key]:
        """The first of ``looked_at``."""
        return self.looked_at()[0]

    def keep_results(self, rows: Iterable[Repeat]) -> None:
        """Put rows in place of those of the same repeats, in the matrix' order, and write the file anew."""
        kept = {row.key: row for row in self.results()} | {row.key: row for row in rows}
        _write(self.path / RESULTS, Repeat, sorted(kept.values(), key=lambda row: row.key))

    def write_summary(self, points: Sequence[Point]) -> None:
        """Write summary.csv anew."""
        _write(self.path / SUMMARY, Point, points)


def _unread(path: Path) -> str | None:
    """Why a JSON line is none, None where it is whole."""
    try:
        with path.open("rb") as file:
            line = file.readline().strip()
    except OSError as error:
        return "is gone" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
    with suppress(ValueError):
        if isinstance(json.loads(line), dict):
            return None
    return "is no JSON line" if line else "is empty"


def _write(path: Path, kind: type[Any], rows: Sequence[Any]) -> None:
    text = io.StringIO()
    names = [field.name for field in fields(kind)]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    for row in rows:
        writer.writerow(["" if (value := getattr(row, name)) is None else _text(value) for name in names])
    write_text(path, text.getvalue())


def _text(value: object) -> str:
    return f"{value:.6f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def _read(path: Path, kind: type[Any]) -> list[Any]:
    try:
        text = path.read_text("utf-8-sig")  # a spreadsheet puts a mark before it
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from error
    hints = get_type_hints(kind)
    rows = []
    reader = csv.DictReader(io.StringIO(text))
    needed = [field.name for field in fields(kind) if field.default is MISSING]
    if missing := [name for name in needed if name not in (reader.fieldnames or ())]:
        raise InputError(f"{path}: no column {', '.join(missing)}; docs/sweep.md lists them")
    positive = _POSITIVE | _DIVISORS if kind is Point else _POSITIVE
    lines: dict[tuple[Any, ...], int] = {}
    for row in reader:
        try:
            made = kind(**{name: _value(name, row[name], hints[name], positive) for name in row if name in hints})
        except ValueError as error:
            raise InputError(f"{path}: line {reader.line_num}: {error}") from error
        first = lines.setdefault(tuple(getattr(made, name) for name in _KEYS if name in hints), reader.line_num)
        if first != reader.line_num:
            raise InputError(f"{path}: lines {first} and {reader.line_num} are of the same point; delete one of them")
        rows.append(made)
    return rows


def _value(name: str, text: str | None, hint: Any, positive: frozenset[str]) -> Any:
    """What a cell holds.  Raises ValueError for what nobody can have measured."""
    kinds = get_args(hint) or (hint,)
    if text is None:
        raise ValueError("it is cut short; delete the line, and its repeat counts as never measured")
    if text == "":
        if type(None) in kinds:
            return None
        raise ValueError(f"{name}: a value is missing")
    if str in kinds:
        return text
    kind: type[int] | type[float] = int if int in kinds else float
    try:
        value = kind(text)
    except ValueError as error:
        raise ValueError(f"{name}: {text!r} is no {'whole ' if kind is int else ''}number") from error
    if not math.isfinite(value) or value < 0 or (value == 0 and name in positive):
        raise ValueError(f"{name}: {text} cannot have been measured; a cell that nobody knows is left empty")
    return value
