"""Ctrl-C while the command line is still being imported."""

from __future__ import annotations

import signal
import subprocess
import sys

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
