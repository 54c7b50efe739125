"""What is to be kept outlives its run, and what dead keepers or a power loss left is found and ended."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from host_runs import is_over, over_ssh
from processes import environment, eventually, is_gone, keepers_of, of_run, start_zoo
from sshd import SshHosts

from nsysk3.launch.hosts import Host, open_host
from nsysk3.launch.leftovers import end_leftovers, find_leftovers
from nsysk3.run.config import Settings

pytest_plugins = "host_fixtures"
pytestmark = pytest.mark.usefixtures("short_grace")


def kill_both_keepers(run_id: str) -> None:
    guard, keeper = keepers_of(run_id)
    os.kill(guard, signal.SIGSTOP)  # so that both are dead before anything is noticed
    os.kill(keeper, signal.SIGKILL)
    os.kill(guard, signal.SIGKILL)


def unknowable(zoo: list[int]) -> list[int]:
    """What has no mark, no parent and no session left: only the keeper under which it started could have known it."""
    return [pid for pid in zoo if not is_gone(pid) and "NSYSK3_RUN" not in environment(pid)]


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
