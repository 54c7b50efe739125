"""Whatever goes wrong, or is interrupted, is one line and an exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from command import COMMAND
from command import run as command
from conftest import GRAPH

from nsysk3.errors import InputError, InterruptedRunError, MissingToolError
from nsysk3.launch.interrupts import Presses, interrupts


@pytest.mark.parametrize(
    "arguments",
    [
        ["analyze"], ["no-such-command"], ["analyze", "--no-such-option", "x"], ["export", "--type", "csv", "x"],
        ["rules", "explain"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_wrong_usage_is_exit_code_2(arguments: list[str]) -> None:
    ran = command(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("nsysk3")
    assert len(ran.err.splitlines()) == 2
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (InputError("a.sqlite: spoilt"), 2, "nsysk3: a.sqlite: spoilt\n"),
        (MissingToolError("no nsys"), 3, "nsysk3: no nsys\n"),
        (InputError("two\nlines"), 2, "nsysk3: two lines\n"),
        (MemoryError(), 3, "nsysk3: out of memory"),
        (KeyError("x"), 70, "nsysk3: internal error, please report it (KeyError: 'x')"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_every_error_is_one_line_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, said: str
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("nsysk3.analysis.analyze.analyze", broken)
    monkeypatch.delenv("NSYSK3_DEBUG", raising=False)
    ran = command("analyze", GRAPH)
    assert (ran.code, ran.out, ran.err.count("\n")) == (code, "", 1)
    assert ran.err.startswith(said)
    assert "Traceback" not in ran.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "terminated"])
def test_an_interrupted_command_ends_with_one_line(tmp_path: Path, number: signal.Signals) -> None:
    """An nsys that never ends is what a user interrupts; it goes too, and leaves no half export."""
    nsys = tmp_path / "bin" / "nsys"
    nsys.parent.mkdir()
    nsys.write_text(
        "#!/bin/sh\n"
        'case "$*" in *--version*) echo "NVIDIA Nsight Systems version 2024.2.3.38";; *--help*) echo parquetdir;;\n'
        f"*) echo $$ > {tmp_path}/started.part; mv {tmp_path}/started.part {tmp_path}/started; sleep 600;; esac\n"
    )
    nsys.chmod(0o755)
    report = tmp_path / "in" / "r.nsys-rep"
    report.parent.mkdir()
    report.write_bytes(b"a report")
    command_line = [*COMMAND, "analyze", str(report), "--nsys", str(nsys)]
    with subprocess.Popen(
        command_line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "NSYSK3_CACHE": str(tmp_path / "cache")},
    ) as started:  # fmt: skip
        for _ in range(600):
            if (tmp_path / "started").exists() or started.poll() is not None:
                break
            time.sleep(0.1)
        time.sleep(1)  # past the start of nsys and into waiting for it
        started.send_signal(number)
        try:
            out, err = started.communicate(timeout=60)
        finally:
            started.kill()
    assert (started.returncode, out, err) == (130, "", "nsysk3: interrupted\n")
    assert [path.name for path in report.parent.iterdir()] == ["r.nsys-rep"]
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "started").read_text()), 0)


def test_another_press_leaves_the_last_word_to_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def ending(*_: object, **__: object) -> None:
        try:
            raise InterruptedRunError("interrupted by SIGINT; nothing of the run is left running; see out")
        finally:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("nsysk3.analysis.analyze.analyze", ending)
    ran = command("analyze", GRAPH)
    assert (ran.code, ran.err) == (
        130,
        "nsysk3: interrupted by SIGINT; nothing of the run is left running; see out\n",
    )


def test_presses_wait_for_what_takes_a_moment_and_change_nothing_at_the_end() -> None:
    done = []

    def moment(presses: Presses) -> None:
        with presses.held():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
            done.append(presses.count)

    with interrupts() as presses:
        with pytest.raises(KeyboardInterrupt):
            moment(presses)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        presses.ignore()
        signal.raise_signal(signal.SIGINT)
    assert (done, presses.count, presses.name, presses.now) == ([2], 4, "SIGINT", True)
