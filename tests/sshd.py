"""Four hosts that are this machine: OpenSSH servers on 127.0.0.2 to .5, with homes, keys and ports of their own."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from processes import all_pids, eventually, parent_of

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


@dataclass(frozen=True)
class SshHosts:
    """What ``hosts()`` started: names for ``cluster.hosts``, options for ``cluster.ssh_options``."""

    folder: Path
    names: tuple[str, ...]
    options: tuple[str, ...]
    servers: dict[str, subprocess.Popen[bytes]]

    def home(self, name: str) -> Path:
        """The home of whoever logs in there."""
        return self.folder / name

    def known_hosts(self) -> Path:
        """The client's known hosts: all of them, until a test changes that."""
        return self.folder / "known_hosts"

    def sessions(self, name: str) -> list[int]:
        """The server's processes that hold a connection."""
        server = self.servers[name].pid
        return [pid for pid in all_pids() if parent_of(pid) == server]


@contextmanager
def hosts(folder: Path, number: int = 4) -> Iterator[SshHosts]:
    """Start the servers; skips the test, with a reason, where there is no sshd."""
    if SSHD is None or shutil.which("ssh") is None:
        pytest.skip("no sshd: install openssh-server and openssh-client")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # where the server's unprivileged half lives
    names = tuple(f"127.0.0.{2 + index}" for index in range(number))
    _make_key(folder / "user_key")
    (folder / "authorized_keys").write_text((folder / "user_key.pub").read_text())
    (folder / "authorized_keys").chmod(0o600)
    servers: dict[str, subprocess.Popen[bytes]] = {}
    config, known = [f"User {getpass.getuser()}"], []
    try:
        for name in names:
            port = _start(folder, name, servers)
            config += [f"Host {name}", f"  Port {port}"]
            known.append(f"[{name}]:{port} {(folder / f'{name}.key.pub').read_text()}")
        common = {
            "IdentityFile": folder / "user_key",
            "IdentitiesOnly": "yes",
            "IdentityAgent": "none",
            "UserKnownHostsFile": folder / "known_hosts",
            "GlobalKnownHostsFile": "none",
        }
        config += ["Host *", *(f"  {key} {value}" for key, value in common.items())]
        (folder / "ssh_config").write_text("\n".join(config) + "\n")
        (folder / "known_hosts").write_text("".join(known))
        yield SshHosts(folder, names, ("-F", str(folder / "ssh_config")), servers)
    finally:
        for server in servers.values():
            server.terminate()
            server.wait()


def _start(folder: Path, name: str, servers: dict[str, subprocess.Popen[bytes]]) -> int:
    """A server on a free port: somebody else may take the port before it does."""
    assert SSHD is not None
    (folder / name).mkdir()
    _make_key(folder / f"{name}.key")
    for _ in range(5):
        with socket.create_server((name, 0)) as probe:
            port: int = probe.getsockname()[1]
        settings = {
            "Port": port,
            "ListenAddress": name,
            "HostKey": folder / f"{name}.key",
            "AuthorizedKeysFile": folder / "authorized_keys",
            "PidFile": "none",
            "UsePAM": "no",
            "StrictModes": "no",  # the folder of a test may be anybody's
            "PasswordAuthentication": "no",
            "KbdInteractiveAuthentication": "no",
            "PermitRootLogin": "yes",
            "SetEnv": f"HOME={folder / name} NODE={name}",
        }
        path = folder / f"{name}.conf"
        path.write_text("".join(f"{key} {value}\n" for key, value in settings.items()))
        log = (folder / f"{name}.log").open("wb")
        with log:
            server = subprocess.Popen([SSHD, "-D", "-e", "-f", str(path)], stdout=log, stderr=log)
        if eventually(lambda: server.poll() is not None or _answers(name, port)) and server.poll() is None:  # noqa: B023
            servers[name] = server
            return port
        server.kill()
        server.wait()
    raise AssertionError((folder / f"{name}.log").read_text())


def _answers(name: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((name, port), 5) as connection:
        return connection.recv(4) == b"SSH-"
    return False


def _make_key(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(path)], check=True)
