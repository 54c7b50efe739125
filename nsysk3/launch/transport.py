"""How the keeper gets to a host: as a child here, through ssh, or through srun."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from nsysk3.errors import InputError, MissingToolError
from nsysk3.run.config import Cluster

RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
CONNECT_S = 10  # for one address to answer
SSH_S, SRUN_S, LOCAL_S = 45.0, 60.0, 30.0  # for a keeper to answer
# In the order in which they import one another.
SOURCES = ("keeper_processes", "keeper_children", "keeper_possessions", "keeper_guard", "keeper")


@dataclass(frozen=True)
class Transport:
    """A command whose input and output are those of a Python on a host, and how long that may take to start."""

    kind: str
    argv: tuple[str, ...]
    python: str
    wait_s: float


def payload() -> bytes:
    """The keeper's source as one text that Python runs."""
    folder = resources.files("nsysk3.launch")
    sources = {f"nsysk3.launch.{name}": folder.joinpath(f"{name}.py").read_text("utf-8") for name in SOURCES}
    return (
        f"import sys, types\nfor name, text in {sources!r}.items():\n"
        "    module = sys.modules[name] = types.ModuleType(name)\n"
        "    exec(compile(text, name, 'exec'), module.__dict__)\n"
        "module.main()\n"
    ).encode()


def choose_transport(cluster: Cluster, host: str, run_id: str, length: int) -> Transport:
    """The command for a host; ``length``: bytes of the payload, which the command reads first.

    Raises InputError for a name that cannot be a host's or a run's, MissingToolError without ssh or srun.
    """
    if RUN_ID.fullmatch(run_id) is None:
        raise InputError(f"{run_id!r}: not a run's name (letters, digits, . _ -)")
    if not host or host.startswith("-") or any(character.isspace() for character in host):
        raise InputError(f"{host!r}: not a host's name")
    launcher = cluster.launcher
    if launcher == "auto":
        launcher = "local" if len(cluster.hosts) == 1 and is_this_machine(host) else "ssh"
    python = sys.executable if launcher == "local" else cluster.python
    old = '"nsysk3: " + sys.executable + " is Python " + sys.version.split()[0] + "; 3.8 or newer is needed"'
    run = f"import sys; sys.version_info >= (3, 8) or sys.exit({old}); exec(sys.stdin.buffer.read({length}))"
    # The mark is how `nsysk3 cleanup` finds a keeper; the last two words are for whoever looks at ps.
    command = ["env", f"NSYSK3_RUN={run_id}", python, "-I", "-S", "-u", "-c", run, "nsysk3-keeper", run_id]
    if launcher == "ssh":
        return Transport("ssh", (*_ssh(cluster), "--", host, "exec " + shlex.join(command)), python, SSH_S)
    if launcher == "srun":
        return Transport("srun", (*_srun(host), *command), python, SRUN_S)
    return Transport("local", tuple(command), python, LOCAL_S)


def is_this_machine(host: str) -> bool:
    """Whether a name means the machine that we run on."""
    own = socket.gethostname()
    return host in {"localhost", "127.0.0.1", "::1", own, own.partition(".")[0]}


def _ssh(cluster: Cluster) -> list[str]:
    """The user's own configuration, agent and known hosts decide; it never asks and never waits for ever.

    One connection a host carries everything.  It may join a master that the user has (some hosts want a second factor),
    but is none itself: a master outlives what it was started for.
    """
    options = {
        "ConnectTimeout": CONNECT_S,
        "ServerAliveInterval": 15,
        "ServerAliveCountMax": 3,
        "ControlMaster": "no",
        "ClearAllForwardings": "yes",
        "ForwardX11": "no",
        "PermitLocalCommand": "no",
        "RemoteCommand": "none",
        "LogLevel": "ERROR",
    }
    words = [_tool("ssh", "cluster.launcher"), "-T", "-o", "BatchMode=yes", *cluster.ssh_options]
    return words + [word for name, value in options.items() for word in ("-o", f"{name}={value}")]


def _srun(host: str) -> list[str]:
    """A step of its own on one node of the allocation, beside any others, with all that the node has."""
    if not os.environ.get("SLURM_JOB_ID"):
        raise InputError("launcher srun: no Slurm allocation here; start nsysk3 under salloc or sbatch")
    return [
        _tool("srun", "cluster.launcher"),
        f"--nodelist={host}",
        "--nodes=1",
        "--ntasks=1",
        "--overlap",
        "--unbuffered",
        "--mpi=none",
        "--cpu-bind=none",
        "--chdir=/",
        "--job-name=nsysk3",
    ]


def slurm_hosts() -> list[str]:
    """The hosts of the allocation that we run in, in Slurm's order.  Raises InputError or MissingToolError."""
    nodes = os.environ.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise InputError("launcher srun: no Slurm allocation here; start nsysk3 under salloc or sbatch")
    command = [_tool("scontrol", "cluster.hosts"), "show", "hostnames", nodes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise MissingToolError(f"scontrol: {done.stderr.strip() or f'exit {done.returncode}'}")
    return done.stdout.split()


def _tool(name: str, setting: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise MissingToolError(f"{name}: not on PATH; install it or change {setting}")
    return path


def explain(transport: Transport, host: str, code: int | None, errors: Sequence[str], noise: Sequence[str]) -> str:
    """Why no keeper answered, in one line with the tool's own words."""
    lines = [line.strip().removeprefix(f"{transport.kind}: ") for line in errors if line.strip()]
    words = "; ".join([line for line in lines if line.startswith("error: ")][-2:] or lines[-2:])
    if any(line.startswith("nsysk3: ") for line in errors):
        return f"{host}: {next(line[8:] for line in errors if line.startswith('nsysk3: '))} (cluster.python)"
    if code in (126, 127):
        return f"{host}: no {transport.python} there; set cluster.python ({words or f'exit {code}'})"
    if transport.kind != "local" and code not in (None, 0) and words:
        return f"{host}: {transport.kind}: {words}"
    said = words or "; ".join(line.strip() for line in noise[-2:] if line.strip())
    ending = f"no answer within {transport.wait_s:g} s" if code is None else f"ended at once, exit {code}"
    return f"{host}: {transport.kind}: {ending}" + (f" ({said})" if said else "")
