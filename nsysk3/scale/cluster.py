"""The workers of a Dask cluster that is already there."""

from __future__ import annotations

import logging
import queue
import re
import shutil
import socket
import threading
import time
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from nsysk3 import __version__
from nsysk3.errors import InputError, MissingToolError, NsysK3Error
from nsysk3.run.config import PATIENCE_S
from nsysk3.run.inputs import TraceInput
from nsysk3.run.scratch import PREFIX
from nsysk3.scale.crew import RETRIES, Team
from nsysk3.scale.shelf import Shelf
from nsysk3.scale.work import Done, work
from nsysk3.scale.work import tell as _tell

_ADDRESS = re.compile(r"(?:(?:tcp|tls|wss?)://)?(?:[^\s/:@\[\]]+|\[[^\s/@\[\]]+\]):(\d{1,5})/?")
_CONNECT_S = 10
# Between two questions to the scheduler who its workers are.
_ASK_S = 1
# A worker that says nothing for so long is not counted on: hung, or its machine lost power.  They speak every second.
_SILENT_S = 30
# What it has in hand is given to another after so long: much longer than any library holds Python's lock.  Where it
# was only slow, the work was done twice.
_LOST_S = 120
# It says in lines of its own what is said here in one.
_CHATTY = logging.getLogger("distributed.client")
_VERSION = "__import__('nsysk3').__version__"
# In a worker's process: the folders that somebody still needs, and the number of the run under way in each.
_kept: dict[Path, int] = {}


