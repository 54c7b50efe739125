"""As much of an HTTP/1.1 server as the endpoints need, on asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from nsysk3.errors import InputError

logger = logging.getLogger("nsysk3.workload")
_BODY_BYTES = 1 << 28
_DISCONNECT_POLL_S = 0.5


@dataclass(frozen=True)
class Call:
    """A request: ``document`` is its JSON body, {} without one."""

    method: str
    path: str
    document: Any
    reader: asyncio.StreamReader

    async def result_of(self, future: asyncio.Future[Any]) -> Any:
        """What the future gives; ConnectionError when the client goes away before."""
        while not (await asyncio.wait({future}, timeout=_DISCONNECT_POLL_S))[0]:
            if self.reader.at_eof():
                raise ConnectionError("the client is gone")
        return future.result()


@dataclass(frozen=True)
class Answer:
    """A response: text, a JSON document, or documents to stream as server-sent events."""

    status: int = 200
    body: Any = ""
    stream: AsyncGenerator[Any, None] | None = None


Handler = Callable[[Call], Awaitable[Answer]]


async def serve(handler: Handler, host: str, port: int) -> asyncio.Server:
    """Serve; OSError when the port is taken."""

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A server that stops cancels what still waits.
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while await _exchange(handler, reader, writer):
                pass
        writer.close()

    return await asyncio.start_server(connection, host, port)


async def _exchange(handler: Handler, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """One request and its response; whether another may follow on this connection."""
    line = await reader.readline()
    if not line:
        return False
    try:
        method, target, _ = line.decode("latin-1").split()
        headers = await _headers(reader)
        size = int(headers.get("content-length", 0))
        if size > _BODY_BYTES or "transfer-encoding" in headers:
            raise ValueError("a body of that size or encoding is not taken")
    except ValueError as error:
        await _send(writer, Answer(400, str(error)), keep=False)
        return False
    if headers.get("expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    body = await reader.readexactly(size) if size else b""
    keep = headers.get("connection", "").lower() != "close"
    await _send(writer, await _answer(handler, method, target.partition("?")[0], body, reader), keep=keep)
    return keep


async def _headers(reader: asyncio.StreamReader) -> dict[str, str]:
    headers: dict[str, str] = {}
    while (line := (await reader.readline()).strip()) and len(headers) < 200:
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    return headers


async def _answer(handler: Handler, method: str, path: str, body: bytes, reader: asyncio.StreamReader) -> Answer:
    try:
        document = json.loads(body) if body.strip() else {}
        return await handler(Call(method, path, document, reader))
    except (InputError, json.JSONDecodeError, UnicodeDecodeError) as error:
        return Answer(400, {"error": {"message": str(error), "type": "invalid_request_error", "code": 400}})
    except (ConnectionError, asyncio.CancelledError):
        raise
    except Exception:
        logger.exception("%s %s", method, path)
        return Answer(500, "Internal Server Error")


async def _send(writer: asyncio.StreamWriter, answer: Answer, *, keep: bool) -> None:
    kind, data = "text/plain; charset=utf-8", b""
    if answer.stream is not None:
        kind, length = "text/event-stream", "Transfer-Encoding: chunked"
    else:
        if isinstance(answer.body, str):
            data = answer.body.encode()
        else:
            kind, data = "application/json", json.dumps(answer.body).encode()
        length = f"Content-Length: {len(data)}"
    head = f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}\r\nContent-Type: {kind}\r\n{length}\r\n"
    writer.write(f"{head}Connection: {'keep-alive' if keep else 'close'}\r\n\r\n".encode() + data)
    if answer.stream is not None:
        async with contextlib.aclosing(answer.stream) as documents:
            async for document in documents:
                event = f"data: {document if isinstance(document, str) else json.dumps(document)}\n\n".encode()
                writer.write(b"%x\r\n%b\r\n" % (len(event), event))
                await writer.drain()
        writer.write(b"0\r\n\r\n")
    await writer.drain()
