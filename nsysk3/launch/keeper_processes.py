"""Find and end the processes of a run and no others.  The keeper's: runs on hosts, Python 3.8, standard library only.

A process belongs to a run because it descends from the keeper or was started with the run's mark in its environment.
Neither is enough alone: what detaches loses its parent, and setproctitle (SGLang's schedulers) overwrites environments.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

KILL_S = 10.0  # longest wait for what was killed: it may be writing to a disk that does not answer
# They wait for the server and then finish a report or clean up, so they are told to end last.
WRAPPER = re.compile(r"nsys(-\w+)?|QdstrmImporter|docker|podman|conmon|srun")


class Stat(NamedTuple):
    """A process: its number means it only together with its start, in clock ticks since boot."""

    pid: int
    start: int
    parent: int
    session: int


def read_stat(pid: int) -> Stat | None:
    """None where there is no such process, or where it is dead and only waits to be reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        # The first thread of a process may be dead while others live.
        if fields[0] in (b"Z", b"X") and sum(1 for _ in Path(f"/proc/{pid}/task").iterdir()) < 2:
            return None
        return Stat(pid, int(fields[19]), int(fields[1]), int(fields[3]))
    except (OSError, IndexError):
        return None


def words_of(pid: int) -> list[str]:
    """A process's command line."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def describe(stat: Stat) -> str:
    """A process in a few words: no arguments, which may hold secrets."""
    return f"process {stat.pid} ({' '.join(words_of(stat.pid)[:3])[:80].strip() or '?'})"


def carries(pid: int, mark: bytes) -> bool:
    """Whether a process was started with this in its environment; False where that cannot be read."""
    try:
        return b"\0" + mark in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def family(first: Callable[[Stat], bool], spare: set[int]) -> dict[int, Stat]:
    """Processes for which ``first`` holds, all that they started, and the sessions that they lead."""
    listed = (read_stat(int(entry.name)) for entry in os.scandir("/proc") if entry.name.isdigit())
    alive = {stat.pid: stat for stat in listed if stat is not None and stat.pid not in spare}
    found = {pid for pid, stat in alive.items() if first(stat)}
    while True:
        more = {pid for pid, stat in alive.items() if pid not in found and {stat.parent, stat.session} & found}
        if not more:
            return {pid: alive[pid] for pid in found}
        found |= more


def ancestors(pid: int) -> set[int]:
    """A process, its parent, and so on."""
    found: set[int] = set()
    while pid > 1 and pid not in found:
        found.add(pid)
        stat = read_stat(pid)
        pid = stat.parent if stat is not None else 0
    return found


def is_wrapper(stat: Stat) -> bool:
    """Whether this is a profiler or a container tool, as a program or as a script."""
    return any(WRAPPER.fullmatch(word.rpartition("/")[2]) for word in words_of(stat.pid)[:2])


def servers(found: dict[int, Stat]) -> dict[int, Stat]:
    """Without profilers and container tools."""
    return {pid: stat for pid, stat in found.items() if not is_wrapper(stat)}


def tops(found: dict[int, Stat]) -> dict[int, Stat]:
    """Servers that no other server started: they know how to end the others."""
    inner = servers(found)
    return {pid: stat for pid, stat in inner.items() if stat.parent not in inner}


def everything(found: dict[int, Stat]) -> dict[int, Stat]:
    """All of them."""
    return found


def send(stat: Stat, signum: int) -> bool:
    """Signal exactly this process, never a later one that got its number; False where that could not be done."""
    handle = None
    # Python 3.9 on Linux 5.3 can hold on to a process; without, a moment remains in which it may be replaced.
    if hasattr(os, "pidfd_open"):
        try:
            handle = os.pidfd_open(stat.pid)
        except OSError:
            handle = None
    try:
        now = read_stat(stat.pid)
        if now is None or now.start != stat.start:
            return False
        if handle is None:
            os.kill(stat.pid, signum)
        else:
            signal.pidfd_send_signal(handle, signum)
    except OSError:  # it has ended, or is another user's
        return False
    finally:
        if handle is not None:
            os.close(handle)
    return True


def end(
    find: Callable[[], dict[int, Stat]],
    grace_s: float,
    report_s: float,
    pause: Callable[[float], None],
    hurried: Callable[[], bool],
) -> dict[int, Stat]:
    """End what ``find`` finds, a server before its profiler; gives what is still there.

    ``grace_s``: how long the server may take; 0 kills all at once.  ``report_s``: how long its profiler may take then.
    ``pause`` waits some seconds; ``hurried`` says that there is no time to be gentle any more.
    """

    def step(
        signum: int,
        choose: Callable[[dict[int, Stat]], dict[int, Stat]],
        until_gone: Callable[[dict[int, Stat]], dict[int, Stat]],
        wait_s: float,
        hurried: Callable[[], bool] = hurried,
    ) -> None:
        told: set[Stat] = set()
        began = time.monotonic()
        while not hurried():
            found = find()
            if not until_gone(found):
                break
            for stat in set(choose(found).values()) - told:
                send(stat, signum)
                told.add(stat)
            passed = time.monotonic() - began
            if passed >= wait_s:
                break
            pause(min(0.5, 0.02 + passed / 10))

    if grace_s > 0:
        step(signal.SIGTERM, tops, servers, grace_s / 2)
        step(signal.SIGTERM, servers, servers, grace_s / 2)
        step(signal.SIGKILL, servers, everything, report_s)
        step(signal.SIGTERM, everything, everything, min(grace_s, 2.0))
    step(signal.SIGKILL, everything, everything, KILL_S, lambda: False)
    return find()
