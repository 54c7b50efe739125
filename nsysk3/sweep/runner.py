"""Run a sweep: one service after the other, each repeat kept as soon as it is over."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from nsysk3.errors import InterruptedRunError
from nsysk3.sweep.job import Job
from nsysk3.sweep.matrix import Layout
from nsysk3.sweep.serve import LayoutRun

if TYPE_CHECKING:
    from nsysk3.launch.interrupts import Presses
    from nsysk3.launch.plan import Plan


def run_sweep(job: Job) -> list[str]:
    """Run what is left of a sweep.  Returns the layouts that failed, each with its cause.

    A layout that fails is written down and the next one is run.  Whatever happens, what was measured is kept and the
    hosts are cleaned.  Raises InterruptedRunError on Ctrl-C, SIGTERM and SIGHUP.
    """
    from nsysk3.launch.interrupts import interrupts

    job = replace(job, say=_unbreakable(job.say))
    failed: list[str] = []
    job.record.status = "running"
    with interrupts() as presses:
        try:
            for run_id in job.killed:
                _end(job, run_id)
            for layout, plan in zip(job.matrix.layouts, job.plans, strict=True):
                failed += _run_layout(job, layout, plan, presses)
            job.record.status = "failed" if failed else "done"
        except KeyboardInterrupt:
            presses.ignore()
            job.record.status = "interrupted"
            raise InterruptedRunError(
                f"interrupted ({presses.name or 'Ctrl-C'}); what was measured is kept, nothing is left running. Go on "
                f"with: nsysk3 sweep --resume --out {job.folder.path}"
            ) from None
        except BaseException:
            presses.ignore()
            job.record.status = "interrupted"
            raise
        finally:
            job.save()
    return failed


def _end(job: Job, run_id: str) -> None:
    """End what is left of a run whose nsysk3 was killed."""
    from nsysk3.launch.leftovers import end_leftovers

    settings = job.plans[0].settings
    job.say(f"{run_id} was cut short: looking whether anything of it is left")
    for left in end_leftovers(settings, run_id, settings.cluster.hosts):
        job.say(f"WARNING: {left.host}: could not be ended: {left.kind} {left.what}")


def _run_layout(job: Job, layout: Layout, plan: Plan, presses: Presses) -> list[str]:
    """What is left of one layout; its failure, if any."""
    kept, unproven = job.folder.looked_at()
    cells = [cell for cell in job.matrix.cells(layout) if cell.key not in kept]
    for cell in cells:
        if why := unproven.get(cell.key):
            job.say(f"{layout.label}: {why}: C={cell.concurrency} repeat {cell.repeat} is measured again")
    if not cells:
        job.say(f"{layout.label}: all its repeats are there")
        return []
    cause = LayoutRun(job, layout, plan, presses).run(cells)
    return [f"{layout.label}: {cause.message}"] if cause else []


def _unbreakable(say: Callable[[str], None]) -> Callable[[str], None]:
    """A terminal that went away must not keep a sweep from going on and cleaning up."""

    def told(text: str) -> None:
        with suppress(OSError):
            say(text)

    return told
