"""Ends the run when the keeper is killed or stuck.  The keeper's: runs on hosts, Python 3.8, standard library only."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import time
from typing import Any

from nsysk3.launch.keeper_possessions import Possessions

LEFT, KILLED = 3, 4  # exit codes: something of the run is left; the keeper was killed
PR_SET_CHILD_SUBREAPER = 36
POLLRDHUP = getattr(select, "POLLRDHUP", 0x2000)


def guard(keeper: int, notes: int, settings: dict[str, Any]) -> int:
    """Wait for the keeper; end the run when it did not.  Gives an exit code."""
    waker, _ = wakeup()
    poller = select.poll()
    poller.register(waker, select.POLLIN)
    poller.register(0, POLLRDHUP)
    patience: float | None = None
    while True:
        for descriptor, _event in poller.poll(1000):
            if descriptor == 0:
                poller.unregister(0)
                patience = time.monotonic() + settings["stuck_s"]
            else:
                for signum in drain(waker):
                    if signum in (signal.SIGTERM, signal.SIGHUP):
                        os.kill(keeper, signal.SIGTERM)
        try:
            pid, status = os.waitpid(keeper, os.WNOHANG)
        except ChildProcessError:
            return 0
        if pid == keeper:
            break
        if patience is not None and time.monotonic() > patience:
            os.kill(keeper, signal.SIGKILL)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) in (0, LEFT):
        return os.WEXITSTATUS(status)  # it did what could be done
    own = Possessions(settings)
    for note in drain(notes).splitlines():
        own.note(*json.loads(note))
    left = own.end(0, lambda: True)
    for line in left:
        print(f"nsysk3: {line}", file=sys.stderr)
    return LEFT if left else KILLED


def wakeup() -> tuple[int, int]:
    """A pipe in which the number of every signal arrives that this process reacts to."""
    waker, wake = os.pipe()
    for descriptor in (waker, wake):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGCHLD):
        signal.signal(signum, lambda *_: None)  # not ignored: that would be inherited
    return waker, wake


def drain(descriptor: int) -> bytes:
    """What there is to read, without waiting."""
    data = b""
    try:
        while True:
            more = os.read(descriptor, 4096)
            if not more:
                return data
            data += more
    except BlockingIOError:
        return data


def become_subreaper() -> None:
    """Descendants that lose their parent come to this process, not to init."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "this kernel has no child subreaper")
