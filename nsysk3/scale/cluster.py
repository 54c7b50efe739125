"""The workers of a Dask cluster that is already there."""

from __future__ import annotations

import queue
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from nsysk3 import __version__
from nsysk3.errors import MissingToolError
from nsysk3.run.inputs import TraceInput
from nsysk3.scale.crew import Team
from nsysk3.scale.shelf import Shelf
from nsysk3.scale.work import Done, work

_CONNECT_S = 10
# Workers that restart are away for a while.
_PATIENCE_S = 60
_VERSION = "__import__('nsysk3').__version__"
# Runs that are over, in a worker's process: what was under way then must leave nothing behind.
_over: set[str] = set()


class Cluster(Team):
    """Workers known to the scheduler at ``address`` (``tcp://host:port``).

    Each keeps what it made in its own local directory; a report goes back to the worker that has it.
    """

    retries = 0  # the scheduler has retried already: distributed.scheduler.allowed-failures

    def __init__(self, address: str) -> None:
        super().__init__()
        try:
            from distributed import Client
        except ImportError as error:
            raise MissingToolError("--scheduler needs Dask: pip install 'nsysk3[scale]'") from error
        self._address = address
        try:
            connect: Any = Client
            self._client: Any = connect(address, timeout=_CONNECT_S, set_as_default=False)
        except (OSError, ValueError) as error:  # TimeoutError is an OSError; ValueError: no such address
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise MissingToolError(f"{address}: no Dask scheduler answers there ({reason})") from error
        self._token = f"nsysk3-scratch-{uuid.uuid4().hex}"
        self._answers: queue.SimpleQueue[tuple[str, int, Any]] = queue.SimpleQueue()
        self._seen_workers = time.monotonic()
        try:
            self._check()
        except BaseException:
            self._client.close()
            raise

    def reachable(self, trace: TraceInput) -> TraceInput:
        """See Crew: a worker's current folder is another."""
        return replace(trace, path=trace.path.absolute())

    def begin(self) -> None:
        """See Crew."""
        super().begin()
        self._remove()
        self._token = f"nsysk3-scratch-{uuid.uuid4().hex}"

    def members(self) -> Sequence[str]:
        """See Team."""
        if self._client.status != "running":
            raise MissingToolError(f"{self._address}: the Dask scheduler went away")
        found = list(self._client.scheduler_info(n_workers=-1)["workers"])
        now = time.monotonic()
        if found:
            self._seen_workers = now
        elif now - self._seen_workers > _PATIENCE_S:
            raise MissingToolError(
                f"{self._address}: no Dask worker for {_PATIENCE_S} s; start some, and analyze again"
            )
        return found

    def give(self, member: str, report: int, number: int, calls: Sequence[bytes]) -> None:
        """See Team."""
        future = self._client.submit(
            work_here,
            self._token,
            report,
            number,
            list(calls),
            key=f"nsysk3-{uuid.uuid4().hex}",
            workers=[member],
            allow_other_workers=True,
            pure=False,
        )
        future.add_done_callback(lambda done: self._answers.put((member, report, done)))

    def answered(self) -> Iterator[tuple[str, int, Done | None]]:
        """See Team."""
        from distributed import KilledWorker

        try:
            member, report, future = self._answers.get(timeout=1)
        except queue.Empty:
            return
        try:
            yield member, report, future.result()
        except KilledWorker:
            yield member, report, None

    def on_all(self, what: Callable[[], Any]) -> dict[str, Any]:
        """What a function gives on each worker."""
        found: dict[str, Any] = self._client.run(what)
        return found

    def close(self) -> None:
        """See Crew."""
        with suppress(Exception):
            self._remove()
        self._client.close()

    def _remove(self) -> None:
        self._client.run(forget, self._token, on_error="ignore")

    def _check(self) -> None:
        """All workers must have this nsysk3: steps are sent by name."""
        with suppress(TimeoutError):
            self._client.wait_for_workers(1, timeout=_CONNECT_S)
        if not self.members():
            raise MissingToolError(
                f"{self._address}: the Dask scheduler has no workers; start `dask worker` on each host"
            )
        for worker, found in self._client.run(eval, _VERSION, on_error="return").items():
            if isinstance(found, BaseException):
                raise MissingToolError(
                    f"{worker}: nsysk3 cannot be imported there ({found}): install nsysk3 {__version__} on every worker"
                )
            if found != __version__:
                raise MissingToolError(
                    f"{worker}: has nsysk3 {found}, here is {__version__}: install the same everywhere"
                )


def work_here(token: str, report: int, number: int, calls: Sequence[bytes]) -> Done:
    """What a Dask worker runs: a step (see work), with its states in the worker's local directory."""
    from distributed import get_worker

    place = Path(get_worker().local_directory) / token
    done = work(Shelf(place), report, number, calls)
    if token in _over:
        shutil.rmtree(place, ignore_errors=True)
    return done


def forget(token: str, dask_worker: Any) -> None:
    """Remove what a Dask worker keeps of a run, now and when a step under way ends."""
    _over.add(token)
    shutil.rmtree(Path(dask_worker.local_directory) / token, ignore_errors=True)
