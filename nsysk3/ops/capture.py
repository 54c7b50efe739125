"""When may a buffer that peers read or write be filled again?  Eagerly, by turns; around CUDA graphs, by a barrier."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

from nsysk3.ops.pytorch import torch


class BufferOrder:
    """Keeps a double buffer safe whatever is captured and replayed.

    Two buffers in turn need no barrier: before one is filled again, the call on the other has heard from every peer.
    A replayed graph breaks the turns (it may hold an odd number of calls), and nobody on the host sees a replay.  So
    the first call in a capture starts with a barrier over the group, and once anything was captured, so does every call
    outside captures.
    """

    def __init__(self, barrier: Callable[[], Any], capture_id: Callable[[], int | None] | None = None) -> None:
        self._barrier = barrier
        self._capture_id = capture_id or current_capture
        self._last: int | None = 0
        self._captured = False

    def before_write(self) -> None:
        """Call before a buffer is filled, on the stream that fills it."""
        now = self._capture_id()
        if now == 0:
            if self._captured:
                self._barrier()
        else:
            self._captured = True
            if now is None or now != self._last:
                self._barrier()
        self._last = now


def current_capture() -> int | None:
    """Number of the capture on the current stream, 0 outside captures, None in one whose number cannot be told."""
    if not torch.cuda.is_available() or not torch.cuda.is_current_stream_capturing():
        return 0
    driver = _driver()
    if driver is None:
        return None
    status, number = ctypes.c_int(0), ctypes.c_uint64(0)
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    failed = driver.cuStreamGetCaptureInfo_v2(stream, ctypes.byref(status), ctypes.byref(number), None, None, None)
    return None if failed else number.value


@cache
def _driver() -> ctypes.CDLL | None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuStreamGetCaptureInfo_v2.restype = ctypes.c_int
    except (OSError, AttributeError):
        return None
    return driver