class Cluster(Team):
    """Workers known to the scheduler at ``address`` (``tcp://host:port``).

    Each keeps what it made in its own local directory; a report goes back to the worker that has it.  Dask itself
    restarts what a dead worker did; what a hung one has is given to another; where none is left for ``patience_s``
    seconds, the run is given up.
    """

    retries = 0  # the scheduler has retried already: distributed.scheduler.allowed-failures

    def __init__(self, address: str, patience_s: float = PATIENCE_S) -> None:
        super().__init__()
        self._address, self._patience_s = address, patience_s
        self._client: Any = _connected(address)
        self._level = _CHATTY.level
        _CHATTY.setLevel(logging.CRITICAL)
        self._token, self._run = f"{PREFIX}{uuid.uuid4().hex}", 0
        self._answers: queue.SimpleQueue[tuple[str, int, Any]] = queue.SimpleQueue()
        self._found: list[str] = []
        self._heard: dict[str, tuple[float, float]] = {}
        self._asked = -float(_ASK_S)
        self._deserted: float | None = None
        self._waiting = False
        self._keepers: dict[str, Any] = {}
        self._given: dict[str, tuple[str, int, Any]] = {}
        self._silent: dict[str, float] = {}
        self._doubted: set[str] = set()
        self._again: set[int] = set()
        self._stranded: Counter[int] = Counter()
        try:
            with self._asking():
                self._check()
        except BaseException:
            self.close()
            raise

    def reachable(self, trace: TraceInput) -> TraceInput:
        """See Crew: a worker's current folder is another."""
        return replace(super().reachable(trace), path=trace.path.absolute())

    def begin(self) -> None:
        """See Crew."""
        super().begin()
        self._run += 1
        self._given.clear()
        self._stranded.clear()
        self._doubted.clear()
        self._again.clear()
        with self._asking():
            self._forget(self._run, self._speaking(time.monotonic()))

    def members(self) -> Sequence[str]:
        """See Team."""
        now = time.monotonic()
        if now - self._asked < _ASK_S:
            return self._found
        with self._asking():
            before, self._found = self._found, self._speaking(now)
            self._keep()
            if self._found and set(before).isdisjoint(self._found):
                # All are new.  Dask hands a dead worker's tasks to those that are there, not to those that come later.
                for member, _, future in list(self._given.values()):
                    if member not in self._found:
                        future.cancel()
            elif self._found:
                self._doubt()
        self._asked = now
        if self._found:
            self._deserted, self._waiting = None, False
        elif self._deserted is None:
            self._deserted = now  # said when asked again: of a scheduler that dies the workers go first
        elif not self._waiting:
            self._waiting = True
            _tell(f"{self._address}: no worker answers; waiting up to {self._patience_s:g} s for one")
        elif now - self._deserted > self._patience_s:
            raise MissingToolError(
                f"{self._address}: no Dask worker for {self._patience_s:g} s; start some, and analyze again"
            )
        return self._found

    def _speaking(self, now: float) -> list[str]:
        """Workers from which the scheduler hears; when it last did is told by its clock, so a change is what counts."""
        known = self._client.scheduler_info(n_workers=-1)["workers"]
        for name, facts in known.items():
            if self._heard.get(name, (None,))[0] != facts["last_seen"]:
                self._heard[name] = facts["last_seen"], now
        since = {name: now - self._heard[name][1] for name in known}
        self._silent = {name: seconds for name, seconds in since.items() if seconds >= _SILENT_S}
        return [name for name in known if name not in self._silent]

    def _doubt(self) -> None:
        """Say what a silent worker holds up, and take it away in the end: each report once, lest all be only slow."""
        for key, (member, report, future) in list(self._given.items()):
            seconds = self._silent.get(member, 0.0)
            if seconds and key not in self._doubted:
                self._doubted.add(key)
                then = "Ctrl-C ends" if report in self._again else f"after {_LOST_S} s another does that"
                _tell(f"{member}: this worker has been silent for {seconds:.0f} s while {self._titles[report]}; {then}")
            if seconds >= _LOST_S and report not in self._again:
                self._again.add(report)
                future.cancel()

    def give(self, member: str, report: int, number: int, calls: Sequence[bytes]) -> None:
        """See Team."""
        with self._asking():
            future = self._client.submit(
                work_here,
                self._token,
                self._run,
                report,
                number,
                list(calls),
                key=f"nsysk3-{uuid.uuid4().hex}",
                workers=[member],
                allow_other_workers=True,
                pure=False,
            )
        self._given[future.key] = member, report, future
        future.add_done_callback(lambda done: self._answers.put((member, report, done)))

    def answered(self) -> Iterator[tuple[str, int, Done | None]]:
        """See Team."""
        from distributed import CancelledError, KilledWorker

        try:
            member, report, future = self._answers.get(timeout=_ASK_S)
        except queue.Empty:
            return
        self._given.pop(future.key, None)
        done: Done | None = None
        with self._asking(), suppress(KilledWorker):
            try:
                done = future.result()
            except CancelledError as error:
                if getattr(error, "reason", None) == "scheduler-connection-lost":
                    raise self._gone() from error
                self._stranded[report] += 1
                if self._stranded[report] <= RETRIES:
                    done = Done(None, None, True, member, 0)
        yield member, report, done

    def on_all(self, what: Callable[[], Any]) -> dict[str, Any]:
        """What a function gives on each worker."""
        found: dict[str, Any] = self._client.run(what)
        return found

    def _close(self) -> None:
        with suppress(Exception):
            if self._client.status == "running":
                self._forget(self._run + 1, self._found if self._heard else None)
        with suppress(Exception):
            self._client.close()
        _CHATTY.setLevel(self._level)

    def _forget(self, run: int, workers: list[str] | None) -> None:
        """Let workers (None: all) remove what they keep of runs before; the silent do so when this client is gone."""
        self._everywhere(forget, self._token, run, on_error="ignore", workers=workers)

    def _everywhere(self, what: Callable[..., Any], *given: Any, **options: Any) -> dict[str, Any]:
        """What each worker answers.  Raises MissingToolError where they take too long: a hung one never does."""
        found: queue.SimpleQueue[dict[str, Any] | BaseException] = queue.SimpleQueue()

        def ask() -> None:
            try:
                found.put(self._client.run(what, *given, **options))
            except BaseException as error:
                found.put(error)

        threading.Thread(target=ask, daemon=True).start()
        try:
            answers = found.get(timeout=_SILENT_S)
        except queue.Empty:
            raise MissingToolError(
                f"{self._address}: not all Dask workers answer within {_SILENT_S} s; stop the hung ones, analyze again"
            ) from None
        if isinstance(answers, BaseException):
            raise answers
        return answers

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """What goes wrong because the scheduler is gone is said so."""
        try:
            yield
        except NsysK3Error:
            raise
        except Exception as error:
            if self._client.status == "running" and not isinstance(error, OSError):
                raise
            raise self._gone() from error

    def _gone(self) -> MissingToolError:
        return MissingToolError(
            f"{self._address}: the Dask scheduler went away; start it and its workers, and analyze again"
        )

    def _keep(self) -> None:
        """Let each worker have its Keeper; this client's interest in it is what keeps it."""
        for each in self._found:
            keeper = self._keepers.get(each)
            # A worker may come again by its old name.
            if keeper is None or keeper.status not in ("pending", "finished"):
                self._keepers[each] = self._client.submit(
                    Keeper,
                    self._token,
                    self._run,
                    key=f"nsysk3-keeper-{uuid.uuid4().hex}",
                    workers=[each],
                    actor=True,
                    priority=1,  # before any step
                    pure=False,
                )

    def _check(self) -> None:
        """All workers must have this nsysk3: steps are sent by name."""
        with suppress(TimeoutError):
            self._client.wait_for_workers(1, timeout=_CONNECT_S)
        if not self._client.scheduler_info(n_workers=-1)["workers"]:
            raise MissingToolError(
                f"{self._address}: the Dask scheduler has no workers; start `dask worker` on each host"
            )
        for worker, found in self._everywhere(eval, _VERSION, on_error="return").items():
            if isinstance(found, BaseException):
                raise MissingToolError(
                    f"{worker}: nsysk3 cannot be imported there ({found}): install nsysk3 {__version__} on every worker"
                )
            if found != __version__:
                raise MissingToolError(
                    f"{worker}: has nsysk3 {found}, here is {__version__}: install the same everywhere"
                )


