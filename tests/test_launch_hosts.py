"""Hosts do what they are asked, and whatever happens nothing of a run stays on them and nothing else is touched."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from importlib import resources
from pathlib import Path
from secrets import token_hex

import pytest
import sshd
from processes import ZOO_SIZE, environment, eventually, is_gone, keepers_of, of_run, parent_of, start_zoo
from sshd import SshHosts

from nsysk3.errors import InputError, MissingToolError, NsysK3Error, RunFailedError
from nsysk3.launch import channel, hosts, keeper_children, keeper_processes, transport
from nsysk3.launch.hosts import Host, open_host
from nsysk3.launch.leftovers import end_leftovers, find_leftovers
from nsysk3.launch.open_hosts import open_hosts
from nsysk3.run.config import Settings


@pytest.fixture(scope="module")
def ssh_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    with sshd.hosts(tmp_path_factory.mktemp("ssh")) as found:
        yield found


@pytest.fixture(params=["local", "ssh"], scope="module")
def settings(request: pytest.FixtureRequest) -> Settings:
    """Settings with which a host is reached; the first in ``cluster.hosts``."""
    return Settings() if request.param == "local" else over_ssh(request.getfixturevalue("ssh_hosts"))


@pytest.fixture(scope="module")
def lasting(settings: Settings) -> Iterator[Host]:
    """A host for tests that leave it as it was."""
    with open_host(settings.cluster, settings.cluster.hosts[0], "test-lasting") as opened:
        yield opened


def over_ssh(found: SshHosts) -> Settings:
    cluster = {"hosts": list(found.names), "ssh_options": list(found.options), "python": "/usr/bin/python3"}
    return Settings.model_validate({"cluster": cluster})


@pytest.fixture
def run_id() -> str:
    return f"test-{token_hex(4)}"


@pytest.fixture
def host(settings: Settings, run_id: str) -> Iterator[Host]:
    with open_host(settings.cluster, settings.cluster.hosts[0], run_id) as opened:
        yield opened


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "GRACE_S", 0.2)
    monkeypatch.setattr(channel, "LOST_GRACE_S", 0.2)
    monkeypatch.setattr(channel, "STUCK_S", 1.5)


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process of another run, which must survive."""
    with subprocess.Popen(
        ["sleep", "1000"], env={**os.environ, "NSYSK3_RUN": "other", "NSYSK3_KEEPER": "other/"}
    ) as it:
        yield it
        it.kill()


# What is asked of a host


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


# Stopping


def test_a_stop_ends_all_of_it_and_nothing_else(
    host: Host, tmp_path: Path, run_id: str, bystander: subprocess.Popen[bytes]
) -> None:
    host.start("other", ["sleep", "1000"], log=str(tmp_path / "other"))
    zoo = start_zoo(host, tmp_path)
    host.stop("zoo", 0.4)
    stubborn = [pid for pid in zoo if not is_gone(pid)]
    # What emptied its environment, its session and its parent is known to be the run's, but not of what: it goes last.
    assert len(stubborn) <= 1
    assert host.poll("zoo") is not None
    assert host.poll("other") is None
    assert host.stop("other", 5.0) == -signal.SIGTERM
    host.close()
    assert all(is_gone(pid) for pid in zoo)
    assert not of_run(run_id)
    assert bystander.poll() is None


def test_a_name_can_be_used_again_once_it_has_ended(host: Host, tmp_path: Path) -> None:
    host.start("server", ["sleep", "1000"], log=str(tmp_path / "log"))
    with pytest.raises(RunFailedError, match="server"):
        host.start("server", ["true"], log=str(tmp_path / "log"))
    host.stop("server", 5.0)
    host.start("server", ["sh", "-c", "echo again"], log=str(tmp_path / "log"))
    assert eventually(lambda: host.poll("server") == 0)
    assert host.tail("server")[0] == "again\n"


