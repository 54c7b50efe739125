"""Several processes of this machine."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from nsysk3.errors import MissingToolError
from nsysk3.run.scratch import Scratch, to_its_end
from nsysk3.scale.crew import Team
from nsysk3.scale.shelf import Shelf
from nsysk3.scale.work import Done, tell, work

_THREADS = "POLARS_MAX_THREADS"
_READY = "ready"
# A worker that somebody has stopped (kill -STOP) is ended after so long, s.
_STOPPED_S = 30


@dataclass
class _Member:
    process: BaseProcess
    line: Connection
    report: int | None = None
    ready: bool = False
    stopped_s: int = 0


class Pool(Team):
    """``count`` processes that share one scratch folder; polars' threads are shared out among them."""

    shared = True

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count
        self._scratch: Scratch | None = None
        self._members: dict[str, _Member] = {}

    def begin(self) -> None:
        """See Crew."""
        super().begin()
        if self._scratch is None:
            self._scratch = Scratch()
            self._end = weakref.finalize(self, _ended, self._members, self._scratch)
        for place in self._scratch.path.iterdir():
            shutil.rmtree(place, ignore_errors=True)

    def members(self) -> Sequence[str]:
        """See Team; the dead are replaced.  There are no more than reports, for each does one at a time."""
        for number in range(min(self._count, self._reports or self._count)):
            if str(number) not in self._members:
                to_its_end(partial(self._start, str(number)))  # one that is started by half would complain
        return list(self._members)

    def give(self, member: str, report: int, number: int, calls: Sequence[bytes]) -> None:
        """See Team."""
        each = self._members[member]
        each.report = report
        with suppress(OSError):  # dead: its sentinel says so
            each.line.send((report, number, list(calls)))

    def answered(self) -> Iterator[tuple[str, int, Done | None]]:
        """See Team."""
        lines = {each.line: name for name, each in self._members.items()}
        answering = wait(list(lines), timeout=1)
        if not answering:
            self._end_stopped()
        for line in answering:
            name = lines[line]  # type: ignore[index]
            each = self._members[name]
            done: Done | str | None = None
            with suppress(EOFError, OSError):
                done = each.line.recv()
            if isinstance(done, BaseException):
                raise done
            if done == _READY:
                each.ready = True
                continue
            report, each.report = each.report, None
            if not isinstance(done, Done):
                self._members.pop(name)
                each.process.join()
                if not each.ready and each.process.exitcode == 1:  # an exception, and no signal
                    raise MissingToolError(
                        "a worker process could not start; a script that asks for workers must do so under "
                        "`if __name__ == '__main__':`"
                    )
            if report is not None:
                yield name, report, done if isinstance(done, Done) else None

    def _end_stopped(self) -> None:
        """Called after each second without an answer.  Counts those: while we were stopped ourselves time went on."""
        for each in self._members.values():
            if each.report is None:
                continue
            each.stopped_s = each.stopped_s + 1 if _is_stopped(each.process.pid) else 0
            if each.stopped_s == _STOPPED_S:
                tell(
                    f"worker process {each.process.pid} has been stopped for {_STOPPED_S} s while "
                    f"{self._titles[each.report]}; it is ended, another does that"
                )
                each.process.kill()

    def _close(self) -> None:
        if self._scratch is not None:
            self._end()

    def _start(self, name: str) -> None:
        # Not forked: polars has threads.  The number of its threads is fixed when it is imported.
        assert self._scratch is not None
        # Ctrl-C reaches the whole group, and the worker while it still imports.  This thread's mask is the worker's
        # too, unless multiprocessing's tracker, started with the first one, lifts it.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self._scratch.path), daemon=True)
        before = os.environ.get(_THREADS)
        try:
            os.environ[_THREADS] = before or str(max(1, (os.cpu_count() or 1) // self._count))
            process.start()
        finally:
            if before is None:
                os.environ.pop(_THREADS, None)
        theirs.close()
        self._members[name] = _Member(process, ours)


def _is_stopped(pid: int | None) -> bool:
    """Whether a process is stopped; only Linux tells."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0] == "T"
    return False


def _ended(members: dict[str, _Member], scratch: Scratch) -> None:
    for each in members.values():
        each.process.terminate()
    for each in members.values():
        each.process.join(5)
        if each.process.is_alive():
            each.process.kill()
            each.process.join()
        each.line.close()
    members.clear()
    scratch.remove()


def _serve(line: Connection, folder: Path) -> None:
    """The worker: steps as they are asked for, until the other side is gone; if it was killed, so is its scratch."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a closed terminal ends the parent: see the end
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # so that an nsys under way is ended too
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    try:
        with suppress(EOFError, OSError):
            line.send(_READY)
            while True:
                report, number, calls = line.recv()
                answer: Any
                try:
                    answer = work(Shelf(folder), report, number, calls)
                except Exception as error:  # a bug of ours: raised where it is seen
                    answer = error
                line.send(answer)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if not parent.is_alive():
            shutil.rmtree(folder, ignore_errors=True)


def _end_with(parent: BaseProcess) -> None:
    """Do not finish a step that nobody waits for."""
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
