"""Ctrl-C while the command line is still being imported, where Python loses it, and when all is done."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

SLOW = """
import sys, time
class Slow:
    def find_spec(self, name, *_):
        if name == "nsysk3.cli":
            print("now", flush=True)
            time.sleep(600)
sys.meta_path.insert(0, Slow())
from nsysk3.__main__ import main
main()
"""


def test_ctrl_c_among_imports_is_one_line() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SLOW], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "now\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == "nsysk3: interrupted\n"
        assert process.wait(60) == 130


ENDS = """
import atexit, signal, sys, weakref
import nsysk3.cli
from nsysk3.__main__ import main
class Thing:
    def __del__(self):
        raise AttributeError("half made")
def run(*_, **__):
    if sys.argv[1] == "half made":
        kept = Thing()
        raise nsysk3.cli.InterruptedRunError("interrupted by SIGINT")
    if sys.argv[1] == "lost":
        thing = Thing()
        gone = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
        Thing.__del__ = lambda _: None
        del thing
        signal.sigtimedwait([], 600)
nsysk3.cli.app = run
atexit.register(signal.raise_signal, signal.SIGINT)
main()
"""


@pytest.mark.parametrize(
    ("way", "code", "said"),
    [
        ("lost", 130, "nsysk3: interrupted\n"),
        ("done", 0, ""),
        ("half made", 130, "nsysk3: interrupted by SIGINT\n"),
    ],
)
def test_ctrl_c_is_heeded_until_the_end_and_not_after(way: str, code: int, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDS, way], capture_output=True, text=True, check=False, timeout=100
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (code, said)
