"""Follow the processes of a server: their logs come here as they are written, and a death is noticed at once."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from nsysk3.errors import NsysK3Error
from nsysk3.launch.failures import TAIL_BYTES, Failure, explain
from nsysk3.launch.plan import NodePlan

if TYPE_CHECKING:
    from nsysk3.launch.hosts import Host

INTERVAL_S = 0.25
# A server that is told by a child that it failed ends; under nsys, or with a hung rank, it may not.
DYING_S = 20.0
# What one node died of is often told by another: it gets so long to say it.
TELL_S = 1.5
_DYING = re.compile(
    r"Received sigquit from a child process|scheduler died during initialization|Scheduler hit an exception"
)
# nsys and tqdm end the lines of their progress bars with a carriage return.
_LINE_END = re.compile(r"[\r\n]+")
_T = TypeVar("_T")


@dataclass
class Node:
    """One node of a server: its plan, its host, and the copy of its log that grows on this machine."""

    plan: NodePlan
    host: Host
    log: Path
    code: int | None = None
    offset: int = 0
    rest: str = ""
    lost: str | None = None
    dying_since: float | None = None
    unwritten: str | None = None
    """Why the copy of the log is not whole."""

    def text(self, since: int = 0) -> str:
        """The log from byte ``since``, of a long one its end."""
        with suppress(OSError), self.log.open("rb") as file:
            end = file.seek(0, 2)
            file.seek(max(since, end - TAIL_BYTES))
            return file.read().decode("utf-8", "replace")
        return ""

    def size(self) -> int:
        """Bytes of the log so far: a mark for ``text``."""
        try:
            return self.log.stat().st_size
        except OSError:
            return 0


class Follower:
    """A thread that copies the logs, polls the processes and wakes whoever waits for something.

    ``name``: what the hosts know the processes by.  ``on_line`` gets each whole line with its node, in the thread;
    ``hide`` takes secrets out of whole lines before anybody sees them.
    """

    def __init__(
        self,
        name: str,
        nodes: Sequence[Node],
        on_line: Callable[[Node, str], None],
        hide: Callable[[str], str] = lambda text: text,
    ) -> None:
        self.nodes = nodes
        self._hide = hide
        self._name = name
        self.failure: Failure | None = None
        self.failed: Node | None = None
        self._on_line = on_line
        self._changed = threading.Condition()
        self._end = False
        self._expect_end = False
        self._first_death: float | None = None
        self._thread = threading.Thread(target=self._follow, name="nsysk3-follow", daemon=True)

    def start(self) -> None:
        """Begin to follow."""
        self._thread.start()

    def stopping(self) -> None:
        """From now on processes are meant to end: no failure is seen in it."""
        self._expect_end = True

    def stop(self) -> None:
        """Copy what is left of the logs and end."""
        self._end = True
        if self._thread.ident is not None:  # else a node could not be started, so nobody followed any
            self._thread.join(30)

    def wait(self, ready: Callable[[], _T | None], timeout_s: float, *, fail: bool = True) -> _T | None:
        """Wait until ``ready`` returns something, None when it did not within the time.

        It is asked a few times a second.  ``fail``: return as soon as the server fails, too.
        """
        end = time.monotonic() + timeout_s
        while True:
            if found := ready():
                return found
            left = end - time.monotonic()
            if left <= 0 or (fail and self.failure):
                return None
            with self._changed:
                self._changed.wait(min(left, 2 * INTERVAL_S))

    def wake(self) -> None:
        """Let whoever waits ask again now."""
        with self._changed:
            self._changed.notify_all()

    def _follow(self) -> None:
        while True:
            last = self._end
            for node in self.nodes:
                self._look_at(node)
            if self.failure is None and not self._expect_end:
                self._judge()
            self.wake()
            if last:
                return
            time.sleep(INTERVAL_S)

    def _look_at(self, node: Node) -> None:
        if node.lost:
            return
        try:
            code = node.host.poll(self._name)  # before the log: what an ended process wrote is all there
            while True:
                text, node.offset = node.host.tail(self._name, node.offset)
                if not text:
                    break
                self._keep(node, text)
            if code is not None:
                self._keep(node, "", last=True)
            node.code = code
        except NsysK3Error as error:
            node.lost = str(error)

    def _keep(self, node: Node, text: str, *, last: bool = False) -> None:
        """Take what a log has more; its last line, if it is not whole, with what follows."""
        text = node.rest + text
        end = len(text) if last else max(text.rfind("\n"), text.rfind("\r")) + 1
        whole, node.rest = self._hide(text[:end]), text[end:]
        if not whole:
            return
        try:
            with node.log.open("a", encoding="utf-8", errors="replace", newline="") as file:
                file.write(whole)
        except OSError as error:  # a full disk, mostly: the server is followed all the same
            node.unwritten = error.strerror or str(error)
        for line in filter(str.strip, _LINE_END.split(whole)):
            if node.dying_since is None and _DYING.search(line):
                node.dying_since = time.monotonic()
            self._on_line(node, line)

    def _judge(self) -> None:
        """Whether the server has failed, and on which node."""
        now = time.monotonic()
        for node in self.nodes:
            if node.lost:
                self.failed = node
                self.failure = Failure(
                    "host-lost",
                    node.lost,
                    "what ran there ends by itself within a minute or two; `nsysk3 cleanup RUN` looks again",
                )
                return
        ended = [node for node in self.nodes if node.code is not None]
        if ended and len(ended) < len(self.nodes):
            self._first_death = self._first_death or now
            if now < self._first_death + TELL_S:
                return
        dying = [node for node in self.nodes if node.dying_since and now > node.dying_since + DYING_S]
        if ended or dying:
            self.failed = (ended or dying)[0]
            self.failure = explain(
                [node.text() for node in (self.failed, *self.nodes)], [node.code for node in self.nodes]
            )
            telling = [node for node in self.nodes if self.failure.line and self.failure.line in node.text()]
            self.failed = (telling or [self.failed])[0]
