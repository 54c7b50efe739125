"""Run the command line exactly as the ``nsysk3`` script does: inside this process, or as one of its own."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, NamedTuple
from unittest.mock import patch

from nsysk3.cli import main

COMMAND = [sys.executable, "-c", "from nsysk3.__main__ import main; main()"]


class Ran(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


def run(*arguments: object) -> Ran:
    """Run ``nsysk3 ARGUMENTS``; anything that escapes ``main`` but SystemExit is a fault of ours and is raised."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    hook = sys.unraisablehook
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
            sys.unraisablehook = hook
    texts = []
    for stream in (out, err):
        stream.seek(0)
        texts.append(stream.read())
    return Ran(code, *texts)


def process(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """The installed script, as a shell would start it."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False, **options,
    )  # fmt: skip
