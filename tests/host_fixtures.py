"""Hosts of tests: this machine, and the same over SSH.  Modules that need them name this one as a plugin."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from secrets import token_hex

import pytest
import sshd
from host_runs import over_ssh
from sshd import SshHosts

from nsysk3.launch import channel, hosts
from nsysk3.launch.hosts import Host, open_host
from nsysk3.run.config import Settings


@pytest.fixture(scope="session")
def ssh_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    """Four of them, as every test must leave them."""
    with sshd.hosts(tmp_path_factory.mktemp("ssh")) as found:
        yield found


@pytest.fixture(params=["local", "ssh"], scope="module")
def settings(request: pytest.FixtureRequest) -> Settings:
    """Settings with which a host is reached; the first in ``cluster.hosts``."""
    return Settings() if request.param == "local" else over_ssh(request.getfixturevalue("ssh_hosts"))


@pytest.fixture
def run_id() -> str:
    """A name that no other run has."""
    return f"test-{token_hex(4)}"


@pytest.fixture
def host(settings: Settings, run_id: str) -> Iterator[Host]:
    """A host for one test, which may do with it what it likes."""
    with open_host(settings.cluster, settings.cluster.hosts[0], run_id) as opened:
        yield opened


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is killed, lost or stuck is found to be so at once; not autouse, which in a plugin reaches every module."""
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
