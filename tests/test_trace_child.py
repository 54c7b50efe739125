"""No child is lost: Ctrl-C that comes while it is being started ends it too."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import Any

import pytest

from nsysk3.trace import child


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_middle_of_a_start_loses_no_child(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def interrupted(*words: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(start(*words, **options))
        os.kill(os.getpid(), number)  # handled between two lines of Python: before whoever called us has the child
        return started[0]

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(child.subprocess, "Popen", interrupted)
    before = signal.signal(number, stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            child.run_child(["sleep", "300"], None)
        assert signal.getsignal(number) is stop
    finally:
        signal.signal(number, before)
    assert started[0].wait(timeout=30) == -signal.SIGKILL
