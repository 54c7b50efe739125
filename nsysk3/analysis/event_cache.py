"""What reading a report gave, kept for the next analysis of the same file: ``analyze --cache``.

An entry is taken only for the very file it was made from: same place, inode, size and times to the nanosecond, change
time included, which no program can set; by this version of nsysk3; and only when every byte of it is as it was written.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import polars as pl

from nsysk3 import __version__
from nsysk3.run.files import cache_folder, unfinished_beside
from nsysk3.scale import wire
from nsysk3.scale.shelf import State

# Of the entries; a change of what ``read`` keeps counts it up.
_FORM = 4
_MOST_BYTES = 20 * 2**30
# A file that changed so lately could change again unseen, within one tick of its clock.
_SETTLED_S = 2
_INDEX, _ANSWER = "index.json", "answer"


def identity(source: Path, *said: str | None) -> str | None:
    """The name of the entry of an export (a file or a folder of tables) and of what else its reading depends on.

    None when the file cannot be told from a changed one: it changed a moment ago, or cannot be looked at.
    """
    facts: list[Any] = [_FORM, __version__, pl.__version__, *said]
    try:
        for file in _files(source):
            seen = file.stat()
            if time.time() - max(seen.st_ctime, seen.st_mtime) < _SETTLED_S:
                return None
            facts.append(
                [str(file.resolve()), seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns]
            )
    except OSError:
        return None
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:40]


def recall(key: str) -> tuple[State, Any] | None:
    """The state and answer kept under ``key``, None where there is none that is whole."""
    place = _folder() / key
    try:
        mine = place.stat()
        if mine.st_uid != os.geteuid() or mine.st_mode & 0o022:  # it is unpickled: nobody else may have written it
            return None
        index = json.loads((place / _INDEX).read_bytes())
        if {name: _digest(place / name) for name in index} != index:
            return None
        frames = {name.removesuffix(".arrow"): pl.read_ipc(place / name) for name in index if name != _ANSWER}
        answer = wire.loads((place / _ANSWER).read_bytes())
        os.utime(place)  # used: the last to go
    except (OSError, ValueError, TypeError, AttributeError, pl.exceptions.PolarsError):
        return None
    return frames, answer


def keep(key: str, state: State, answer: Any) -> None:
    """Keep a state and an answer under ``key``; what was used longest ago goes when there is no more room for all."""
    root = _folder()
    with suppress(OSError, pl.exceptions.PolarsError):  # a cache that cannot be written is none
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=".", dir=root))
        try:
            for name, frame in state.items():
                frame.write_ipc(beside / f"{name}.arrow", compression="zstd")
            (beside / _ANSWER).write_bytes(wire.dumps(answer))
            index = {file.name: _digest(file) for file in sorted(beside.iterdir())}
            (beside / _INDEX).write_text(json.dumps(index), "utf-8")
            shutil.rmtree(root / key, ignore_errors=True)
            beside.rename(root / key)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
        _make_room(root)


def _folder() -> Path:
    return cache_folder() / "events"


def _files(source: Path) -> Iterator[Path]:
    """The export, and what a writer that did not finish left beside it."""
    yield from sorted(source.iterdir()) if source.is_dir() else [source]
    yield from unfinished_beside(source)


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "blake2b").hexdigest()


def _make_room(root: Path) -> None:
    entries = sorted((place for place in root.iterdir() if place.is_dir()), key=lambda place: -place.stat().st_mtime)
    total = 0
    for place in entries:
        total += sum(file.stat().st_size for file in place.iterdir())
        if total > _MOST_BYTES:
            shutil.rmtree(place, ignore_errors=True)
