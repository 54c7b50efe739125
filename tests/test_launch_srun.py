"""Hosts of a Slurm allocation, with a Slurm of our own on this machine: a controller and two nodes."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from secrets import token_hex

import pytest
from host_runs import drive, zoo_of
from processes import eventually, is_gone, of_run, parent_of, start_zoo

from nsysk3.errors import InputError, MissingToolError
from nsysk3.launch import channel, hosts
from nsysk3.launch.hosts import Host, open_host
from nsysk3.launch.open_hosts import open_hosts
from nsysk3.launch.transport import slurm_hosts
from nsysk3.run.config import Settings

SBIN = f"{os.environ.get('PATH', '')}:/usr/sbin"
CONFIG = """
ClusterName=test
SlurmctldHost={machine}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
KillWait=2
NodeName=n1 NodeHostname={machine} NodeAddr=127.0.0.1 Port={first} CPUs=2 State=UNKNOWN
NodeName=n2 NodeHostname={machine} NodeAddr=127.0.0.1 Port={second} CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A running Slurm; skips, with a reason, where there is none to run."""
    tools = {name: shutil.which(name, path=SBIN) for name in ("munged", "slurmctld", "slurmd", "srun", "salloc")}
    missing = sorted(name for name, path in tools.items() if path is None)
    if missing or os.geteuid() != 0:
        pytest.skip(f"no Slurm: {', '.join(missing) or 'only root can run one'} (Debian: slurm-wlm, munge)")
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "n1", "n2"):
        (folder / name).mkdir()
    ports = dict(zip(("controller", "first", "second"), free_ports(3), strict=True))
    (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, machine=socket.gethostname(), **ports))
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    places = {name: f"{folder}/munge.{name}" for name in ("socket", "log-file", "pid-file", "seed-file")}
    munge = [f"--{name}={place}" for name, place in places.items()] + [f"--key-file={folder}/munge.key"]
    commands = [[str(tools["munged"]), "--foreground", "--force", "--num-threads=1", *munge]]
    commands.append([str(tools["slurmctld"]), "-D", "-c"])
    commands += [[str(tools["slurmd"]), "-D", "-N", name] for name in ("n1", "n2")]
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack, (folder / "log").open("wb") as log:
        patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        patch.setattr(hosts, "GRACE_S", 0.2)
        patch.setattr(channel, "LOST_GRACE_S", 0.4)
        for index, command in enumerate(commands):
            process = stack.enter_context(subprocess.Popen(command, stdout=log, stderr=log))
            stack.callback(process.terminate)
            if index == 0:
                assert eventually((folder / "munge.socket").exists), (folder / "log").read_text()
        idle = ["sinfo", "--noheader", "--states=idle", "--format=%D"]
        if not eventually(lambda: output(idle) == "2"):
            pytest.skip(f"Slurm does not come up here: {(folder / 'log').read_text()[-1000:]}")
        yield


def free_ports(number: int) -> list[int]:
    """Ports that nobody listens on."""
    with ExitStack() as stack:
        return [stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(number)]


def output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


@pytest.fixture
def allocation(slurm: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An allocation of both nodes, as a job script would see it."""
    command = ["salloc", "--no-shell", "--nodes=2", "--ntasks=2"]
    job = subprocess.run(command, capture_output=True, text=True, check=True).stderr.split()[-1]
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_JOB_NODELIST", output(["squeue", "--noheader", f"--jobs={job}", "--format=%N"]))
    yield job
    subprocess.run(["scancel", job], check=False)
    assert eventually(lambda: output(["squeue", "--noheader"]) == "")


def over_srun() -> Settings:
    return Settings.model_validate({"cluster": {"hosts": slurm_hosts(), "launcher": "srun"}})


def test_each_host_is_a_node_of_the_allocation(allocation: str, tmp_path: Path) -> None:
    settings = over_srun()
    names = settings.cluster.hosts
    assert names == ["n1", "n2"]
    run_id = f"test-{token_hex(4)}"
    with open_hosts(settings, run_id, names) as opened:
        for host, name in zip(opened, names, strict=True):
            assert host.run(["sh", "-c", "echo $SLURMD_NODENAME"]).out == f"{name}\n"
            assert host.run(["nproc"]).out == f"{os.cpu_count()}\n"  # not only what one task would get
            offset = host.clock()
            assert abs(offset.offset_ns) <= offset.uncertainty_ns
        opened[0].put(b"\0\xff" * 1_000_000, str(tmp_path / "file"))
        opened[1].fetch(str(tmp_path / "file"), tmp_path / "back")
        assert (tmp_path / "back").read_bytes() == b"\0\xff" * 1_000_000
        with open_host(settings.cluster, "n1", f"{run_id}-2") as beside:  # a second one of the same node
            assert beside.run(["true"]).code == 0
    assert not of_run(run_id)


def srun_of(run_id: str) -> int:
    return next(pid for pid, line in of_run(run_id).items() if "--nodelist" in line and parent_of(pid) == os.getpid())


DEATHS: dict[str, Callable[[Host, str, str], object]] = {
    "closed": lambda host, run, job: host.close(),
    # Then Slurm kills keeper and guard too, and with linuxproc not all of the rest: closing the host ends that.
    "srun killed": lambda host, run, job: os.kill(srun_of(run), signal.SIGKILL),
    "srun told to end": lambda host, run, job: os.kill(srun_of(run), signal.SIGTERM),
    "cancelled": lambda host, run, job: subprocess.run(["scancel", job], check=True),
}


@pytest.mark.parametrize("death", DEATHS)
def test_nothing_is_left_however_a_step_ends(death: str, allocation: str, tmp_path: Path) -> None:
    run_id = f"test-{token_hex(4)}"
    folder = tmp_path / f"nsysk3-{run_id}"
    with open_host(over_srun().cluster, "n2", run_id) as host:
        host.make_scratch(str(folder))
        zoo = start_zoo(host, tmp_path)
        DEATHS[death](host, run_id, allocation)
        assert eventually(lambda: all(is_gone(pid) for pid in zoo)), [pid for pid in zoo if not is_gone(pid)]
    assert eventually(lambda: not of_run(run_id)), of_run(run_id)
    assert not folder.exists()


def test_nothing_is_left_when_nsysk3_is_killed(allocation: str, tmp_path: Path) -> None:
    run_id = f"test-{token_hex(4)}"
    with drive(over_srun(), run_id, tmp_path) as driver:
        zoo = zoo_of(driver)
        driver.kill()
    assert eventually(lambda: all(is_gone(pid) for pid in zoo) and not of_run(run_id)), of_run(run_id)


def test_what_srun_refuses_is_said_in_its_words(allocation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = over_srun().cluster
    with pytest.raises(MissingToolError, match=r"n9: srun: error: .*node") as raised:
        open_host(cluster, "n9", "test-refused")
    assert "\n" not in str(raised.value)
    with pytest.raises(MissingToolError, match=r"n1: .*/no/such/python"):
        open_host(cluster.model_copy(update={"python": "/no/such/python"}), "n1", "test-refused")
    monkeypatch.delenv("SLURM_JOB_ID")
    with pytest.raises(InputError, match="salloc"):
        open_host(cluster, "n1", "test-refused")
    monkeypatch.delenv("SLURM_JOB_NODELIST")
    with pytest.raises(InputError, match="salloc"):
        slurm_hosts()
    assert eventually(lambda: not of_run("test-refused"))
