"""A machine of a run: start, follow and end processes there, and move files.

However a run ends (an error, Ctrl-C, a killed nsysk3, a lost connection), the keeper on each host ends there whatever
the run started, and nothing else.
"""

from __future__ import annotations

import base64
import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from nsysk3.errors import MissingToolError, RunFailedError
from nsysk3.launch.channel import Channel
from nsysk3.launch.transport import choose_transport, payload
from nsysk3.run.config import Cluster
from nsysk3.run.files import replacing

PIECE = 1 << 20  # bytes of a file in one request
GRACE_S = 5.0  # for what still runs when a host closes
CLOSE_S = 120.0  # longest wait for a host that closes in order
NOW_S = 20.0  # the same when told to be quick


@dataclass(frozen=True)
class Completed:
    """A command that has ended.  ``code``: -N for signal N, 124: it took too long, 126 or 127: it could not start."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class ClockOffset:
    """A host's clock minus ours, in ns, and how far that may be off: half of the shortest round trip."""

    offset_ns: int
    uncertainty_ns: int


class Host:
    """One machine of a run, as a context manager that ends everything of the run there.  Threads may share it.

    What is asked of it raises RunFailedError, in one line that names the host, when it is lost or cannot do that.
    """

    def __init__(self, cluster: Cluster, name: str, run_id: str, container_cli: Sequence[str] = ()) -> None:
        self.name = name
        self._run_id = run_id
        self._source = payload()
        self._transport = choose_transport(cluster, name, run_id, len(self._source))
        self._cli = list(container_cli)
        self._containers: set[str] = set()
        self._folders: set[str] = set()
        self._kept: set[str] = set()
        self._keeps = True
        self._channel = Channel(name, run_id, self._transport)
        self._closing = threading.Lock()
        self._left: tuple[str, ...] | None = None

    def connect(self) -> Self:
        """Start the keeper there.  Raises MissingToolError, in one line, when that fails."""
        self._channel.connect(self._source, self._settings())
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def lost(self) -> str | None:
        """Why nothing can be asked of the host any more; None while it can."""
        return self._channel.lost

    def clock(self, rounds: int = 20) -> ClockOffset:
        """How its clock (``time.time_ns()``) differs from ours, from the shortest of some round trips."""
        best: ClockOffset | None = None
        for _ in range(max(rounds, 1)):
            sent = time.time_ns()
            arrived, answered = self._channel.call("ping")
            received = time.time_ns()
            travelled = max((received - sent) - (answered - arrived), 0)
            if best is None or travelled < 2 * best.uncertainty_ns:
                best = ClockOffset((arrived - sent + answered - received) // 2, (travelled + 1) // 2)
        assert best is not None
        return best

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout_s: float = 30.0,
        stdin: bytes | None = None,
        container: str | None = None,
    ) -> Completed:
        """Run a command to its end, without a shell; ``env`` is added to the host's.

        What takes too long is killed with all that it started.  Of much output the beginning and the end are kept.
        ``container``: the name of the container that the command runs, where it runs one, so that it is ended too.
        """
        self._containers |= {container} if container else set()
        data = base64.b64encode(stdin or b"").decode()
        what: dict[str, Any] = {"argv": list(argv), "env": dict(env or {}), "cwd": cwd, "container": container}
        return Completed(*self._channel.call("run", timeout_s, **what, timeout_s=timeout_s, data=data))

    def start(
        self,
        name: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        log: str,
        container: str | None = None,
    ) -> None:
        """Start a process that goes on, known as ``name`` from now on; its output and errors go to the file ``log``.

        ``container``: the name of the container that the command runs, where it runs one, so that it is ended too.
        """
        self._containers |= {container} if container else set()
        what: dict[str, Any] = {"argv": list(argv), "env": dict(env or {}), "cwd": cwd, "container": container}
        self._channel.call("start", name=name, log=log, **what)

    def poll(self, name: str) -> int | None:
        """Exit code of what was started, None while it runs."""
        code: int | None = self._channel.call("poll", name=name)
        return code

    def tail(self, name: str, offset: int = 0) -> tuple[str, int]:
        """What its log has from a byte on, at most 256 KiB, and from where to go on."""
        text, end = self._channel.call("tail", name=name, offset=offset)
        return text, end

    def stop(self, name: str, grace_s: float, report_s: float = 600.0) -> int | None:
        """End what was started and all that came of it: first asked, after ``grace_s`` killed; gives the exit code.

        Under nsys the server is ended first; nsys then has ``report_s`` to finish its report.
        """
        wait_s = grace_s + report_s + 60.0
        code: int | None = self._channel.call("stop", wait_s, name=name, grace_s=grace_s, report_s=report_s)
        return code

    def make_scratch(self, path: str) -> None:
        """Make a folder of the run's own, which is removed in the end; it must not be there yet."""
        self._folders.add(path)
        self._channel.call("folder", path=path)

    def fetch(self, remote: str, local: Path) -> None:
        """Copy a file from there."""
        with replacing(local) as beside, beside.open("wb") as file:
            while piece := self._channel.call("read", path=remote, offset=file.tell()):
                file.write(piece)

    def put(self, data: bytes, remote: str, mode: int = 0o600) -> None:
        """Write a file there; it takes its place when it is whole."""
        for at in range(0, max(len(data), 1), PIECE):
            piece = base64.b64encode(data[at : at + PIECE]).decode()
            last = at + PIECE >= len(data)
            self._channel.call("write", path=remote, data=piece, first=at == 0, last=last, mode=mode)

    def keep(self, remote: str, kept: bool = True) -> None:
        """Let a file of the run's scratch folder stay there when the run ends, or (not ``kept``) no longer.

        It stays also where the connection breaks or this process is killed; `nsysk3 cleanup` removes it then.
        """
        if kept and not self._keeps:
            return
        if kept:
            self._kept.add(remote)
        self._channel.call("keep", path=remote, kept=kept)
        if not kept:
            self._kept.discard(remote)

    def keep_nothing(self) -> None:
        """Everything goes when the host is closed, also what somebody wants to keep from now on."""
        self._keeps = False
        self._kept.clear()

    @property
    def kept(self) -> list[str]:
        """Files that stay when the run ends."""
        return sorted(self._kept)

    def exists(self, remote: str) -> int | None:
        """Bytes of a file there, None where there is none."""
        size: int | None = self._channel.call("size", path=remote)
        return size

    def remove(self, remote: str) -> None:
        """Remove a file or an empty folder there."""
        self._channel.call("remove", path=remote)

    def leftovers(self, run_id: str, scratch: str, *, ending: bool) -> list[tuple[str, str]]:
        """What another run left there, as kind and name; with ``ending`` it is ended first."""
        found = self._channel.call("leftovers", 120.0, run=run_id, scratch=scratch, ending=ending, grace_s=GRACE_S)
        return [(kind, what) for kind, what in found]

    def close(self, now: bool = False) -> tuple[str, ...]:
        """End everything of the run there; ``now``: without asking first, also while another thread closes in order.

        A host that was lost is tried again.  Gives a line for each thing that may not have ended.
        """
        channel = self._channel
        if channel.began and channel.lost is None:
            with contextlib.suppress(RunFailedError):
                channel.post("end", grace_s=0.0 if now else GRACE_S, kept=self.kept)
        with self._closing:
            if self._left is None:
                if channel.began:
                    channel.wait(NOW_S if now else CLOSE_S)
                channel.cut()
                left = self._close_again() if channel.began and channel.ended is None else channel.ended or ()
                self._left = tuple(f"{self.name}: {line}" for line in left)
            return self._left

    def _close_again(self) -> Sequence[str]:
        """Through another keeper, end what the lost one had; most often it or its guard did that already."""
        again = Channel(self.name, self._run_id, self._transport, self._channel.token)
        try:
            again.connect(self._source, self._settings())
            again.post("end", grace_s=GRACE_S, kept=self.kept)
            again.wait(CLOSE_S)
            why = again.lost
        except (MissingToolError, RunFailedError) as error:
            why = str(error).removeprefix(f"{self.name}: ")
        again.cut()
        if again.ended is None:
            return [f"lost, and then not reached ({why}); `nsysk3 cleanup {self._run_id}` ends what may be left"]
        return again.ended

    def _settings(self) -> dict[str, Any]:
        return {
            "run": self._run_id,
            "cli": self._cli,
            "containers": sorted(self._containers),
            "folders": sorted(self._folders),
            "kept": self.kept,
        }


def open_host(cluster: Cluster, name: str, run_id: str, container_cli: Sequence[str] = ()) -> Host:
    """Reach a host.  Raises MissingToolError, in one line, when that fails."""
    host = Host(cluster, name, run_id, container_cli)
    try:
        return host.connect()
    except BaseException:
        host.close(now=True)
        raise