SERVER = """
import os, signal, sys, time
def leave(*_):
    print("asked", flush=True)
    os.kill(child, signal.SIGKILL)
    sys.exit(0)
child = os.fork()
if child == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True: time.sleep(1000)
signal.signal(signal.SIGTERM, signal.SIG_IGN if sys.argv[1] == "hangs" else leave)
print("ready", flush=True)
while True: time.sleep(1000)
"""


@pytest.mark.nsys
@pytest.mark.parametrize("server", ["leaves", "hangs"])
def test_nsys_writes_its_report_before_it_ends(run_id: str, tmp_path: Path, nsys: Path, server: str) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    command = [str(nsys), "profile", "-t", "nvtx", "-s", "none", "--cpuctxsw=none", "--trace-fork-before-exec=true"]
    with open_host(Settings().cluster, "localhost", run_id) as host:
        host.make_scratch(str(tmp_path / "scratch"))
        env = {"TMPDIR": str(tmp_path / "scratch")}
        ours = [sys.executable, "server.py", server]
        log = str(tmp_path / "log")
        host.start("server", [*command, "-o", "trace", *ours], env=env, cwd=str(tmp_path), log=log)
        assert eventually(lambda: "ready" in host.tail("server")[0])
        # The command line of nsys has the server's in it, and must not be taken for it.
        assert host.signal_matching("server", "server.py", 0) == 2
        began = time.monotonic()
        assert host.stop("server", 2.0 if server == "hangs" else 30.0) is not None
        took = time.monotonic() - began
    assert ("asked" in Path(log).read_text()) == (server == "leaves")
    assert (tmp_path / "trace.nsys-rep").stat().st_size > 0
    assert took < 30.0  # neither waited for what had long ended
    assert not (tmp_path / "scratch").exists()
    assert not of_run(run_id)


# Deaths


def connection_of(run_id: str) -> int:
    """Our ssh."""
    return next(pid for pid, line in of_run(run_id).items() if "BatchMode" in line and parent_of(pid) == os.getpid())


DEATHS: dict[str, Callable[[Host, str], object]] = {
    "closed": lambda host, run: host.close(),
    "closed now": lambda host, run: host.close(now=True),
    "keeper killed": lambda host, run: os.kill(keepers_of(run)[1], signal.SIGKILL),
    "keeper told to end": lambda host, run: os.kill(keepers_of(run)[1], signal.SIGTERM),
    "keeper hung up": lambda host, run: os.kill(keepers_of(run)[1], signal.SIGHUP),
    "guard told to end": lambda host, run: os.kill(keepers_of(run)[0], signal.SIGTERM),
    "guard killed, then closed": lambda host, run: (os.kill(keepers_of(run)[0], signal.SIGKILL), host.close()),
    "keeper stopped, then closed": lambda host, run: (os.kill(keepers_of(run)[1], signal.SIGSTOP), host.close()),
}
DEATHS_OF = [("local", death) for death in DEATHS]
DEATHS_OF += [("ssh", death) for death in ("closed", "keeper killed", "keeper stopped, then closed")]
SSH_DEATHS: dict[str, Callable[[Host, str, SshHosts], object]] = {
    "our ssh killed": lambda host, run, found: os.kill(connection_of(run), signal.SIGKILL),
    "their sshd killed": lambda host, run, found: [os.kill(pid, signal.SIGKILL) for pid in found.sessions(host.name)],
    "silence": lambda host, run, found: [os.kill(pid, signal.SIGSTOP) for pid in found.sessions(host.name)],
}


def is_over(host: Host, run_id: str, zoo: list[int], folder: Path) -> None:
    """Nothing of a run is left."""
    assert eventually(lambda: all(is_gone(pid) for pid in zoo)), [pid for pid in zoo if not is_gone(pid)]
    assert eventually(lambda: not (folder / "scratch").exists())
    host.close()
    assert eventually(lambda: not of_run(run_id)), of_run(run_id)


