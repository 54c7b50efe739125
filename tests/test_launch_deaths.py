"""Whoever dies, nothing of a run stays on its hosts and nothing else is touched."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from host_runs import drive, is_over, over_ssh, zoo_of
from processes import ZOO_SIZE, eventually, is_gone, keepers_of, of_run, parent_of, start_zoo
from sshd import SshHosts

from nsysk3.errors import RunFailedError
from nsysk3.launch import channel, hosts
from nsysk3.launch.hosts import Host, open_host
from nsysk3.run.config import Settings

pytest_plugins = "host_fixtures"
pytestmark = pytest.mark.usefixtures("short_grace")


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


def ask_for_ever(host: Host) -> None:
    """A request that is under way when the end comes gets an answer: that the host is lost."""
    with suppress(RunFailedError):
        host.run(["sleep", "1000"], timeout_s=1000)


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


# Deaths of ours


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
