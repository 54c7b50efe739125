"""Requests and answers between us and the keeper on a host."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
import time
from collections import deque
from secrets import token_hex
from typing import IO, Any

from nsysk3.errors import MissingToolError, RunFailedError
from nsysk3.launch.transport import Transport, explain

BEAT_S = 10.0  # between signs of life
SILENCE_S = 90.0  # without one for so long, the keeper ends the run
LOST_GRACE_S = 5.0  # for what runs then: nobody waits for reports any more
STUCK_S = 60.0  # longest that a keeper may take to end a lost run, before its guard does
ANSWER_S = 30.0  # for an answer, besides what the request itself takes
NOISE = 64 << 10  # bytes of a line that is not the keeper's
EXIT_S = 5.0  # for the transport to end once the keeper has


class _Answer:
    """What will come back for a request."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.value: Any = None
        self.error: str | None = None


class Channel:
    """The line to one keeper.  Threads may share it.

    The command gets ``payload``, then ``settings`` as a line; from then on both sides talk in lines of JSON.
    ``token``: of a keeper that was lost, to end what it had.
    """

    def __init__(self, host: str, run_id: str, transport: Transport, token: str | None = None) -> None:
        self.host = host
        self.lost: str | None = None
        self.ended: list[str] | None = None
        self.token = token or token_hex(8)
        self._transport = transport
        self._hello = threading.Event()
        self._over = threading.Event()
        # Two locks: whoever waits for room in the pipe must not keep answers from being taken.
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._answers: dict[int, _Answer] = {}
        self._number = 0
        self._errors: deque[str] = deque(maxlen=20)
        self._noise: deque[str] = deque(maxlen=20)
        try:
            self._process = subprocess.Popen(
                transport.argv,
                bufsize=1 << 20,  # answers may hold a piece of a file
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                # The terminal's Ctrl-C is ours to handle; and ssh cannot ask where there is no terminal.
                start_new_session=True,
                env={**os.environ, "NSYSK3_RUN": run_id},
            )
        except OSError as error:
            raise MissingToolError(f"{host}: {transport.argv[0]}: {error.strerror}") from error
        self._threads = [
            threading.Thread(target=work, daemon=True, name=f"nsysk3 {host}")
            for work in (self._read_errors, self._read, self._beat)
        ]

    @property
    def began(self) -> bool:
        """Whether there was ever a keeper to talk to."""
        return self._hello.is_set()

    def connect(self, payload: bytes, settings: dict[str, Any]) -> None:
        """Start the keeper.  Raises MissingToolError, in one line with the tool's own words, when there is none."""
        for thread in self._threads:
            thread.start()
        limits = {"silence_s": SILENCE_S, "grace_s": LOST_GRACE_S, "stuck_s": STUCK_S}
        line = json.dumps({"token": self.token, **limits, **settings}).encode() + b"\n"
        with contextlib.suppress(OSError):  # what went wrong is on its standard error
            self._write(payload + line)
        until = time.monotonic() + self._transport.wait_s
        while not self._hello.wait(0.1):
            if self._over.is_set() or time.monotonic() > until:
                code = self._process.poll()
                self.cut()
                raise MissingToolError(explain(self._transport, self.host, code, list(self._errors), list(self._noise)))

    def call(self, op: str, wait_s: float = 0.0, **fields: Any) -> Any:
        """Ask and wait.  ``wait_s``: how long the request itself may take.

        Raises RunFailedError when the keeper says that it cannot, when it is lost, or when no answer comes.
        """
        answer = _Answer()
        with self._lock:
            self._number += 1
            number = self._number
            self._answers[number] = answer
        try:
            self.post(op, id=number, **fields)
            if not answer.done.wait(wait_s + ANSWER_S):
                raise RunFailedError(f"{self.host}: no answer to {op!r} within {wait_s + ANSWER_S:g} s")
        finally:
            with self._lock:
                self._answers.pop(number, None)
        if answer.error is not None:
            raise RunFailedError(f"{self.host}: {answer.error}")
        return answer.value

    def post(self, op: str, **fields: Any) -> None:
        """Send without waiting.  Raises RunFailedError when the keeper is lost."""
        if self.lost is not None:
            raise RunFailedError(f"{self.host}: {self.lost}")
        try:
            self._write(json.dumps({"op": op, **fields}).encode() + b"\n")
        except (OSError, ValueError) as error:
            self._over.wait(EXIT_S)
            raise RunFailedError(f"{self.host}: {self.lost or 'the connection is gone'}") from error

    def wait(self, timeout_s: float) -> bool:
        """Whether the other side has ended within that time."""
        return self._over.wait(timeout_s)

    def cut(self) -> None:
        """End the connection; a keeper that is still there then ends the run by itself."""
        if self._writing.acquire(timeout=0.2):
            with contextlib.suppress(OSError):
                _pipe(self._process.stdin).close()
            self._writing.release()
        here = self._transport.kind == "local" and self._hello.is_set()
        try:
            # Here the process is the guard itself: to kill it would be to let a stuck keeper live.
            self._process.wait(STUCK_S + 2 * EXIT_S if here else EXIT_S if self._over.is_set() else 0.2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._over.wait(EXIT_S)

    def _write(self, data: bytes) -> None:
        with self._writing:
            pipe = _pipe(self._process.stdin)
            pipe.write(data)
            pipe.flush()

    def _beat(self) -> None:
        while not self._over.wait(BEAT_S):
            try:
                self.post("beat")
            except RunFailedError:
                return

    def _read(self) -> None:
        pipe = _pipe(self._process.stdout)
        try:
            # Before the keeper's first word, a login shell may print what it likes.
            while line := pipe.readline() if self._hello.is_set() else pipe.readline(NOISE):
                try:
                    message = json.loads(line)
                    self._take(message, pipe.read(message["raw"]) if "raw" in message else None)
                except (ValueError, TypeError, KeyError):
                    self._noise.append(line.decode(errors="replace").rstrip())
        except (OSError, ValueError):
            pass  # closed under us
        self._lose()

    def _take(self, message: dict[str, Any], raw: bytes | None) -> None:
        if not self._hello.is_set():
            if message["hello"] == self.token:
                self._hello.set()
        elif "ended" in message:
            self.ended = message["ended"]
        else:
            with self._lock:
                answer = self._answers.get(message["id"])
            if answer is not None:
                answer.value = message.get("ok") if raw is None else raw
                answer.error = message.get("error")
                answer.done.set()

    def _read_errors(self) -> None:
        pipe = _pipe(self._process.stderr)
        with contextlib.suppress(OSError, ValueError):
            while line := pipe.readline(NOISE):
                self._errors.append(line.decode(errors="replace").rstrip())

    def _lose(self) -> None:
        """Nothing comes any more: say so to all who wait."""
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(EXIT_S)
        self._threads[0].join(1.0)
        words = "; ".join(line.strip() for line in list(self._errors)[-2:] if line.strip())
        self.lost = "the keeper has ended" if self.ended is not None else f"connection lost ({words or f'exit {code}'})"
        self._over.set()
        with self._lock:
            waiting = list(self._answers.values())
        for answer in waiting:
            answer.error = answer.error or self.lost
            answer.done.set()


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe
