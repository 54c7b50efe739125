"""Hosts reached over SSH: what they print on the way does no harm, and why one cannot be reached is said."""

from __future__ import annotations

import subprocess
from contextlib import ExitStack
from pathlib import Path
from secrets import token_hex

import pytest
from host_runs import over_ssh
from processes import eventually, of_run
from sshd import SshHosts

from nsysk3.errors import InputError, MissingToolError, NsysK3Error
from nsysk3.launch import transport
from nsysk3.launch.hosts import open_host
from nsysk3.launch.open_hosts import open_hosts
from nsysk3.run.config import Settings

pytest_plugins = "host_fixtures"
pytestmark = pytest.mark.usefixtures("short_grace")


def refusal(settings: Settings, name: str, kind: type[NsysK3Error] = MissingToolError) -> str:
    """What is said about a host that cannot be reached."""
    run_id = f"test-{token_hex(4)}"
    with pytest.raises(kind) as raised:
        open_host(settings.cluster, name, run_id)
    assert "\n" not in str(raised.value)
    assert name in str(raised.value)
    assert eventually(lambda: not of_run(run_id))
    return str(raised.value)


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
