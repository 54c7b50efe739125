"""A headless Chromium driven over the DevTools protocol: enough to open a page, ask it things and look at it."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
    "--hide-scrollbars", "--remote-debugging-port=0", "--remote-allow-origins=*",
)  # fmt: skip
_SECONDS = 60


def find_chromium() -> str:
    """The browser's path; skips the test where there is none."""
    for name in (os.environ.get("NSYSK3_CHROMIUM"), "chromium", "chromium-browser", "google-chrome"):
        if name and (found := shutil.which(name)):
            return found
    pytest.skip("no chromium: apt-get install chromium, or set NSYSK3_CHROMIUM")


class Page:
    """One tab, and what its page did: ``errors`` on the console, ``requests`` sent, ``dialogs`` opened."""

    def __init__(self, address: str) -> None:
        websocket = pytest.importorskip("websocket", reason="no websocket-client: pip install -e .[dev]")
        self.socket = websocket.create_connection(address, timeout=_SECONDS, max_size=None)
        self.number = 0
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.dialogs: list[str] = []
        self.loaded = False
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command and its result; events that come meanwhile are noted."""
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": params}))
        while True:
            message = json.loads(self.socket.recv())
            if message.get("id") == self.number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                return dict(message["result"])
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(str(details.get("exception", {}).get("description") or details["text"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(str([value.get("value") for value in params["args"]]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Page.javascriptDialogOpening":
            self.dialogs.append(params["message"])
            self.number += 1
            self.socket.send(
                json.dumps({"id": self.number, "method": "Page.handleJavaScriptDialog", "params": {"accept": False}})
            )
        elif method == "Page.loadEventFired":
            self.loaded = True

    def open(self, path: Path) -> Page:
        """Load a file from disk, wait until it and its timeline stand, and note only what happens from here on."""
        for noted in (self.errors, self.requests, self.dialogs):
            noted.clear()
        self.loaded = False
        self.call("Page.navigate", url=path.absolute().as_uri())
        end = time.monotonic() + _SECONDS
        while not self.loaded and time.monotonic() < end:
            self.ask("1")
        assert self.loaded, "the page did not load"
        self.ask(
            "new Promise(done => { const look = () => !document.getElementById('tl') || globalThis.timeline || "
            "!document.getElementById('tl-failed').hidden ? done(1) : setTimeout(look, 20); look(); })"
        )
        return self

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise AssertionError(found["exceptionDetails"].get("exception", {}).get("description", found))
        return found["result"].get("value")

    def show(self, width: int, height: int = 900, *, dark: bool = False, ratio: float = 1) -> None:
        """Set the window's size and the colour scheme."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=ratio,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path, *, whole: bool = True, clip: dict[str, float] | None = None) -> Path:
        """What the page looks like, as PNG."""
        more: dict[str, Any] = {"clip": {**clip, "scale": 1}} if clip else {}
        data = self.call("Page.captureScreenshot", captureBeyondViewport=whole, **more)["data"]
        path.write_bytes(base64.b64decode(data))
        return path

    def pdf(self) -> bytes:
        """The page as it prints."""
        data = self.call("Page.printToPDF", printBackground=True, preferCSSPageSize=True)["data"]
        return base64.b64decode(data)


@contextmanager
def browser() -> Iterator[Page]:
    """A fresh Chromium with an empty profile and one tab; ended with the block."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [find_chromium(), *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                port = _port(Path(profile), process)
                with urlopen(f"http://127.0.0.1:{port}/json/list", timeout=_SECONDS) as answer:
                    tabs = json.load(answer)
                page = Page(next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page"))
                yield page
                page.socket.close()
            finally:
                process.terminate()
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()


def _port(profile: Path, process: subprocess.Popen[bytes]) -> int:
    file, end = profile / "DevToolsActivePort", time.monotonic() + _SECONDS
    while time.monotonic() < end and process.poll() is None:
        if file.exists() and (lines := file.read_text().splitlines()):
            return int(lines[0])
        time.sleep(0.05)
    pytest.skip("chromium does not start here")