@pytest.mark.parametrize(("settings", "death"), DEATHS_OF, indirect=["settings"])
def test_nothing_is_left_however_a_run_ends(
    death: str,
    host: Host,
    run_id: str,
    tmp_path: Path,
    bystander: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hosts, "CLOSE_S", 0.3 if "stopped" in death else hosts.CLOSE_S)
    host.make_scratch(str(tmp_path / "scratch"))
    (tmp_path / "scratch" / "deep").mkdir()
    zoo = start_zoo(host, tmp_path)
    waiting = threading.Thread(target=ask_for_ever, args=(host,), daemon=True)
    waiting.start()
    DEATHS[death](host, run_id)
    is_over(host, run_id, zoo, tmp_path)
    waiting.join()
    assert bystander.poll() is None
    with pytest.raises(RunFailedError, match=host.name):
        host.run(["true"])


@pytest.mark.parametrize("death", SSH_DEATHS)
def test_nothing_is_left_when_the_connection_goes(
    death: str,
    ssh_hosts: SshHosts,
    run_id: str,
    tmp_path: Path,
    bystander: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if death == "silence":
        monkeypatch.setattr(channel, "SILENCE_S", 1.5)
        monkeypatch.setattr(channel, "BEAT_S", 0.3)
    with open_host(over_ssh(ssh_hosts).cluster, ssh_hosts.names[1], run_id) as host:
        host.make_scratch(str(tmp_path / "scratch"))
        zoo = start_zoo(host, tmp_path)
        SSH_DEATHS[death](host, run_id, ssh_hosts)
        assert eventually(lambda: all(is_gone(pid) for pid in zoo)), [pid for pid in zoo if not is_gone(pid)]
        for pid in ssh_hosts.sessions(host.name):
            os.kill(pid, signal.SIGCONT)
        is_over(host, run_id, zoo, tmp_path)
    assert bystander.poll() is None


def test_what_dead_keepers_left_is_ended_by_another(
    settings: Settings, run_id: str, tmp_path: Path, bystander: subprocess.Popen[bytes]
) -> None:
    with open_host(settings.cluster, settings.cluster.hosts[0], run_id) as host:
        host.make_scratch(str(tmp_path / "scratch"))
        zoo = start_zoo(host, tmp_path)
        kill_both_keepers(run_id)
        assert host.close() == ()
    assert bystander.poll() is None
    for pid in unknowable(zoo):
        os.kill(pid, signal.SIGKILL)
    is_over(host, run_id, zoo, tmp_path)


KEPT_THROUGH: dict[str, Callable[[Host, str], object]] = {
    "its end": lambda host, run_id: host.close(),
    "a killed keeper": lambda host, run_id: os.kill(keepers_of(run_id)[1], signal.SIGKILL),
    "a killed nsysk3": lambda host, run_id: host._channel.cut(),
    "dead keepers": lambda host, run_id: kill_both_keepers(run_id),
}


@pytest.mark.parametrize("way", KEPT_THROUGH)
def test_what_is_to_be_kept_outlives_the_run_until_cleanup(
    way: str, ssh_hosts: SshHosts, run_id: str, tmp_path: Path
) -> None:
    there = {"scratch": str(tmp_path), "hosts": [ssh_hosts.names[0]]}
    settings = Settings.model_validate({"cluster": {**over_ssh(ssh_hosts).cluster.model_dump(), **there}})
    scratch = tmp_path / f"nsysk3-{run_id}"
    with open_host(settings.cluster, ssh_hosts.names[0], run_id) as host:
        host.make_scratch(str(scratch))
        for name in ("trace.nsys-rep", "trace.sqlite", "brought", "tmp/socket"):
            (scratch / name).parent.mkdir(exist_ok=True)
            (scratch / name).write_text(name)
        host.keep(f"{scratch}/brought")
        host.keep(f"{tmp_path}//{scratch.name}/trace.nsys-rep")  # as where cluster.scratch ends with a slash
        host.keep(f"{scratch}/brought", False)
        KEPT_THROUGH[way](host, run_id)
    assert list(map(Path, host.kept)) == [scratch / "trace.nsys-rep"]
    assert eventually(lambda: not of_run(run_id))
    assert {path.name for path in scratch.iterdir()} == {"trace.nsys-rep", ".nsysk3-run"}
    assert (scratch / "trace.nsys-rep").read_text() == "trace.nsys-rep"
    (found,) = find_leftovers(settings, run_id, settings.cluster.hosts)
    assert (found.kind, found.what) == ("scratch", str(scratch))
    assert end_leftovers(settings, run_id, settings.cluster.hosts) == []
    assert not scratch.exists()


def test_of_what_its_user_ended_nothing_is_kept(run_id: str, tmp_path: Path) -> None:
    with open_host(Settings().cluster, "localhost", run_id) as host:
        host.make_scratch(f"{tmp_path}/scratch")
        (tmp_path / "scratch/trace").touch()
        host.keep(f"{tmp_path}/scratch/trace")
        host.keep_nothing()
        host.keep(f"{tmp_path}/scratch/trace")  # by a thread that does not know yet
    assert host.kept == []
    assert not (tmp_path / "scratch").exists()


def kill_both_keepers(run_id: str) -> None:
    guard, keeper = keepers_of(run_id)
    os.kill(guard, signal.SIGSTOP)  # so that both are dead before anything is noticed
    os.kill(keeper, signal.SIGKILL)
    os.kill(guard, signal.SIGKILL)


def unknowable(zoo: list[int]) -> list[int]:
    """What has no mark, no parent and no session left: only the keeper under which it started could have known it."""
    return [pid for pid in zoo if not is_gone(pid) and "NSYSK3_RUN" not in environment(pid)]


def ask_for_ever(host: Host) -> None:
    """A request that is under way when the end comes gets an answer: that the host is lost."""
    with suppress(RunFailedError):
        host.run(["sleep", "1000"], timeout_s=1000)


# Deaths of ours

DRIVER = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from nsysk3.launch import channel, hosts
from nsysk3.launch.open_hosts import open_hosts
from nsysk3.run.config import Settings
from processes import start_zoo
channel.LOST_GRACE_S, hosts.GRACE_S = 0.2, float(sys.argv[5])
settings, run, folder = Settings.model_validate_json(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
print("opening", flush=True)
with open_hosts(settings, run, settings.cluster.hosts) as opened:
    zoo = []
    for number, host in enumerate(opened):
        host.make_scratch(f"{folder}/scratch-{number}")
        zoo += start_zoo(host, folder)
    print(json.dumps(zoo), flush=True)
    opened[0].run(["sleep", "1000"], timeout_s=1000)
"""


def drive(settings: Settings, run_id: str, folder: Path, grace_s: float = 0.2) -> subprocess.Popen[str]:
    """Another nsysk3 with a zoo on every host."""
    tests = str(Path(__file__).parent)
    words = [sys.executable, "-c", DRIVER, tests, settings.model_dump_json(), run_id, str(folder), str(grace_s)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def zoo_of(driver: subprocess.Popen[str]) -> list[int]:
    assert driver.stdout is not None
    driver.stdout.readline()
    found: list[int] = ast.literal_eval(driver.stdout.readline())
    return found


@pytest.mark.parametrize("ending", ["killed", "Ctrl-C", "Ctrl-C twice"])
def test_nothing_is_left_of_four_hosts_when_nsysk3_ends(
    ending: str, ssh_hosts: SshHosts, run_id: str, tmp_path: Path, bystander: subprocess.Popen[bytes]
) -> None:
    # Of what ignores TERM an orderly end of two minutes would be longer than the test waits.
    with drive(over_ssh(ssh_hosts), run_id, tmp_path, 120.0 if ending == "Ctrl-C twice" else 0.2) as driver:
        zoo = zoo_of(driver)
        assert len(zoo) == 4 * ZOO_SIZE
        driver.send_signal(signal.SIGKILL if ending == "killed" else signal.SIGINT)
        if ending == "Ctrl-C twice":
            assert eventually(lambda: sum(map(is_gone, zoo)) >= 4)  # it has begun to end in order
            driver.send_signal(signal.SIGINT)
        assert driver.wait(60) == (-signal.SIGKILL if ending == "killed" else -signal.SIGINT)
        if ending != "killed":
            assert all(is_gone(pid) for pid in zoo)  # it came back when all was done
    assert eventually(lambda: not of_run(run_id)), of_run(run_id)
    assert all(is_gone(pid) for pid in zoo)
    assert not list(tmp_path.glob("scratch*"))
    assert bystander.poll() is None


def test_nothing_is_left_when_nsysk3_is_killed_at_any_moment(
    settings: Settings, run_id: str, tmp_path: Path, bystander: subprocess.Popen[bytes]
) -> None:
    cluster = settings.cluster.model_copy(update={"hosts": settings.cluster.hosts[:1]})
    for moment in range(3):
        with drive(Settings(cluster=cluster), run_id, tmp_path) as driver:
            assert driver.stdout is not None
            driver.stdout.readline()
            time.sleep(0.2 * moment)  # into the opening, the zoo, the request: not a wait for anything
            driver.kill()
        assert eventually(lambda: not of_run(run_id)), of_run(run_id)
        zoo = [int(word) for seen in tmp_path.glob("zoo-????????") for word in seen.read_text().split()]
        assert all(is_gone(pid) for pid in zoo)
        assert not list(tmp_path.glob("scratch*"))
    assert bystander.poll() is None


def test_what_a_power_loss_left_is_found_and_ended(
    ssh_hosts: SshHosts,
    run_id: str,
    tmp_path: Path,
    bystander: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = Settings.model_validate(
        {
            "cluster": {
                **over_ssh(ssh_hosts).cluster.model_dump(),
                "scratch": str(tmp_path),
                "hosts": ssh_hosts.names[:2],
            }
        }
    )
    names = settings.cluster.hosts
    assert find_leftovers(settings, run_id, names) == []
    with open_host(settings.cluster, names[0], run_id) as host:
        for folder in (f"nsysk3-{run_id}-0", f"nsysk3-{run_id}0"):
            host.make_scratch(str(tmp_path / folder))
        (tmp_path / f"nsysk3-{run_id}0" / ".nsysk3-run").write_text(f"{run_id}0\nother\n")  # a longer name, another run
        zoo = start_zoo(host, tmp_path)
        kill_both_keepers(run_id)
        monkeypatch.setattr(Host, "_close_again", lambda host: [])  # as if we were dead too
        host.close()
    found = find_leftovers(settings, run_id, [*names, "127.0.0.9"])
    assert {leftover.kind for leftover in found if leftover.host == names[0]} == {"process", "scratch"}
    assert [leftover.host for leftover in found if leftover.kind == "unreachable"] == ["127.0.0.9"]
    assert end_leftovers(settings, run_id, names) == []
    for pid in unknowable(zoo):
        os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: all(is_gone(pid) for pid in zoo))
    assert not of_run(run_id)
    assert [path.name for path in tmp_path.glob("nsysk3-*")] == [f"nsysk3-{run_id}0"]
    assert bystander.poll() is None


# Reaching hosts


def refusal(settings: Settings, name: str, kind: type[NsysK3Error] = MissingToolError) -> str:
    """What is said about a host that cannot be reached."""
    run_id = f"test-{token_hex(4)}"
    with pytest.raises(kind) as raised:
        open_host(settings.cluster, name, run_id)
    assert "\n" not in str(raised.value)
    assert name in str(raised.value)
    assert eventually(lambda: not of_run(run_id))
    return str(raised.value)


def test_what_a_login_shell_prints_does_no_harm(ssh_hosts: SshHosts, run_id: str) -> None:
    noise = "echo Welcome; head -c 300000 /dev/zero | tr '\\0' x; echo; echo 5; echo '{}'; echo words >&2; printf half"
    with changed(ssh_hosts.home(ssh_hosts.names[0]) / ".bashrc", noise):
        if (
            "Welcome"
            not in subprocess.run(
                ["ssh", *ssh_hosts.options, ssh_hosts.names[0], "true"], capture_output=True, text=True, check=False
            ).stdout
        ):
            pytest.skip("this shell reads no .bashrc for a command of sshd")
        with open_host(over_ssh(ssh_hosts).cluster, ssh_hosts.names[0], run_id) as host:
            assert host.run(["echo", "fine"]).out == "fine\n"


def test_a_host_that_cannot_be_reached_is_named_with_the_words_of_ssh(
    ssh_hosts: SshHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, name = over_ssh(ssh_hosts), ssh_hosts.names[2]
    with changed(ssh_hosts.known_hosts(), ""):
        assert "Host key verification failed" in refusal(settings, name)
    other = ssh_hosts.known_hosts().read_text().splitlines()
    with changed(ssh_hosts.known_hosts(), " ".join([other[2].split()[0], *other[0].split()[1:]])):
        assert "Host key verification failed" in refusal(settings, name)
    with changed(ssh_hosts.folder / "authorized_keys", ""):
        assert "Permission denied" in refusal(settings, name)
    assert "refused" in refusal(settings, "127.0.0.9")
    assert "not resolve" in refusal(settings, "no-such-host.invalid")
    cluster = {**settings.cluster.model_dump(), "python": "/no/such/python"}
    assert "/no/such/python" in refusal(Settings.model_validate({"cluster": cluster}), name)
    with changed(ssh_hosts.home(name) / ".bashrc", "echo Wait; sleep 3"):
        monkeypatch.setattr(transport, "SSH_S", 1.0)
        assert "no answer" in refusal(settings, name)
    for wrong in ("-oProxyCommand=false", "", "a b"):
        assert repr(wrong) in refusal(settings, wrong, InputError)


class changed:  # noqa: N801
    """A file with another text for a while."""

    def __init__(self, path: Path, text: str) -> None:
        self.path, self.text = path, text
        self.before = path.read_text() if path.exists() else None

    def __enter__(self) -> None:
        self.path.write_text(self.text)

    def __exit__(self, *_: object) -> None:
        if self.before is None:
            self.path.unlink()
        else:
            self.path.write_text(self.before)


def test_when_one_of_the_hosts_fails_the_others_are_closed(ssh_hosts: SshHosts, run_id: str) -> None:
    settings = over_ssh(ssh_hosts)
    with ExitStack() as stack, pytest.raises(MissingToolError) as raised:
        stack.enter_context(open_hosts(settings, run_id, [*ssh_hosts.names[:2], "127.0.0.9", "127.0.0.10"]))
    assert ssh_hosts.names[0] not in str(raised.value)
    assert "127.0.0.9" in str(raised.value)
    assert "127.0.0.10" in str(raised.value)
    assert eventually(lambda: not of_run(run_id))
    with ExitStack() as stack, pytest.raises(InputError, match="once"):
        stack.enter_context(open_hosts(settings, run_id, ["127.0.0.2", "127.0.0.2"]))


# The keeper by itself


def test_a_signal_reaches_the_process_that_was_meant_or_none(bystander: subprocess.Popen[bytes]) -> None:
    stat = keeper_processes.read_stat(bystander.pid)
    assert stat is not None
    assert not keeper_processes.send(stat._replace(start=stat.start - 1), signal.SIGKILL)
    assert bystander.poll() is None
    assert keeper_processes.send(stat, signal.SIGKILL)
    assert bystander.wait() == -signal.SIGKILL
    assert not keeper_processes.send(stat, signal.SIGKILL)


@pytest.mark.parametrize("name", transport.SOURCES)
def test_the_keeper_runs_on_any_python_of_a_host(name: str) -> None:
    tree = ast.parse(resources.files("nsysk3.launch").joinpath(f"{name}.py").read_text(), feature_version=(3, 8))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert all(alias.name in sys.stdlib_module_names for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            package, _, module = str(node.module).rpartition(".")
            assert (package or module).split(".")[0] in sys.stdlib_module_names or module in transport.SOURCES
