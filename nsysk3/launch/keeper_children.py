"""Start processes and learn how they ended.  The keeper's: runs on hosts, Python 3.8, standard library only."""

from __future__ import annotations

import os
import select
import subprocess
import threading
import time
from typing import Any

from nsysk3.launch.keeper_processes import end, family

KEPT = 512 << 10  # bytes kept of the beginning and of the end of a command's output
DRAIN_S = 0.5  # longest that what a command left running may go on filling its pipes


class Child:
    """A process that was started, and its exit code once it has one: -N where signal N ended it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.code: int | None = None


class Children:
    """Starts processes, each in a session of its own, and is the only one that reaps, so no exit code is lost."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.running: dict[int, Child] = {}
        self.closed = False

    def start(self, argv: list[str], helper: bool = False, **options: Any) -> Child:
        """As Popen; once ``closed``, only helpers of the ending are started."""
        with self.lock:
            if self.closed and not helper:
                raise OSError("the run is being ended")
            process = subprocess.Popen(argv, start_new_session=True, **options)
            process.returncode = 0  # or Popen would reap it
            child = self.running[process.pid] = Child(process.pid)
            return child

    def close(self) -> None:
        """From now on only helpers are started."""
        with self.lock:
            self.closed = True

    def reap(self) -> None:
        """Take the exit codes of all that ended: those started here, and orphans that they left us."""
        with self.lock:
            while True:
                try:
                    pid, status = os.waitpid(-1, os.WNOHANG)
                except ChildProcessError:
                    return
                if pid == 0:
                    return
                child = self.running.pop(pid, None)
                if child is not None:
                    child.code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)

    def pause(self, seconds: float) -> None:
        """Wait, then reap."""
        time.sleep(seconds)
        self.reap()

    def run(
        self,
        argv: list[str],
        timeout_s: float,
        data: bytes = b"",
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        helper: bool = False,
    ) -> tuple[int, str, str]:
        """Exit code, output and errors of a command; 124 where it took too long, 126 and 127 as in a shell."""
        given = os.memfd_create("stdin")
        pipes = [os.pipe(), os.pipe()]
        kept = {pipe[0]: bytearray() for pipe in pipes}
        try:
            with os.fdopen(os.dup(given), "wb") as file:
                file.write(data)
            os.lseek(given, 0, os.SEEK_SET)
            child = self.start(argv, helper, stdin=given, stdout=pipes[0][1], stderr=pipes[1][1], env=env, cwd=cwd)
        except OSError as error:
            for descriptor in kept:
                os.close(descriptor)
            return (126 if isinstance(error, PermissionError) else 127), "", failure(argv, error)
        finally:
            for descriptor in (given, pipes[0][1], pipes[1][1]):
                os.close(descriptor)
        in_time = self._collect(child, kept, time.monotonic() + timeout_s)
        out, err = (bytes(each).decode(errors="replace") for each in kept.values())
        if in_time and child.code is not None:
            return child.code, out, err
        end(lambda: family(lambda stat: stat.pid == child.pid, {os.getpid()}), 0, 0, self.pause, lambda: True)
        return 124, out, f"{err.rstrip()}\ntimed out after {timeout_s:g} s".lstrip()

    def _collect(self, child: Child, kept: dict[int, bytearray], until: float) -> bool:
        """Read until the child has ended; whether that was in time.  What it left running may hold the pipes open."""
        poller = select.poll()
        reading = set(kept)
        for descriptor in kept:
            os.set_blocking(descriptor, False)
            poller.register(descriptor, select.POLLIN)
        ended: float | None = None
        try:
            while True:
                self.reap()
                now = time.monotonic()
                if child.code is not None and ended is None:
                    ended = now
                ready = poller.poll(0 if ended is not None else 50) if reading else []
                for descriptor, _ in ready:
                    data = os.read(descriptor, 1 << 16)
                    if data:
                        keep(kept[descriptor], data)
                    else:
                        poller.unregister(descriptor)
                        reading.discard(descriptor)
                if ended is not None and (not ready or now > ended + DRAIN_S):
                    return True
                if ended is None and now > until:
                    return False
                if not reading and ended is None:
                    time.sleep(0.01)
        finally:
            for descriptor in kept:
                os.close(descriptor)


def keep(text: bytearray, data: bytes) -> None:
    """Add to a text of which only the beginning and the end are kept."""
    text += data
    if len(text) > 3 * KEPT:
        text[KEPT:-KEPT] = b"\n[...]\n"


def failure(argv: list[str], error: OSError) -> str:
    """Why a command could not be started, in one line."""
    name = error.filename or argv[0]
    return f"{os.fsdecode(name) if isinstance(name, bytes) else name}: {error.strerror or error}"
