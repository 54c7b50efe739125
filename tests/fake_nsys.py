#!/usr/bin/env python3
"""A stand-in for nsys that needs no GPU: its command line, its messages, and reports that are copies of a fixture.

``profile`` runs the command, captures between the marks that loopback_server.py writes where CUDA's profiler calls
would be, and writes its report when the capture ends, or without --capture-range when the command does.  ``export``
gives the copy back.  $FAKE_NSYS_REPORT is the fixture; $FAKE_NSYS holds words: blind (never sees a capture), raw (no
importer, so only a .qdstrm), silent-end (dies instead of writing its report).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time

VERSION = "NVIDIA Nsight Systems version 2025.3.1.90-253135822126v0"
EXPORT_HELP = "usage: nsys export [<args>] <file>\n  --include-blobs=\n  -t, --type=\n  -o, --output=\n"
MODE = os.environ.get("FAKE_NSYS", "").split()


def say(text: str) -> None:
    print(text, flush=True)


def value(words: list[str], short: str, long: str) -> str | None:
    for index, word in enumerate(words):
        if word in (short, long):
            return words[index + 1]
        if word.startswith(long + "="):
            return word.partition("=")[2]
    return None


def write_report(output: str) -> None:
    """As nsys does when a capture ends: first a raw file, then the report."""
    raw = tempfile.NamedTemporaryFile(prefix="nsys-report-", suffix=".qdstrm", delete=False).name  # noqa: SIM115
    say(f"Generating '{raw}'")
    if "silent-end" in MODE:
        os._exit(1)
    source = os.environ["FAKE_NSYS_REPORT"]
    if "raw" in MODE:
        say("Importer error status: The importer binary and its dependencies were not found.")
        shutil.copy(source, raw)
        shutil.move(raw, output + ".qdstrm")
        return
    shutil.copy(source, output + ".part")
    os.replace(output + ".part", output + ".nsys-rep")  # noqa: PTH105
    os.unlink(raw)  # noqa: PTH108
    name = os.path.basename(output)  # noqa: PTH119
    sys.stdout.write(f"[1/1] [0%      ] {name}.nsys-rep\r[1/1] [=====100%] {name}.nsys-rep\n")
    sys.stdout.flush()


def watch(marks: str, output: str, done: threading.Event) -> None:
    """Follow the marks of the server."""
    seen = 0
    while not done.is_set():
        with open(marks) as file:  # noqa: PTH123
            lines = file.read().split()
        for mark in lines[seen:]:
            seen += 1
            if mark == "start":
                say("Capture range started in the application.")
            elif mark == "stop":
                say("Capture range ended in the application.")
                write_report(output)
                done.set()
        time.sleep(0.02)


def profile(words: list[str]) -> int:
    options = {"-o", "-t", "-s", "-f", "-c", "--output", "--trace", "--sample", "--force-overwrite", "-e"}
    at = 0
    while at < len(words) and words[at].startswith("-"):
        at += 2 if words[at] in options else 1
    given, command = words[:at], words[at:]
    output = value(given, "-o", "--output")
    assert output
    marks = tempfile.NamedTemporaryFile(prefix="fake-nsys-", delete=False).name  # noqa: SIM115
    ranged = value(given, "-c", "--capture-range") is not None
    done = threading.Event()
    child = subprocess.Popen(command, env={**os.environ, "LOOPBACK_CAPTURE_FILE": marks})
    if ranged and "blind" not in MODE:
        threading.Thread(target=watch, args=(marks, output, done), daemon=True).start()
    code = child.wait()
    if not ranged:
        write_report(output)
        done.set()
    os.unlink(marks)  # noqa: PTH108
    say("Generated:\n" + (f"\t{output}.nsys-rep" if done.is_set() else ""))
    return code if code >= 0 else 128 - code


def main() -> int:
    words = sys.argv[1:]
    if words == ["--version"]:
        say(VERSION)
        return 0
    if words[:1] == ["export"]:
        if "--help" in words:
            say(EXPORT_HELP)
            return 0
        target = value(words, "-o", "--output")
        assert target
        shutil.copy(words[-1], target)
        return 0
    if words[:2] == ["profile", "--help"]:
        say("--trace-fork-before-exec --capture-range-end --cuda-graph-trace --cpuctxsw")
        return 0
    if words[:1] == ["profile"]:
        return profile(words[1:])
    say(f"unrecognised option {' '.join(words)}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
