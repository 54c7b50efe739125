"""Ctrl-C and its kin while processes run elsewhere: the first ends a run in order, the second at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Presses:
    """How often somebody asked this run to end."""

    def __init__(self) -> None:
        self.count = 0
        self.name = ""
        self._quiet = False

    @property
    def now(self) -> bool:
        """Whether it is to end without waiting for anything."""
        return self.count > 1

    @contextmanager
    def held(self) -> Iterator[None]:
        """What takes a moment is done whole: presses meanwhile are counted, and raise afterwards."""
        before, self._quiet = self.count, True
        try:
            yield
        finally:
            self._quiet = False
        if self.count > before:
            raise KeyboardInterrupt

    def ignore(self) -> None:
        """The run has ended and only has to say so: from here on presses change nothing."""
        self._quiet = True

    def _pressed(self, number: int, _frame: FrameType | None) -> None:
        self.count += 1
        self.name = signal.Signals(number).name
        if not self._quiet:
            raise KeyboardInterrupt


@contextmanager
def interrupts() -> Iterator[Presses]:
    """Make each of SIGINT, SIGTERM and SIGHUP raise KeyboardInterrupt here, and count them.

    Of another thread than the main one it changes nothing: signals are not raised there.
    """
    presses = Presses()
    if threading.current_thread() is not threading.main_thread():
        yield presses
        return
    # What is ignored stays ignored: that is what nohup is for.
    chosen = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, presses._pressed) for number in chosen}
    try:
        yield presses
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
