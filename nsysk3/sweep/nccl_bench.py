"""Measure the communication domains of layouts: with nccl-tests where the hosts have it, else through torch."""

from __future__ import annotations

import posixpath
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from nsysk3.errors import InputError, MissingToolError, RunFailedError
from nsysk3.run.config import Settings
from nsysk3.run.files import write_text
from nsysk3.run.nccl_log import NUMA_MARK, NcclLog, read_nccl_log
from nsysk3.sweep.domains import Domain, domains
from nsysk3.sweep.nccl_table import NCCL_CSV
from nsysk3.sweep.record import make_room

if TYPE_CHECKING:
    from nsysk3.launch.hosts import Host

_BUS = re.compile(r"^#\s+Rank\s+\d+\b.*\[(?:0x)?([0-9a-fA-F:.]+)\]", re.MULTILINE)
_POLL_S = 0.1
# Ends well where a GPU is to be seen: by its driver's tool, or its device file (WSL has another).
_ANY_GPU = "nvidia-smi -L 2>/dev/null | grep -q '^GPU' || ls /dev/nvidia[0-9]* /dev/dxg 2>/dev/null | grep -q ."


@dataclass(frozen=True)
class Measure:
    """How to measure.  Sizes in bytes; ``folder``: nccl-tests on the hosts, None: on PATH; ``torch``: never with it."""

    sizes: tuple[int, ...]
    iters: int = 20
    warmup: int = 5
    timeout_s: float = 600.0
    device: str = "cuda"
    folder: str | None = None
    torch: bool = False

    @classmethod
    def of(cls, sizes: str, **options: Any) -> Self:
        """With sizes as text, ``1M,256M``: from the one to the other, doubling.  Raises InputError for others."""
        if options.get("device") not in ("cuda", "cpu"):
            raise InputError(f"--device {options.get('device')}: cuda or cpu")
        ends = [_bytes(part) for part in sizes.split(",")]
        if len(ends) not in (1, 2) or 0 in ends or ends[0] > ends[-1]:
            raise InputError(f"--sizes {sizes!r}: the smallest and the largest message, such as 1M,256M")
        made = [ends[0]]
        while made[-1] * 2 <= ends[-1]:
            made.append(made[-1] * 2)
        return cls(tuple(made), **options)


def _bytes(text: str) -> int:
    """``1M``, ``256M``, ``4096`` in bytes, 0 for what is none."""
    match = re.fullmatch(r"(\d+)([KMG]?)", text.strip(), re.IGNORECASE)
    return int(match[1]) * 1024 ** " KMG".index(match[2].upper() or " ") if match else 0


def bench(
    settings: Settings, pp: str, tp: str | None, how: Measure, out: Path, *, say: Callable[[str], None]
) -> list[NcclLog]:
    """Measure every communication domain of the layouts; logs go to ``out``."""
    from nsysk3.launch.topology import default_ep
    from nsysk3.sweep.matrix import Layout
    from nsysk3.sweep.prepare import new_run_id
    from nsysk3.sweep.request import depths_and_ranks

    layouts = []
    for depth, ranks in depths_and_ranks(pp, tp):
        size = ranks or _gpus(settings, how.device) // depth
        layouts.append(Layout(depth, size, default_ep(max(size, 1))))
    wanted = domains(layouts, settings.cluster.hosts)
    if not wanted:
        raise InputError("these layouts have a single GPU: nothing communicates")
    make_room(out / NCCL_CSV)
    return measure_all(settings, wanted, how, run_id=new_run_id().replace("sweep", "nccl"), out=out, say=say)


def _gpus(settings: Settings, device: str) -> int:
    """GPUs of all hosts.  Raises InputError where nobody can tell, MissingToolError where there are none."""
    from nsysk3.launch.plan import local_gpus
    from nsysk3.launch.transport import is_this_machine

    hosts, a_host = settings.cluster.hosts, settings.cluster.gpus_per_host
    if a_host is None and all(is_this_machine(host) for host in hosts):
        a_host = local_gpus(settings.env.get("CUDA_VISIBLE_DEVICES"))
        if a_host is None and device == "cuda":
            raise _no_gpu(hosts[0])
    if a_host is None:
        raise InputError("how many GPUs there are is not known: give --tp, or cluster.gpus_per_host")
    return a_host * len(hosts)


