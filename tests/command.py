"""Run the command line inside this process, exactly as the ``nsysk3`` script does."""

from __future__ import annotations

import io
import signal
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple
from unittest.mock import patch

from nsysk3.cli import main


class Ran(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


def run(*arguments: object) -> Ran:
    """Run ``nsysk3 ARGUMENTS``; anything that escapes ``main`` but SystemExit is a fault of ours and is raised."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    code = 0
    with (
        redirect_stdout(out),
        redirect_stderr(err),
        patch.object(sys, "argv", ["nsysk3", *map(str, arguments)]),
    ):
        try:
            main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    texts = []
    for stream in (out, err):
        stream.seek(0)
        texts.append(stream.read())
    return Ran(code, *texts)
