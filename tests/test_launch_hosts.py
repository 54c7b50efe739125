"""Hosts do what they are asked."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from processes import eventually, is_gone

from nsysk3.errors import RunFailedError
from nsysk3.launch import hosts, keeper_children
from nsysk3.launch.hosts import Host, open_host
from nsysk3.run.config import Settings

pytest_plugins = "host_fixtures"
pytestmark = pytest.mark.usefixtures("short_grace")


@pytest.fixture(scope="module")
def lasting(settings: Settings) -> Iterator[Host]:
    """A host for tests that leave it as it was."""
    with open_host(settings.cluster, settings.cluster.hosts[0], "test-lasting") as opened:
        yield opened


def test_a_command_ends_as_in_a_shell(lasting: Host) -> None:
    script = "cat; echo $NSYSK3_RUN $SECRET >&2; exit 3"
    done = lasting.run(["sh", "-c", script], env={"SECRET": "word"}, stdin=b"given \xff")
    assert (done.code, done.out, done.err) == (3, "given \ufffd", "test-lasting word\n")
    assert lasting.run(["sh", "-c", "kill -9 $$"]).code == -9
    assert lasting.run(["no-such-program"]).code == 127
    assert lasting.run(["/"]).code == 126
    assert lasting.run(["pwd"], cwd="/usr").out == "/usr\n"


def test_a_command_that_takes_too_long_is_killed_with_its_children(lasting: Host, tmp_path: Path) -> None:
    seen = tmp_path / "pid"
    done = lasting.run(["sh", "-c", 'echo here; sleep 1000 & echo $! >"$0"; wait', str(seen)], timeout_s=0.5)
    assert (done.code, done.out) == (124, "here\n")
    assert "0.5 s" in done.err
    assert eventually(lambda: is_gone(int(seen.read_text())))


def test_a_command_is_over_when_it_ends_though_its_child_holds_the_pipe(lasting: Host) -> None:
    done = lasting.run(["sh", "-c", "sleep 1000 & echo over"], timeout_s=20)
    assert (done.code, done.out) == (0, "over\n")


def test_of_much_output_the_ends_are_kept(lasting: Host) -> None:
    done = lasting.run(["sh", "-c", "echo first; head -c 20000000 /dev/zero; echo last"])
    assert done.code == 0
    assert done.out.startswith("first\n")
    assert done.out.endswith("last\n")
    assert len(done.out) < 4 * keeper_children.KEPT


def test_the_clock_of_this_machine_is_our_clock(lasting: Host) -> None:
    offset = lasting.clock(50)
    assert abs(offset.offset_ns) <= offset.uncertainty_ns
    assert offset.uncertainty_ns > 0


def test_tails_put_together_are_the_log(lasting: Host, tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = "import sys, time\nfor part in 'a\\n', 'é', '你好', '🙂\\n':\n  for byte in part.encode():\n"
    script += "    sys.stdout.buffer.write(bytes([byte])); sys.stdout.flush(); time.sleep(0.003)\n"
    script += "sys.stdout.buffer.write(b'x' * 600000); sys.exit(7)"
    lasting.start("writer", [sys.executable, "-c", script], log=str(log))
    text, offset = "", 0
    while (code := lasting.poll("writer")) is None or offset < log.stat().st_size:
        more, offset = lasting.tail("writer", offset)
        text += more
    assert code == 7
    assert text == log.read_text() == "a\né你好🙂\n" + "x" * 600000
    assert lasting.tail("writer", offset) == ("", offset)


@pytest.mark.parametrize("size", [0, 1, hosts.PIECE - 1, hosts.PIECE, 2 * hosts.PIECE + 1])
def test_files_come_back_as_they_went(lasting: Host, tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    there, back = tmp_path / "there", tmp_path / "back"
    assert lasting.exists(str(there)) is None
    lasting.put(data, str(there), 0o640)
    assert lasting.exists(str(there)) == size
    assert there.stat().st_mode & 0o777 == 0o640
    lasting.fetch(str(there), back)
    assert back.read_bytes() == data
    lasting.remove(str(there))
    assert [path.name for path in tmp_path.iterdir()] == ["back"]


def test_what_cannot_be_done_is_said_in_one_line(lasting: Host, tmp_path: Path) -> None:
    attempts: list[Callable[[], object]] = [
        lambda: lasting.fetch(str(tmp_path / "none"), tmp_path / "back"),
        lambda: lasting.put(b"", str(tmp_path / "no" / "folder")),
        lambda: lasting.remove(str(tmp_path / "none")),
        lambda: lasting.make_scratch(str(tmp_path)),
        lambda: lasting.start("server", ["no-such-program"], log=str(tmp_path / "log")),
        lambda: lasting.start("server", ["true"], log=str(tmp_path / "no" / "log")),
    ]
    for attempt in attempts:
        with pytest.raises(RunFailedError) as raised:
            attempt()
        assert str(raised.value).startswith(f"{lasting.name}: ")
        assert "\n" not in str(raised.value)
        assert str(tmp_path) in str(raised.value) or "no-such-program" in str(raised.value)
    assert not (tmp_path / "back").exists()
    assert lasting.run(["true"]).code == 0


def test_threads_share_a_host(lasting: Host) -> None:
    outs: dict[int, str] = {}

    def ask(number: int) -> None:
        outs[number] = lasting.run(["sh", "-c", f"sleep 0.{9 - number}; echo {number}"]).out

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outs == {number: f"{number}\n" for number in range(10)}