def measure_domain(
    settings: Settings, domain: Domain, hosts: Mapping[str, Host], how: Measure, *, run_id: str, out: Path
) -> NcclLog:
    """Measure one domain and keep its log at ``out``.

    nccl-tests is used for domains inside one host; across hosts it would need MPI, so there it is always torch.
    Raises RunFailedError with the last words of whatever failed, MissingToolError for a host without GPUs.
    """
    binary = None if how.torch or len(domain.hosts) > 1 else _binary(hosts[domain.hosts[0]], domain, how)
    if binary is None and how.device == "cuda":
        _need_gpus(hosts[name] for name in domain.hosts)
    text = _tests(settings, domain, hosts, how, binary) if binary else _torch(settings, domain, hosts, how, run_id)
    nodes = _numa_nodes(hosts[domain.hosts[0]], text) if len(domain.hosts) == 1 else None
    write_text(out, text.rstrip("\n") + "\n" + (f"{NUMA_MARK} {nodes}\n" if nodes else ""))
    try:
        return read_nccl_log(out)
    except InputError as error:
        raise RunFailedError(f"{domain.name}: {_last(text)} (all of it in {out})") from error


def _need_gpus(hosts: Iterable[Host]) -> None:
    for host in hosts:
        if host.run(["sh", "-c", _ANY_GPU]).code:
            raise _no_gpu(host.name)


def _no_gpu(host: str) -> MissingToolError:
    return MissingToolError(f"no GPU on {host}; --device cpu tries the command without GPUs")


def _binary(host: Host, domain: Domain, how: Measure) -> str | None:
    """nccl-tests' program on the host, None where it is not."""
    name = f"{domain.operation}_perf"
    wanted = posixpath.join(how.folder, name) if how.folder else name
    found = host.run(["sh", "-c", 'command -v "$1"', "sh", wanted])
    if found.code and how.folder:
        raise InputError(f"{wanted}: not a program on {host.name}")
    return None if found.code else found.out.strip() or None


