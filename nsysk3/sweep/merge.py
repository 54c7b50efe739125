"""Sweeps held against each other: may their repeats stand in one table?"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsysk3.errors import InputError
from nsysk3.run.closest import closest
from nsysk3.run.files import replacing
from nsysk3.sweep.folder import RESULTS, SUMMARY, Folder, Point, Repeat
from nsysk3.sweep.memory import AFTER
from nsysk3.sweep.nccl_table import NCCL_CSV
from nsysk3.sweep.record import Merged, Record, make_room, read_record
from nsysk3.sweep.summarise import summarise

BASELINES = "baselines"


@dataclass(frozen=True)
class Sweep:
    """A sweep as a report sees it."""

    folder: Folder
    record: Record
    points: list[Point]
    repeats: list[Repeat]


def read_sweep(path: Path) -> Sweep:
    """A sweep's folder.  Raises InputError where there is none, or nothing that counts in it."""
    folder = Folder(path)
    if not path.is_dir():
        raise InputError(f"{path}: no such folder")
    record = read_record(folder)
    points = summarise(folder, record)
    if record is None and not points:
        raise InputError(f"{path}: not the folder of a sweep (neither metadata/sweep.json nor summary.csv)")
    record = record or Record(run_id=path.resolve().name, requests=None)
    return Sweep(folder, record, points, folder.results())


def items_of(record: Record) -> dict[str, Any]:
    """Settings, and what the server of the first layout that has any said of itself, by name."""
    facts = next((each.facts for each in record.layouts if each.facts), {})
    return record.items() | {f"server says {name}": value for name, value in facts.items()}


_UNTOLD = object()


def compare_items(ours: Record, theirs: Record) -> tuple[list[str], dict[str, str], list[str]]:
    """Names of items that are the same, those that differ with both values in words, those that only one side tells."""
    a, b = items_of(ours), items_of(theirs)
    same, different, unknown = [], {}, []
    for name in sorted(a.keys() | b.keys()):
        left, right = _told(a, ours, name), _told(b, theirs, name)
        if left is _UNTOLD or right is _UNTOLD:
            unknown.append(name)
        elif left == right:
            same.append(name)
        else:
            different[name] = f"{name} is {_word(left)} here, {_word(right)} there"
    return same, different, unknown


def changes(before: Record, now: Record) -> dict[str, tuple[str, str]]:
    """Items of a sweep that are not as they were, with both values in words; what one side lacks counts as not set."""
    a, b = before.items(), now.items()
    names = sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))
    return {name: (_word(a.get(name)), _word(b.get(name))) for name in names}


def _told(items: dict[str, Any], record: Record, name: str) -> Any:
    """An environment variable that a record of ours does not list was not set."""
    if name in items:
        return items[name]
    return None if name.startswith("env.") and record.nsysk3_version else _UNTOLD


def _word(value: object) -> str:
    return "not set" if value is None else json.dumps(value, ensure_ascii=False)


def check_merge(ours: Record, other: Sweep, accept: Sequence[str] = ()) -> Merged:
    """What merging another sweep means, item by item.

    Only the layouts may differ: PP, TP, EP and arguments of a single layout, which reports name.  Raises InputError
    that names every other item that differs and is not in ``accept``.
    """
    same, different, unknown = compare_items(ours, other.record)
    refused = [text for name, text in different.items() if name not in accept]
    name = other.folder.path.resolve().name
    if refused:
        names = " ".join(f"--accept {item!r}" for item in different if item not in accept)
        raise InputError(
            f"{name} cannot be merged, more than PP, TP and EP differs: {'; '.join(refused)}. To merge it all the "
            f"same, and have the report say so: {names}"
        )
    return Merged(
        folder=name, run_id=other.record.run_id, same=same, not_known=unknown,
        accepted=[different[item] for item in accept if item in different],
    )  # fmt: skip


def check_asked(accept: Sequence[str], own: Folder, ours: Record, others: Sequence[Sweep]) -> None:
    """Raises InputError for what was to be accepted and is no item of these sweeps, or is to be where no baseline is.

    Neither is a sweep a baseline of its own.
    """
    if accept and not others:
        raise InputError(f"--accept {accept[0]}: there is no baseline that could differ; give --baseline DIR")
    known = sorted({name for record in (ours, *(each.record for each in others)) for name in items_of(record)})
    for name in accept:
        if name not in known:
            meant = closest(name, known)
            hint = f"did you mean {meant!r}? " if meant else ""
            raise InputError(f"--accept {name}: no such item; {hint}Items: {', '.join(known)}")
    for other in others:
        if other.folder.path.resolve() == own.path.resolve():
            raise InputError(f"--baseline {other.folder.path}: is this sweep itself; give another one")


def merged(own: Sweep, others: Sequence[Sweep], accept: Sequence[str] = ()) -> Sweep:
    """One sweep of several: the first one's points, and those of layouts and concurrencies that only others have."""
    record = own.record.model_copy(deep=True)
    points, repeats = list(own.points), list(own.repeats)
    for other in others:
        found = check_merge(own.record, other, accept)
        record.merged = [each for each in record.merged if each.folder != found.folder] + [found]
        known = {(point.layout, point.concurrency) for point in points}
        added = [point for point in other.points if (point.layout, point.concurrency) not in known]
        points += added
        taken = {(point.layout, point.concurrency) for point in added}
        repeats += [row for row in other.repeats if (row.layout, row.concurrency) in taken]
        record.layouts += [each for each in other.record.layouts if record.of(each.layout) is None]
        record.notes += [f"{found.folder}: {note}" for note in other.record.notes]
        for name, reason in other.record.not_measured.items():
            record.not_measured.setdefault(name, reason)
    ordered = sorted(points, key=lambda point: (point.concurrency, point.layout))
    return Sweep(own.folder, record, ordered, repeats)


def kept_baselines(folder: Folder) -> list[Sweep]:
    """The baselines that a sweep keeps copies of."""
    return [read_sweep(path) for path in sorted((folder.path / BASELINES).glob("*")) if path.is_dir()]


def inputs_of(folder: Folder) -> list[Path]:
    """Files that a report is made of, which it must never replace."""
    found = [folder.path / RESULTS, folder.path / SUMMARY, folder.path / NCCL_CSV]
    return found + [path for name in ("metadata", "raw", "gpu", BASELINES) for path in (folder.path / name).rglob("*")]


def keep_baseline(folder: Folder, other: Sweep) -> None:
    """Copy what a report needs of a baseline into the sweep's own folder, so that the two stay together."""
    source = other.folder.path
    wanted = [
        other.folder.manifest,
        source / RESULTS,
        source / SUMMARY,
        *sorted((source / "gpu").glob(f"*_{AFTER}_*.csv")),
    ]
    for path in wanted:
        if path.is_file():
            target = folder.path / BASELINES / source.resolve().name / path.relative_to(source)
            make_room(target)
            with replacing(target) as beside:
                shutil.copyfile(path, beside)
