"""A rank's process: ``python -m nsysk3.workload.rank DOCUMENT``, started by the launcher and no one else."""

from __future__ import annotations

import ctypes
import faulthandler
import json
import logging
import os
import queue
import signal
import sys
import threading
import time
from array import array
from base64 import b64decode
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from nsysk3.errors import NsysK3Error
from nsysk3.workload.hub import Link, Message
from nsysk3.workload.options import Options
from nsysk3.workload.scheduler import MicroBatch, Piece

if TYPE_CHECKING:
    from nsysk3.workload.setup import Rank

logger = logging.getLogger("nsysk3.workload")
# From being told to leave to leaving whatever happens: what runs is finished, communicators are closed.
LEAVE_S = 20.0
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


@dataclass(frozen=True)
class Task:
    """What the launcher says."""

    options: Options
    rank: int
    local: int
    launcher: int
    store: tuple[str, int]
    store_fd: int | None
    hub: tuple[str, int] | None

    @classmethod
    def read(cls, text: str) -> Task:
        """From the launcher's document."""
        document = json.loads(text)
        options, hub = Options(**document.pop("options")), document.pop("hub")
        store = tuple(document.pop("store"))
        return cls(options=options, store=store, hub=None if hub is None else tuple(hub), **document)


class Leaving:
    """Ways out of a process whose main thread may wait in a library for a peer that is gone."""

    def __init__(self) -> None:
        self.link: Link | None = None
        self.started = False
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()

    def watch_signals(self) -> None:
        """Take SIGTERM in a thread of its own: Python runs handlers in the main one only."""
        threading.Thread(target=self._signalled, name="signals", daemon=True).start()

    def soon(self) -> None:
        """Leave by force if the process is still there in a while."""
        with self._lock:
            if self._timer is None:
                self._timer = threading.Timer(LEAVE_S, self.now, [1, "did not end in time"])
                self._timer.daemon = True
                self._timer.start()

    def now(self, code: int, why: str) -> NoReturn:
        """Leave at once; the other ranks' launcher sees to them."""
        if code:
            logger.error("%s", why)
        logging.shutdown()
        sys.stderr.flush()
        os._exit(code)

    def _signalled(self) -> None:
        signal.sigwait({signal.SIGTERM})
        if self.link is None or not self.started:
            self.now(0, "told to stop")
        self.link.send({"kind": "leaving"})
        self.soon()


def main() -> int:
    """Serve micro-batches until told to leave."""
    task = Task.read(sys.argv[1])
    follow_launcher(task.launcher)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    stage, tp = divmod(task.rank, task.options.tp_size)
    name = f"PP{stage} TP{tp}"
    logging.basicConfig(
        level=logging.INFO, format=f"[%(asctime)s {name}] %(message)s", datefmt="%Y-%m-%d %H:%M:%S", stream=sys.stderr
    )
    ctypes.CDLL(None).prctl(_PR_SET_NAME, f"nsysk3:{name}".replace(" ", "_").encode(), 0, 0, 0)
    leaving = Leaving()
    leaving.watch_signals()
    try:
        serve(task, leaving)
    except NsysK3Error as error:
        leaving.now(error.exit_code, str(error))
    except BaseException:
        logger.exception("the rank failed")
        leaving.now(1, "rank ends")
    return 0


def follow_launcher(launcher: int) -> None:
    """Die with the launcher, however it dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher:  # it was gone before
        os._exit(1)


def serve(task: Task, leaving: Leaving) -> None:
    """Set up and run; returns when told to leave, with everything finished."""
    from nsysk3.workload.setup import set_up

    inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
    rank = set_up(
        task,
        on_done=lambda number, tokens: _tell_done(leaving, task.rank, number, tokens),
        on_stopped=lambda: _tell(leaving, {"kind": "capture", "state": "stopped"}),
        on_failure=lambda error: _failed(leaving, error),
    )
    link = leaving.link = Link(rank.hub, rank.token, task.rank, task.options.dist_timeout)

    def read() -> None:
        for message in link.messages():
            if message["kind"] == "state":
                link.send({"kind": "state", **rank.state()})
            else:
                if message["kind"] == "exit":
                    leaving.soon()
                inbox.put(message)
        inbox.put({"kind": "lost"})
        time.sleep(LEAVE_S)
        leaving.now(1, "the launcher of the first node is gone")

    threading.Thread(target=read, name="inbox", daemon=True).start()
    threading.Thread(target=_watchdog, args=(rank, task.options.watchdog_timeout, leaving), daemon=True).start()
    link.send({"kind": "ready", **rank.description()})
    leaving.started = True
    while (message := inbox.get())["kind"] not in ("exit", "lost"):
        if message["kind"] == "batch":
            rank.engine.run(read_batch(message))
        elif message["do"] == "start":
            rank.marks.start(message["steps"])
            link.send({"kind": "capture", "state": "started"})
        else:
            rank.marks.stop()
    if message["kind"] == "lost":
        leaving.now(1, "the launcher of the first node is gone")
    rank.close()


def read_batch(message: Message) -> MicroBatch:
    """A micro-batch from the hub; without token ids in all stages but the first."""
    ids = array("i")
    ids.frombytes(b64decode(message.get("ids", "")))
    pieces = tuple(Piece(*numbers) for numbers in message["pieces"])
    return MicroBatch(message["number"], message["slot"], message["mode"], pieces, tuple(message["free"]), ids)


def _tell(leaving: Leaving, message: Message) -> None:
    if leaving.link is not None:
        leaving.link.send(message)


def _tell_done(leaving: Leaving, rank: int, number: int, tokens: list[int] | None) -> None:
    if rank == 0:
        _tell(leaving, {"kind": "done", "number": number, "tokens": tokens})


def _failed(leaving: Leaving, error: Exception) -> None:
    logger.error("a micro-batch failed", exc_info=error)
    leaving.now(1, "rank ends")


def _watchdog(rank: Rank, limit_s: float, leaving: Leaving) -> None:
    """End the process when a micro-batch takes too long: a collective that waits for a rank that is stuck, say."""
    while True:
        time.sleep(min(limit_s / 4, 5.0))
        since = rank.engine.oldest
        if since is not None and time.monotonic() - since > limit_s:
            faulthandler.dump_traceback(all_threads=True)
            leaving.now(1, f"Scheduler watchdog timeout (self.watchdog_timeout={limit_s:g}, self.soft=False)")


if __name__ == "__main__":
    sys.exit(main())