def _tests(settings: Settings, domain: Domain, hosts: Mapping[str, Host], how: Measure, binary: str) -> str:
    devices = domain.devices(domain.hosts[0])
    low, high = min(how.sizes), max(how.sizes)
    argv = [binary, "-b", str(low), "-e", str(high), "-f", "2", "-g", str(len(devices)), "-c", "1"]
    argv += ["-w", str(how.warmup), "-n", str(how.iters)]
    env = {**settings.env, "CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))}
    done = hosts[domain.hosts[0]].run(argv, env=env, timeout_s=how.timeout_s)
    if done.code:
        raise RunFailedError(
            f"{domain.name}: {posixpath.basename(binary)} ended with {done.code}: {_last(done.out + done.err)}"
        )
    text = done.out
    return (
        text if f"{domain.operation}_perf" in text else f"# Collective test starting: {domain.operation}_perf\n{text}"
    )


def _torch(settings: Settings, domain: Domain, hosts: Mapping[str, Host], how: Measure, run_id: str) -> str:
    """Start the worker on every host of the domain, wait for all of them, and return what the first one printed."""
    source = files("nsysk3.sweep").joinpath("nccl_worker.py").read_bytes()
    first, started = 0, []
    name = f"nccl-{domain.operation}-{len(domain.places)}"
    try:
        for place, host_name in enumerate(domain.hosts):
            host, devices = hosts[host_name], domain.devices(host_name)
            scratch = f"{settings.cluster.scratch}/nsysk3-{run_id}-{place}-{name}"
            host.make_scratch(scratch)
            host.put(source, f"{scratch}/nccl_worker.py")
            words = [
                "--op", domain.operation, "--world", str(len(domain.places)), "--first", str(first),
                "--devices", ",".join(map(str, devices)), "--device", how.device,
                "--sizes", ",".join(map(str, how.sizes)), "--iters", str(how.iters), "--warmup", str(how.warmup),
            ]  # fmt: skip
            if len(domain.hosts) > 1:
                words += ["--meet", _meet(settings, domain)]
            command, container = _command(settings, f"nsysk3-{run_id}-{place}-{name}", run_id, scratch)
            host.start(
                name, [*command, f"{scratch}/nccl_worker.py", *words], env=_environment(settings), cwd=scratch,
                log=f"{scratch}/log", container=container,
            )  # fmt: skip
            started.append(host)
            first += len(devices)
        codes = _ended(started, name, how.timeout_s)
        texts = [_all(host, name) for host in started]
        if any(codes):
            said = [_last(text) for text, code in zip(texts, codes, strict=True) if code] or [_last(texts[0])]
            raise RunFailedError(f"{domain.name}: the measurement failed: {said[0]}")
        return "\n".join(text for text in texts[0].splitlines() if not text.startswith("[")) + "\n"
    finally:
        for host in started:
            with suppress(RunFailedError):
                host.stop(name, 2)


def _meet(settings: Settings, domain: Domain) -> str:
    """Where the ranks of several hosts meet: every domain begins on the first host of the cluster."""
    address = settings.cluster.address or domain.hosts[0].rpartition("@")[2]
    return f"[{address}]:{settings.cluster.dist_port}" if ":" in address else f"{address}:{settings.cluster.dist_port}"


def _command(settings: Settings, name: str, run_id: str, scratch: str) -> tuple[list[str], str | None]:
    """The Python to run the worker with, in the server's container where there is one, and the container's name."""
    if settings.container.cli is None:
        return [settings.server.python], None
    from nsysk3.launch.containers import container_command

    around = container_command(
        settings.container, name=name, run_id=run_id, env_names=sorted(_environment(settings)), scratch=scratch
    )
    return [*around, settings.server.python], name


def _environment(settings: Settings) -> dict[str, str]:
    """That of the server, so that NCCL uses the same links."""
    env = {"PYTHONUNBUFFERED": "1"}
    if settings.cluster.interface:
        env |= {"NCCL_SOCKET_IFNAME": settings.cluster.interface, "GLOO_SOCKET_IFNAME": settings.cluster.interface}
    return env | settings.env


def _ended(hosts: Sequence[Host], name: str, timeout_s: float) -> list[int | None]:
    """Exit codes once all have ended or one has failed; None for those that then still ran."""
    end = time.monotonic() + timeout_s
    while True:
        codes = [host.poll(name) for host in hosts]
        if all(code is not None for code in codes) or any(codes):
            return codes
        if time.monotonic() > end:
            raise RunFailedError(f"the measurement did not end within {timeout_s:g} s; see whether a rank hangs")
        time.sleep(_POLL_S)


def _all(host: Host, name: str) -> str:
    """All that a process printed."""
    parts: list[str] = []
    offset = 0
    while True:
        text, offset = host.tail(name, offset)
        if not text:
            return "".join(parts)
        parts.append(text)


def _numa_nodes(host: Host, text: str) -> str | None:
    """NUMA node of each rank's GPU as the host's kernel tells, with commas between; None where it does not."""
    buses = [bus.lower() for bus in _BUS.findall(text)]
    if not buses:
        return None
    full = [bus if bus.count(":") == 2 else f"0000:{bus.split(':')[0]}:00" for bus in buses]
    paths = [f"/sys/bus/pci/devices/{bus if '.' in bus else bus + '.0'}/numa_node" for bus in full]
    told = host.run(["cat", *paths])
    found = told.out.split()
    return ",".join(found) if told.code == 0 and len(found) == len(buses) and "-1" not in found else None


def _last(text: str) -> str:
    """The last line that looks like a reason."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"(?:Error|Exception|WARN|failed|failure)\b", line)]
    return (errors or lines or ["it printed nothing"])[-1][:300]


@contextmanager
def on_hosts(settings: Settings, names: Sequence[str], run_id: str) -> Iterator[dict[str, Host]]:
    """Connections to the hosts by name, ended with everything on them."""
    from nsysk3.launch.open_hosts import open_hosts

    with open_hosts(settings, run_id, names) as opened:
        yield dict(zip(names, opened, strict=True))


def measure_all(
    settings: Settings, wanted: Sequence[Domain], how: Measure, *, run_id: str, out: Path, say: Callable[[str], None]
) -> list[NcclLog]:
    """Measure every domain in turn; logs are ``nccl_NAME.log`` in ``out``."""
    names = list(dict.fromkeys(host for domain in wanted for host in domain.hosts))
    logs = []
    with on_hosts(settings, names, run_id) as hosts:
        for domain in wanted:
            say(f"{domain.name}: {domain.operation} of {len(domain.places)} GPUs on {', '.join(domain.hosts)}")
            path = out / f"nccl_{re.sub(r'[^a-z0-9]+', '_', domain.name.lower())}.log"
            log = measure_domain(settings, domain, hosts, how, run_id=run_id, out=path)
            logs.append(replace(log, name=domain.name))
    return logs
