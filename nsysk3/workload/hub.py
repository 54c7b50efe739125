"""How the first node's launcher talks to the ranks: one connection each, a JSON document a line.

A connection that ends is a rank that died, which either side learns at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import socket
import threading
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator
from typing import Any

logger = logging.getLogger("nsysk3.workload")
Message = dict[str, Any]
# A chunk's token ids are far below this.
_LINE_BYTES = 1 << 26
TOKEN_VARIABLE = "NSYSK3_WORKLOAD_TOKEN"


class Hub:
    """The launcher's side."""

    def __init__(self, on_message: Callable[[int, Message], None], on_lost: Callable[[int], None]) -> None:
        self.token = secrets.token_urlsafe(16)
        self.port = 0
        self._on_message, self._on_lost = on_message, on_lost
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._server: asyncio.Server | None = None

    async def open(self, host: str) -> None:
        """Listen at a free port of ``host``."""
        self._server = await asyncio.start_server(self._serve, host, 0, limit=_LINE_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]

    def send(self, message: Message, ranks: Iterable[int] | None = None) -> None:
        """Send to some ranks, by default to all that are there.  In order, and never waits."""
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        for rank in list(self._writers) if ranks is None else ranks:
            if (writer := self._writers.get(rank)) is not None and not writer.is_closing():
                writer.write(line)

    def close(self) -> None:
        """End all connections; the ranks then end too."""
        if self._server is not None:
            self._server.close()
        for writer in self._writers.values():
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank = -1
        try:
            hello = json.loads(await reader.readline())
            if not secrets.compare_digest(str(hello["token"]), self.token):
                return
            rank = int(hello["rank"])
            self._writers[rank] = writer
            while line := await reader.readline():
                self._on_message(rank, json.loads(line))
        except (ConnectionError, ValueError, KeyError, TypeError):
            if rank >= 0:  # anyone may knock
                logger.exception("rank %d", rank)
        finally:
            writer.close()
            if self._writers.pop(rank, None) is not None:
                self._on_lost(rank)


class Link:
    """A rank's side; ``send`` from any thread."""

    def __init__(self, address: tuple[str, int], token: str, rank: int, timeout_s: float) -> None:
        self._socket = socket.create_connection(address, timeout=timeout_s)
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lock = threading.Lock()
        self.send({"token": token, "rank": rank})

    def send(self, message: Message) -> None:
        """Send a document; a launcher that is gone is noticed by ``messages``."""
        with self._lock, contextlib.suppress(OSError):
            self._socket.sendall(json.dumps(message, separators=(",", ":")).encode() + b"\n")

    def messages(self) -> Iterator[Message]:
        """What comes, until the connection ends."""
        with contextlib.suppress(OSError), self._socket.makefile("rb") as lines:
            for line in lines:
                yield json.loads(line)


def pack(ids: Any) -> str:
    """Token ids (array of 32-bit integers) as text."""
    return b64encode(ids.tobytes()).decode()
