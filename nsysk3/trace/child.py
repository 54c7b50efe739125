"""A child process that never outlives this one's interest in it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import IO

from nsysk3.errors import MissingToolError

_PROGRESS = re.compile(r"\[[ =|]*(\d{1,3}%)")
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_child(command: list[str], progress: Callable[[str], None] | None) -> tuple[int, list[str]]:
    """Run nsys in a process group of its own; its exit code and the last lines it printed.

    ``progress`` gets what its bar says (``37%``).  Raises MissingToolError where it cannot be run.
    """
    lines: deque[str] = deque(maxlen=200)
    process: subprocess.Popen[bytes] | None = None
    try:
        with _signals_held():
            process = _start(command)
        assert process.stdout is not None
        for line in _lines(process.stdout):
            bar = _PROGRESS.search(line)
            if bar is None:
                lines.append(line)
            elif progress:
                progress(bar[1])
        return process.wait(), list(lines)
    finally:
        if process is not None and process.stdout is not None:
            if process.returncode is None:  # Ctrl-C above all: no nsys may go on writing into a folder that goes away
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            process.stdout.close()


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
    except OSError as error:
        raise MissingToolError(f"{command[0]}: cannot be run ({error.strerror}); pass another --nsys") from error


def _lines(stream: IO[bytes]) -> Iterator[str]:
    """Lines as they come; nsys ends those of its progress bar with a carriage return."""
    rest = b""
    while chunk := os.read(stream.fileno(), 65536):
        *whole, rest = re.split(rb"[\r\n]+", rest + chunk)
        yield from (line.decode("utf-8", "replace") for line in whole if line.strip())
    if rest.strip():
        yield rest.decode("utf-8", "replace")


@contextmanager
def _signals_held() -> Iterator[None]:
    """What a signal would raise in the block is raised at its end: a child that is just being started is not lost.

    Not by the thread's mask, which the child would inherit.  Only the main thread is ever raised in.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def later(number: int, _frame: FrameType | None) -> None:
        came.append(number)

    before = {number: handler for number in _ENDING if callable(handler := signal.getsignal(number))}
    _set(dict.fromkeys(before, later))
    try:
        yield
    finally:
        _set(before)
        for number in came:
            signal.raise_signal(number)


def _set(handlers: Mapping[signal.Signals, signal._HANDLER]) -> None:
    """All of them or none: no handler runs in between."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, handlers)
    try:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