class Keeper:
    """Lives on a worker as long as the client that asked for it; with it goes what the worker keeps for that client.

    A Dask actor: a worker neither moves it nor writes it to disk, and drops it when its client has closed or was lost.
    """

    def __init__(self, token: str, run: int) -> None:
        place = _place(token)
        _kept[place] = run
        weakref.finalize(self, _drop, place)


def work_here(token: str, run: int, report: int, number: int, calls: Sequence[bytes]) -> Done:
    """What a Dask worker runs: a step (see work), with its states in the worker's local directory."""
    place = _place(token)
    done = work(Shelf(place / str(run)), report, number, calls)
    if _kept.get(place) != run:  # nobody will come for it
        shutil.rmtree(place / str(run), ignore_errors=True)
        with suppress(OSError):
            place.rmdir()
    return done


def forget(token: str, run: int, dask_worker: Any) -> None:
    """Remove what a Dask worker keeps of runs before ``run``, now and when a step under way ends."""
    place = Path(dask_worker.local_directory) / token
    if place in _kept:
        _kept[place] = run
    shutil.rmtree(place, ignore_errors=True)


def _place(token: str) -> Path:
    from distributed import get_worker

    return Path(get_worker().local_directory) / token


def _drop(place: Path) -> None:
    _kept.pop(place, None)
    shutil.rmtree(place, ignore_errors=True)


def _connected(address: str) -> Any:
    """A client of the scheduler there."""
    found = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if not found or int(found[1]) not in range(1, 65536):
        raise InputError(
            f"{address!r} is no address of a Dask scheduler; wanted is tcp://HOST:PORT, such as tcp://node1:8786 "
            "(--scheduler, or analyze.scheduler in nsysk3.toml)"
        )
    try:
        from distributed import Client
        from distributed.security import Security
    except ImportError as error:
        raise MissingToolError("--scheduler needs Dask: pip install 'nsysk3[scale]'") from error
    try:
        security: Any = Security
        if address.startswith(("tls:", "wss:")) and not security().get_connection_args("client").get("ssl_context"):
            raise MissingToolError(
                f"{address}: needs certificates: set distributed.comm.tls in Dask's configuration, here and on workers"
            )
        connect: Any = Client
        return connect(address, timeout=_CONNECT_S, set_as_default=False)
    except (OSError, ValueError, ImportError, RuntimeError) as error:  # TimeoutError is an OSError; no such scheme here
        raise MissingToolError(f"{address}: no Dask scheduler answers there ({_reason(address, error)})") from error


def _reason(address: str, error: Exception) -> str:
    """Why nothing answers; Dask tries again until it calls anything a timeout."""
    host, _, port = address.rpartition("//")[2].rstrip("/").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except OSError as refused:
        return refused.strerror or str(refused)
    return str(error).splitlines()[0] if str(error) else type(error).__name__
