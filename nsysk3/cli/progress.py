"""A status line on stderr while something takes long; nothing where stderr is not a terminal."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def status(quiet: bool = False) -> Iterator[Callable[[str], None] | None]:
    """Give a function that shows one line of progress, or None where nobody would see it."""
    from rich.console import Console
    from rich.text import Text

    # The handler that polars puts before ours lets the system restart a blocked read: Ctrl-C while nsys is silent would
    # wait for its next word.
    signal.siginterrupt(signal.SIGINT, True)
    err = Console(stderr=True)
    if quiet or not err.is_terminal:
        yield None
        return
    with err.status("") as line:
        yield lambda text: line.update(Text(text))
