"""The capture: opened under steady load, closed by the server after so many forwards, waited for until written."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from nsysk3.errors import RunFailedError
from nsysk3.launch.load_record import LoadResult
from nsysk3.launch.service import Service

STARTED = "Capture range started in the application"
ENDED = "Capture range ended in the application"
# A progress bar of nsys that got to its end: the report is there.
WRITTEN = "100%]"
NOT_SEEN = (
    "nothing told that the capture opened or closed: nsys kept its words until it ended, or never saw it start (no "
    "process under it called cudaProfilerStart, or it could not trace the one that did); its report shows which"
)
# Under nsys, cudaProfilerStart and Stop return when Nsight has started, or has brought in every process's buffers.
_CALL_S = 180.0
# From the end of the load to nsys having the report: gigabytes of events are turned into one.
_CLOSE_S = 300.0
# Where nsys has not even said that it started there is little to wait for.
NOTHING_S = 15.0
_WRITE_S = 1800.0
_TELL_S = 30.0


@dataclass
class Window:
    """What is known of one capture; times are ns since the epoch, null where nothing told them.

    ``closed_ns`` is when it was noticed; ``closed_by`` tells from what: nsys, the report, or (without a GPU, where
    Nsight has the whole run) the end of the load.
    """

    steps: int
    opened_ns: int | None = None
    closed_ns: int | None = None
    closed_by: str | None = None
    requests_before: int = 0
    stop_profile: bool = False
    notes: list[str] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        """For the manifest."""
        return {name: value for name, value in asdict(self).items() if name != "notes"}


class Flow:
    """A load that runs in a thread while the capture is opened and closed from this one."""

    def __init__(self, service: Service, start: Callable[[Flow], LoadResult]) -> None:
        self.enough = False
        self.count: Callable[[], int] | None = None
        self._service = service
        self._start = start
        self._stopped: str | None = None
        self._result: LoadResult | None = None
        self._error: BaseException | None = None
        self._done = 0
        self._thread = threading.Thread(target=self._body, name="nsysk3-flow", daemon=True)

    def begin(self) -> None:
        """Send the first requests."""
        self._thread.start()

    @property
    def done(self) -> int:
        """Requests that have ended: as the load reports them, else (``count``) as something else tells."""
        return self.count() if self.count else self._done

    def on_done(self, count: int) -> None:
        """For ``run_load``: a request has ended."""
        self._done = count
        self._service.wake()

    def lost(self) -> str | None:
        """For ``run_load``: why to give up what is under way."""
        return self._stopped or self._service.lost()

    def ended(self) -> bool:
        """Whether the load is over."""
        return self._result is not None or self._error is not None

    def give_up(self, reason: str) -> None:
        """End the load now."""
        self._stopped = reason
        if self._thread.is_alive():
            self._thread.join(5)

    def result(self) -> LoadResult:
        """Wait for the load and return it; raises what it raised."""
        self._thread.join()
        if self._error:
            raise self._error
        assert self._result is not None
        return self._result

    def _body(self) -> None:
        try:
            self._result = self._start(self)
        except BaseException as error:  # raised again by result()
            self._error = error
        self._service.wake()


def capture(
    service: Service,
    load: Callable[[Flow], LoadResult],
    *,
    steady_after: int,
    on_step: Callable[[str], None],
    say: Callable[[str], None],
) -> tuple[LoadResult, Window]:
    """Run a load, open the capture once ``steady_after`` requests have ended, and wait until it has closed.

    The server itself closes it after ``plan.steps`` forwards (``num_steps``); a load that ends before is followed by
    /stop_profile.  Once it is closed no further requests are sent, and those under way end.

    Args:
        service: a healthy server.
        load: runs the load; it should report to the flow's ``on_done`` and ask its ``enough`` and ``lost``.
        steady_after: requests; by then the pipeline is full and the next ones are queued.
        on_step: told ``window`` when the capture opens and ``draining`` when it has closed.
        say: told what happens, a line each.

    Raises:
        RunFailedError: the capture could not be opened (with the way out), or the server failed.
    """
    plan = service.plan
    window = Window(plan.steps)
    ranged = captures_by_range(service)
    mark = service.mark()
    flow = Flow(service, load)
    try:
        flow.begin()
        service.wait(lambda: flow.done >= steady_after or flow.ended(), math.inf)
        _check(service, flow, "died under load")
        if flow.ended() and flow.done < steady_after:
            raise _too_short(flow.result())
        window.requests_before = flow.done
        window.opened_ns = _open(service, plan.steps)
        on_step("window")
        say(f"capture opened after {window.requests_before} requests, for {plan.steps} forwards of the first stage")

        def closed() -> str | None:
            if not ranged:  # nothing opens or closes it: Nsight has the whole run, of which the load is the window
                return "the end of the load" if flow.ended() else None
            return _closed(service, mark)

        service.wait(lambda: closed() or flow.ended(), math.inf)
        _check(service, flow, "died with the capture open")
        if not ranged:
            _post(service.url + "/stop_profile", {})
        elif not closed():
            _stop(service, window)
        opened = not ranged or bool(closed()) or any(service.said(STARTED, mark))
        window.closed_by = service.wait(closed, _CLOSE_S if opened else NOTHING_S)
        _check(service, flow, "died with the capture open")
        if window.closed_by:
            window.closed_ns = time.time_ns()
        elif opened:
            window.notes.append("nothing told that the capture closed; nsys writes what it has when the server ends")
        else:
            window.notes.append(NOT_SEEN)
        flow.enough = True
        on_step("draining")
        return flow.result(), window
    except BaseException as error:
        flow.give_up("the run was interrupted" if not isinstance(error, RunFailedError) else str(error))
        raise


def wait_written(service: Service, since: list[int], say: Callable[[str], None]) -> bool:
    """Wait until nsys has made every node's report of what it captured; False when it has not after half an hour.

    A server that is stopped meanwhile takes its nsys with it sooner or later, and the report would be cut.
    """
    told = time.monotonic()

    def written() -> bool:
        nonlocal told
        if time.monotonic() - told > _TELL_S:
            told = time.monotonic()
            say("nsys is still writing its reports")
        # An nsys without its importer leaves the raw capture instead, in one move.
        return all(done or service.holds(node, ".qdstrm") for node, done in enumerate(service.said(WRITTEN, since)))

    return bool(service.wait(written, _WRITE_S))


def captures_by_range(service: Service) -> bool:
    """Whether Nsight waits for the server to open the capture; without a GPU nothing opens it, and it captures all."""
    return any("--capture-range" in word for node in service.plan.nodes for word in node.argv)


def _open(service: Service, steps: int) -> int:
    """Ask the server to open the capture now; returns when it was asked.

    ``start_step`` is left out: it is a count since the server began, and means the next forward on any warm server.
    """
    asked = time.time_ns()
    code, said = _post(service.url + "/start_profile", {"activities": ["CUDA_PROFILER"], "num_steps": steps})
    if code == 200:
        return asked
    if failure := service.failure() if code else service.gone():
        raise service.failed(failure, "died when the capture was opened")
    advice = {
        404: "this server has no /start_profile: use an SGLang that has it (0.4.0 or later)",
        401: "the server wants a key: start it without --admin-api-key",
        500: "another capture may be open (SGLang says why in its log), or SGLANG_PROFILE_V2 is set: unset it",
    }.get(code, "see the server's log")
    raise RunFailedError(f"{service.url}/start_profile: {said}; {advice}")


def _stop(service: Service, window: Window) -> None:
    """The load ended before the server had its forwards: close the capture from here."""
    window.stop_profile = True
    code, said = _post(service.url + "/stop_profile", {})
    if code == 200:
        window.notes.append(
            f"the load ended before {window.steps} forwards: /stop_profile closed the capture, and its end is not "
            "under load; more requests (--requests) would fill it"
        )
    elif code != 500:  # 500: it had just closed by itself
        window.notes.append(f"/stop_profile: {said}")


def _closed(service: Service, mark: list[int]) -> str | None:
    """What tells that the capture has closed on every node, None while nothing does.

    That is nsys, or the report itself: an nsys that holds its words back until it ends puts it there all the same.  The
    server's word comes too early: the last stage of a node ends the capture after the first has said so.
    """
    if all(service.said(ENDED, mark)):
        return "nsys"
    if all(service.holds(node, ".nsys-rep") or service.holds(node, ".qdstrm") for node in range(len(mark))):
        return "the report"
    return None


def _check(service: Service, flow: Flow, what: str) -> None:
    if failure := service.failure():
        flow.give_up(failure.message)
        raise service.failed(failure, what)


def _too_short(result: LoadResult) -> RunFailedError:
    errors = result.errors
    if errors:
        return RunFailedError(
            f"{len(errors)} of {len(result.record['errors'])} requests failed before the load was steady: {errors[0]}"
        )
    return RunFailedError(f"the load of {result.completed} requests ended before it was steady: give more --requests")


def _post(url: str, body: dict[str, Any]) -> tuple[int, str]:
    """Status and text of an answer; status 0 when there was none."""
    import httpx

    try:
        response = httpx.post(url, json=body, timeout=_CALL_S, trust_env=False)
    except httpx.HTTPError as error:
        return 0, f"no answer ({type(error).__name__}: {error})".rstrip(": )") + ")"
    return response.status_code, f"HTTP {response.status_code} {' '.join(response.text.split())[:200]}"
