"""Start tests/loopback_server.py as a process of a test, at a port that nobody else has."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SERVER = Path(__file__).parent / "loopback_server.py"
READY = "fired up"


def free_port() -> int:
    """A port that is free now; the kernel hands out each one in turn."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Loopback:
    """A running server: where it answers, its process, what it has printed."""

    url: str
    process: subprocess.Popen[str]
    lines: list[str]


@contextmanager
def loopback(*arguments: str) -> Iterator[Loopback]:
    """A server that is ready; ended with the block."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, SERVER, "--port", str(port), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines: list[str] = []
    ready = threading.Event()

    def read() -> None:
        assert process.stdout
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            if READY in line:
                ready.set()
        ready.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert ready.wait(30), "the loopback server does not start"
        yield Loopback(f"http://127.0.0.1:{port}", process, lines)
    finally:
        process.kill()
        process.wait()
        reader.join(5)
