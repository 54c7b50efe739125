"""Waiting for a server to become ready, and showing what it does meanwhile."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable
from urllib.parse import urlsplit

# What SGLang logs once its first answer is through.  /health generates a token and can time out while kernels compile.
READY = "The server is fired up and ready to roll!"
# Lines of a start that tell a reader how far it is.
_MILESTONE = re.compile(
    r"Load weight (?:begin|end)|KV Cache is allocated|Memory pool end|Capture \S*\s?cuda graph (?:begin|end)|"
    r"max_total_num_tokens=|Init torch distributed (?:begin|ends)|Uvicorn running|fired up|K3 SP collective|"
    r"Capture range (?:started|ended)"
)
_PROGRESS = re.compile(r"\d{1,3}% |Loading safetensors|Compiling|warm|Capturing", re.IGNORECASE)
_PREFIX = re.compile(r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?P<rank>[^\]]*)\]\s*(?:INFO:?\s+)?")
_BAR = re.compile(r"\|[^|]*\|")
PROGRESS_EVERY_S = 15.0
STILL_EVERY_S = 60.0
_LONGEST = 160


class Progress:
    """Turns a log into a few lines a minute: each milestone once, progress every 15 s, a sign of life a minute.

    Ranks and nodes say the same things: a milestone's text is shown for whoever says it first.
    """

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._clock = clock
        self._last = clock()
        self._seen: set[str] = set()
        self.latest = ""

    def line(self, host: str, line: str) -> None:
        """Take one line of the log of a host."""
        text = tidy(line)
        if not text:
            return
        self.latest = f"{host}: {text}"
        if _MILESTONE.search(text):
            kind = re.sub(r"[\d.]+", "#", text)[:60]
            if kind not in self._seen:
                self._seen.add(kind)
                self._show(self.latest)
        elif _PROGRESS.search(text) and self._clock() - self._last >= PROGRESS_EVERY_S:
            self._show(self.latest)

    def still(self) -> None:
        """Called now and then: says that it is still waiting, and for what, when nothing was shown for a minute."""
        if self._clock() - self._last >= STILL_EVERY_S:
            self._show(f"still starting; last: {self.latest}" if self.latest else "still starting; nothing printed yet")

    def _show(self, text: str) -> None:
        self._last = self._clock()
        self._say(f"  {text}")


def answers(url: str, timeout_s: float = 5.0) -> bool:
    """Whether the server generates: its /health says so with status 200."""
    import httpx

    try:
        return httpx.get(url + "/health", timeout=timeout_s, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def listens(url: str, timeout_s: float = 2.0) -> bool:
    """Whether anything takes connections at the address of ``url``."""
    place = urlsplit(url)
    try:
        socket.create_connection((place.hostname, place.port or 80), timeout_s).close()
    except OSError:
        return False
    return True


def tidy(line: str) -> str:
    """A log line without its date, level and progress bar, one printable line."""
    text = _BAR.sub("", _PREFIX.sub("", line))
    text = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def minutes(seconds: float) -> str:
    """Seconds as 0:07, 6:58 or 1:02:03."""
    whole = int(seconds)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"
