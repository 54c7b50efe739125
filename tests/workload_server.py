"""Starts the torch workload's launcher and watches what it leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LIMIT_S = 120.0
SMALL = ("--scale", "small", "--device", "cpu", "--chunked-prefill-size", "32", "--random-seed", "3")


def wait_for(what: Callable[[], Any], why: str) -> Any:
    """What ``what()`` says once it is true."""
    end = time.monotonic() + LIMIT_S
    while not (found := what()):
        assert time.monotonic() < end, why
        time.sleep(0.02)
    return found


def alive(pid: int) -> bool:
    """Whether a process runs (or is stopped); what only waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Launched:
    """A launcher of one node, its log, and its ranks' processes."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.log_path = folder / f"log-{len(list(folder.glob('log-*')))}"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "NSYSK3_MARKERS": "1"}
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "nsysk3.workload", "--port", "0", *arguments],
                stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True,
            )  # fmt: skip

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def wait_for(self, text: str) -> str:
        """The log, once it says ``text``."""
        wait_for(lambda: text in self.log or self.process.poll() is not None, f"no {text!r} in:\n{self.log}")
        assert text in self.log, self.log
        return self.log

    @property
    def url(self) -> str:
        return self.wait_for("listens on http://").partition("listens on ")[2].split()[0]

    @property
    def ranks(self) -> list[int]:
        """Processes of its ranks that run."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(each) for each in children.read_text().split()] if children.exists() else []

    def ready(self) -> Launched:
        self.wait_for("The server is fired up and ready to roll!")
        return self

    def exit_code(self) -> int:
        return self.process.wait(LIMIT_S)

    def call(self, path: str, document: Any = None) -> tuple[int, str]:
        """Status and body; a document is posted."""
        data = None if document is None else json.dumps(document).encode()
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url + path, data), timeout=LIMIT_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def json(self, path: str, document: Any = None) -> Any:
        status, body = self.call(path, document)
        assert status == 200, body
        return json.loads(body)

    def events(self, document: Any) -> Iterator[str]:
        """The server-sent events of a streamed answer."""
        _, body = self.call("/generate", {**document, "stream": True})
        for event in body.split("\n\n")[:-1]:
            assert event.startswith("data: ")
            yield event.removeprefix("data: ")

    def kill(self) -> None:
        """End whatever is left."""
        for pid in [*self.ranks, self.process.pid]:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def prompt(length: int, first: int = 1) -> dict[str, Any]:
    """A request body for two tokens after ``length`` of them."""
    return {"input_ids": [first + 7 * each for each in range(length)], "sampling_params": {"max_new_tokens": 2}}
