"""What a command line asks of a sweep, before there is a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nsysk3.errors import InputError
from nsysk3.run.config import Settings
from nsysk3.sweep.folder import Folder
from nsysk3.sweep.matrix import layout_args, numbers
from nsysk3.sweep.record import Record, read_record

CONCURRENCY, REPEATS, REQUESTS = (8, 16), 3, 40


@dataclass(frozen=True)
class Wanted:
    """A layout as asked for; ``tp`` None: the GPUs over PP; ``ep`` None: min(4, TP)."""

    pp: int
    tp: int | None = None
    ep: int | None = None
    args: tuple[str, ...] = ()


@dataclass(frozen=True)
class Request:
    """What was asked for.  ``ep_most``: layouts that name no EP get this one, or TP where that is less."""

    layouts: tuple[Wanted, ...]
    concurrency: tuple[int, ...] = CONCURRENCY
    repeats: int = REPEATS
    requests: int = REQUESTS
    ep_most: int | None = None
    baselines: tuple[Path, ...] = ()
    accept: tuple[str, ...] = ()


@dataclass(frozen=True)
class Words:
    """The options of the command line as they were given; None where they were not."""

    pp: str | None
    tp: str | None = None
    ep: int | None = None
    concurrency: str | None = None
    repeats: int | None = None
    requests: int | None = None
    layout_args: Sequence[str] = ()
    baselines: Sequence[Path] = ()
    accept: Sequence[str] = ()


def request_of(words: Words, settings: Settings, before: Record | None) -> Request:
    """The request; what is not given is as in the sweep to take up (``before``), else the default.

    Raises InputError for what cannot be understood, and for a new sweep without depths.
    """
    if words.pp is not None:
        pairs = depths_and_ranks(words.pp, words.tp)
        extra = layout_args(words.layout_args, [pp for pp, _ in pairs])
        kept = {each.pp: tuple(each.args) for each in before.layouts} if before else {}
        layouts = tuple(Wanted(pp, tp, None, extra.get(pp, kept.get(pp, ()))) for pp, tp in pairs)
    elif before is not None:
        extra = layout_args(words.layout_args, [each.pp for each in before.layouts])
        layouts = tuple(
            Wanted(each.pp, each.tp, each.ep, extra.get(each.pp, tuple(each.args))) for each in before.layouts
        )
    else:
        raise InputError("which pipeline depths? --pp 2,4,8,16 (to see an earlier sweep: nsysk3 sweep report DIR)")
    levels = numbers(words.concurrency, "--concurrency") if words.concurrency else None
    return Request(
        layouts,
        levels or (tuple(before.concurrency) if before else CONCURRENCY),
        words.repeats or (before.repeats if before else REPEATS),
        words.requests or (before and before.requests) or settings.load.requests or REQUESTS,
        words.ep,
        tuple(words.baselines),
        tuple(words.accept),
    )


def depths_and_ranks(pp: str, tp: str | None) -> list[tuple[int, int | None]]:
    """``--pp`` and ``--tp`` as pairs; TP is None where it is to be found out."""
    depths = numbers(pp, "--pp")
    if tp is None:
        return [(depth, None) for depth in depths]
    ranks = numbers(tp, "--tp", once=False)
    if len(ranks) == 1:
        ranks *= len(depths)
    if len(ranks) != len(depths):
        raise InputError(f"--tp {tp}: one number, or one for each of the {len(depths)} depths of --pp")
    return list(zip(depths, ranks, strict=True))


def newest(place: Path) -> Path | None:
    """The latest sweep in a folder, by the name that sweeps give themselves."""
    found = [path for path in place.glob("sweep-*") if Folder(path).manifest.is_file()]
    return max(found, default=None, key=lambda path: path.name)


def sweep_to_resume(out: Path | None) -> tuple[Path, Record]:
    """The folder of the sweep to take up, by default the newest here, and its record; InputError where none is."""
    folder = out or newest(Path())
    record = read_record(Folder(folder)) if folder else None
    if folder is None or record is None:
        raise InputError(f"--resume: no sweep in {folder or 'any sweep-* folder here'}; name its folder with --out")
    return folder, record
