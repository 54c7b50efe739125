"""Ending a capture so that no stage's work is cut."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from nsysk3.plugin.ranges import logger
from nsysk3.plugin.rank import Facts

ACTIVITY = "CUDA_PROFILER"
# A server is worth more than a tail of a capture: nothing here waits longer.
LIMIT_S = 10.0


def capturing(manager: Any) -> bool:
    """Whether this profiler manager has a cudaProfilerApi capture open.

    SGLang's second manager keeps no such state: it is asked to stop only when there is something to stop.
    """
    if not hasattr(manager, "profiler_activities"):
        return True
    return bool(manager.profile_in_progress) and ACTIVITY in (manager.profiler_activities or ())


def settle(manager: Any) -> None:
    """Wait until the GPU work of this rank's tensor-parallel group is done: what Nsight has not seen end is lost."""
    synchronize()
    group = getattr(manager, "dp_tp_cpu_group", None) or getattr(manager, "cpu_group", None)
    import torch

    if group is not None and torch.distributed.get_world_size(group) > 1:
        torch.distributed.monitored_barrier(group, timeout=timedelta(seconds=LIMIT_S))


def synchronize(limit_s: float = LIMIT_S) -> bool:
    """Wait for this process's GPU; False where that took longer than ``limit_s`` (a peer that never sends, say)."""
    import torch

    device = torch.cuda.current_device()
    waiter = threading.Thread(target=torch.cuda.synchronize, args=(device,), daemon=True, name="nsysk3-synchronize")
    waiter.start()
    waiter.join(limit_s)
    if waiter.is_alive():
        logger.warning("the GPU was still busy %.0f s after the capture was to end: its last work is cut", limit_s)
    return not waiter.is_alive()


def stop_capture() -> None:
    """End Nsight's capture; any process of its session may.

    In a thread, and without Python's lock: recording ends at once, but the call returns seconds later, and a peer whose
    kernels wait for this rank's next must be able to finish meanwhile.  It is the driver's call: a process can have
    several CUDA runtimes loaded, and in one that is not in use, or in a thread without a context, it does nothing and
    says that it did.
    """
    import torch

    device = torch.cuda.current_device()

    def end() -> None:
        torch.cuda.set_device(device)
        torch.cuda.current_stream().query()  # makes the device's context this thread's
        _profiler_stop()()
        logger.info("the capture has ended")

    ender = threading.Thread(target=end, daemon=True, name="nsysk3-stop")
    ender.start()
    ender.join(0.1)


def _profiler_stop() -> Callable[[], Any]:
    """The driver's cuProfilerStop; torch's, which holds Python's lock, where there is no driver to ask."""
    with suppress(OSError, AttributeError):
        stop: Callable[[], Any] = ctypes.CDLL("libcuda.so.1").cuProfilerStop
        return stop
    import torch

    own: Callable[[], Any] = torch.cuda.cudart().cudaProfilerStop
    return own


@contextmanager
def without_stop(manager: Any) -> Iterator[None]:
    """SGLang's own stop, with everything but the call to cudaProfilerStop."""
    activities = manager.profiler_activities
    manager.profiler_activities = [each for each in activities if each != ACTIVITY]
    try:
        yield
    finally:
        manager.profiler_activities = activities


def stop_in_order(facts: Facts | None, manager: Any, original: Callable[[], Any], quietly: Callable[..., Any]) -> Any:
    """Run SGLang's stop so that the node's last stage ends the capture, once its GPUs are done.

    SGLang lets the node's first GPU process end it, for all: the later stages lose what they still run.  No stage can
    wait for a later one there (it would wait for micro-batches that it has not sent), but what the last stage of a
    node has finished, all stages before it have too.  Nsight takes the end from any process of its session, and counts:
    as many ends as starts.
    """
    if facts is None or facts.in_last_stage_of_node:
        quietly(settle, manager)
    if facts is None or facts.each_captures or not hasattr(manager, "profiler_activities"):
        return original()
    with without_stop(manager):
        result = original()
    if facts.in_last_stage_of_node and facts.first_of_stage_on_node:
        quietly(stop_capture)
    return result
