"""A sweep made ready: every layout planned and checked, an earlier sweep taken up where it stopped."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from nsysk3 import __version__
from nsysk3.errors import InputError
from nsysk3.run.config import Settings
from nsysk3.run.words import counted
from nsysk3.sweep.folder import DONE, Folder
from nsysk3.sweep.job import Job, now
from nsysk3.sweep.matrix import Layout, Matrix
from nsysk3.sweep.merge import BASELINES, changes, check_asked, check_merge, keep_baseline, read_sweep
from nsysk3.sweep.nccl_table import NCCL_CSV
from nsysk3.sweep.record import LayoutRecord, Record, flat_settings, make_room, read_record
from nsysk3.sweep.request import Request

if TYPE_CHECKING:
    from nsysk3.launch.plan import Plan

RADIX = "--disable-radix-cache"
Key = tuple[int, int, int]


def sweep_settings(settings: Settings) -> Settings:
    """The settings that a sweep's servers get: no markers, for they are for traces, and SGLang without prefix cache."""
    server = settings.server
    args = list(server.args)
    if server.engine == "sglang" and RADIX not in args:
        args.append(RADIX)
    return settings.model_copy(update={"server": server.model_copy(update={"args": args, "markers": False})})


def make_plans(settings: Settings, wanted: Request, run_id: str, starts: Mapping[Key, int]) -> list[Plan]:
    """The plan of every layout; InputError for the first that cannot run.  ``starts``: how often each was started."""
    from nsysk3.launch.plan import make_plan

    load = settings.load.model_copy(update={"concurrency": max(wanted.concurrency), "requests": wanted.requests})
    plan_of = partial(make_plan, settings.model_copy(update={"load": load}), profiled=False)
    plans: dict[Key, Plan] = {}
    for each in wanted.layouts:
        plan = plan_of(pp=each.pp, tp=each.tp, ep=each.ep, run_id=run_id, extra_args=each.args)
        ep = min(wanted.ep_most, plan.tp) if wanted.ep_most and each.ep is None else plan.ep
        key = (plan.pp, plan.tp, ep)
        again = starts.get(key, 0) + 1
        name = f"{run_id}-pp{plan.pp}" + (f"-{again}" if again > 1 else "")
        if key in plans:
            raise InputError(f"PP{key[0]}/TP{key[1]}/EP{key[2]} is there twice")
        plans[key] = plan_of(pp=plan.pp, tp=plan.tp, ep=ep, run_id=name, extra_args=each.args)
    return list(plans.values())


def new_run_id() -> str:
    """A name for a sweep that starts now, which no other has: it marks processes and folders on hosts."""
    return f"sweep-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def prepare(
    settings: Settings,
    wanted: Request,
    path: Path | None,
    *,
    resume: bool,
    say: Callable[[str], None],
    write: bool = True,
) -> Job:
    """Everything checked, nothing started; writes only copies of baselines (``write``), and those last.

    ``path`` None: a new folder here.

    Raises InputError where a layout cannot run, the folder holds another sweep, or a setting differs from those of the
    sweep to take up: then each that differs is named.
    """
    started = new_run_id()
    path = path or Path(started)
    folder = Folder(path)
    settings = sweep_settings(settings)
    before = read_record(folder)
    if before is None and (strange := _strange(path)):
        raise InputError(f"{path}: holds something else than a sweep ({strange}); give another --out")
    if before is not None and not resume:
        raise InputError(f"{path}: holds a sweep already; --resume takes it up, another --out starts a new one")
    run_id = before.run_id if before and before.run_id else started
    others = [read_sweep(baseline) for baseline in wanted.baselines]
    # Before the plans: what is misspelt is not worth a look at any host or model.
    asked = (before or Record()).model_copy(update={"settings": flat_settings(settings)})
    check_asked(wanted.accept, folder, asked, others)
    earlier = before.layouts if before else []
    starts = {each.layout.key: max((start.attempt for start in each.starts), default=0) for each in earlier}
    plans = make_plans(settings, wanted, run_id, starts)
    layouts = tuple(Layout(plan.pp, plan.tp, plan.ep, plan.extra_args) for plan in plans)
    matrix = Matrix(layouts, wanted.concurrency, wanted.repeats, wanted.requests)
    record = _record(settings, matrix, run_id, before)
    if before:
        _refuse_changes(folder, before, record, layouts)
    for other in others:
        found = check_merge(record, other, wanted.accept)
        record.accepted = list(dict.fromkeys([*record.accepted, *wanted.accept]))
        same = f"{counted(len(found.same), 'item')} {'is' if len(found.same) == 1 else 'are'} the same"
        say(f"{found.folder}: {same}, {len(found.not_known)} not known on one side")
        for text in found.accepted:
            say(f"{found.folder}: accepted although {text}")
    for other in others if write else ():
        keep_baseline(folder, other)
    killed = [start.run_id for each in earlier for start in each.starts if start.status == "running" and start.run_id]
    return Job(folder, record, matrix, plans, say, tuple(killed))


def _strange(path: Path) -> str | None:
    """Something in a folder that no sweep begins with, and neither nccl-bench nor a sweep that never started left."""
    for each in sorted(path.iterdir()) if path.is_dir() else ():
        ours = each.name in (BASELINES, NCCL_CSV) or each.match("nccl_*.log")
        if not ours and not (each.is_dir() and not any(each.iterdir())):
            return each.name
    return None


def _record(settings: Settings, matrix: Matrix, run_id: str, before: Record | None) -> Record:
    """The record of the sweep as asked for now, with what an earlier part of it found out."""
    record = before.model_copy(deep=True) if before else Record(run_id=run_id, created=now())
    record.nsysk3_version = __version__
    record.settings = flat_settings(settings)
    record.requests = matrix.requests
    record.concurrency = sorted({*record.concurrency, *matrix.concurrency})
    record.repeats = max(matrix.repeats, before.repeats if before else 0)
    for each in record.layouts:
        for start in each.starts:
            if start.status == "running":  # whoever wrote that was killed
                start.status = "interrupted"
    for layout in matrix.layouts:
        if record.of(layout) is None:
            record.layouts.append(LayoutRecord(pp=layout.pp, tp=layout.tp, ep=layout.ep, args=list(layout.args)))
    record.layouts.sort(key=lambda each: each.layout.key)
    return record


def _refuse_changes(folder: Folder, before: Record, now: Record, layouts: Sequence[Layout]) -> None:
    """The matrix may grow; what was measured must have been measured with the settings of now."""
    started = any(each.starts for each in before.layouts)
    if not started:
        return
    found = [f"{name} was {was}, is {will} now" for name, (was, will) in changes(before, now).items()]
    done = {row.layout.key for row in folder.results() if row.status == DONE}
    for layout in layouts:
        earlier = before.of(layout)
        if earlier and layout.key in done and tuple(earlier.args) != layout.args:
            was, will = (json.dumps(" ".join(args)) for args in (earlier.args, layout.args))
            way = "and repeats of it are done; to measure it anew, delete its rows in results.csv"
            found.append(f"--layout-args of {layout.label} was {was}, is {will} now ({way})")
    if found:
        raise InputError(f"{folder.path}: cannot be taken up, settings differ from its own: {'; '.join(found)}")


@contextmanager
def only_one(folder: Folder) -> Iterator[None]:
    """Holds the folder; raises InputError when another sweep that runs now has it."""
    make_room(folder.manifest)
    place = os.open(folder.path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise InputError(f"{folder.path}: another sweep is running in it") from error
    finally:
        os.close(place)
