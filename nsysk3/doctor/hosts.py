"""The hosts of the settings: reached, asked what preflight asks and more, and judged without a plan."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from nsysk3.doctor.extras import EXTRAS, questions_of, why_no_kernels
from nsysk3.doctor.lines import Line, cannot, line_of
from nsysk3.errors import InputError, NsysK3Error
from nsysk3.launch.commands import server_environment
from nsysk3.launch.hosts import Host
from nsysk3.launch.judge import judge_clock
from nsysk3.launch.parallel import each as on_each
from nsysk3.launch.plan import NodePlan, Plan, make_plan
from nsysk3.launch.preflight import look, verdict
from nsysk3.launch.topology import place_ranks
from nsysk3.launch.transport import is_this_machine
from nsysk3.run.config import Settings
from nsysk3.run.manifest import HostClock

Say = Callable[[str], None]


@dataclass(frozen=True)
class Looked:
    """What the hosts are.

    ``layout``: the options of a plan that could be made, None where none can.  ``kernels``: by host, why the CUDA
    kernels cannot run there, None where they can.
    """

    lines: tuple[Line, ...]
    clocks: tuple[HostClock, ...] = ()
    layout: str | None = None
    kernels: Mapping[str, str | None] = field(default_factory=dict)


def look_at_hosts(settings: Settings, say: Say) -> Looked:
    """Reach every host of the settings and judge it; what is wrong with one hides nothing of the others."""
    names = list(dict.fromkeys(settings.cluster.hosts))
    run_id = f"doctor-{secrets.token_hex(4)}"
    say(f"reaching {', '.join(names)}")
    with _reached(settings, names, run_id) as (hosts, lost):
        lines = [_reach(settings, name, lost.get(name)) for name in names if name in lost or not is_this_machine(name)]
        if not hosts:
            return Looked(tuple(lines))
        say(f"looking at {', '.join(host.name for host in hosts)}")
        there = settings.model_copy(
            update={"cluster": settings.cluster.model_copy(update={"hosts": [host.name for host in hosts]})}
        )
        try:
            environment = server_environment(there)
        except InputError as error:
            lines.append(Line(there.cluster.hosts[0], "settings", "cannot", str(error)))
            environment = {}
        try:
            answers, clocks = look(_stand_in(there, 1, environment, run_id), hosts, questions_of(there))
        except NsysK3Error as error:
            return Looked((*lines, Line(hosts[0].name, "probe", "cannot", str(error))))
    return _judged(there, environment, run_id, answers, clocks, lines)


def _judged(
    settings: Settings, environment: dict[str, str], run_id: str, answers: dict[str, dict[str, Any]],
    clocks: tuple[HostClock, ...], lines: list[Line],
) -> Looked:  # fmt: skip
    gpus = max(min(_count(found, settings) for found in answers.values()), 1)
    plan = _stand_in(settings, gpus, environment, run_id)
    found = verdict(plan, answers, clocks)
    lines += [line_of(check) for check in found.checks if check.name != "clock" and check.text != "no fit"]
    lines += [
        line_of(judge_clock(each.host, each.offset_ns, each.uncertainty_ns))
        for each in clocks
        if len(clocks) > 1 or not is_this_machine(each.host)
    ]
    answered = {host: each for host, each in answers.items() if "error" not in each["host"]}
    for node in (each for each in plan.nodes if each.host in answered):
        lines += [line for extra in EXTRAS for line in extra(settings, node.host, answers[node.host])]
    layout, problem = None, None
    if not cannot(lines, "GPUs", "probe"):
        layout, problem = _layout(settings, gpus * len(plan.nodes))
    if problem:
        lines.append(Line(plan.nodes[0].host, "settings", "cannot", problem))
    return Looked(tuple(lines), clocks, layout, {host: why_no_kernels(each) for host, each in answered.items()})


def _count(found: Mapping[str, Any], settings: Settings) -> int:
    """GPUs of a host that a run would use."""
    visible = settings.env.get("CUDA_VISIBLE_DEVICES")
    there = len(visible.split(",")) if visible else len(found["gpus"].get("gpus", ()))
    return min(there, settings.cluster.gpus_per_host or there)


def _stand_in(settings: Settings, gpus: int, environment: dict[str, str], run_id: str) -> Plan:
    """Something to judge hosts by before there is a plan: one stage over so many GPUs of each."""
    hosts = settings.cluster.hosts
    placed = place_ranks(hosts, 1, gpus * len(hosts), 1)
    container = f"nsysk3-{run_id}" if settings.container.cli and settings.container.image else None
    nodes = tuple(
        NodePlan(host, index, placed[index], (), (), environment, settings.cluster.scratch, "report", container)
        for index, host in enumerate(hosts)
    )
    address = settings.cluster.address or hosts[0].rpartition("@")[2]
    return Plan(
        run_id=run_id, settings=settings, pp=1, tp=gpus * len(hosts), ep=1, nodes=nodes,
        url=f"http://{address}:{settings.cluster.port}", steps=0, requests=0, expected={},
    )  # fmt: skip


def _layout(settings: Settings, gpus: int) -> tuple[str | None, str | None]:
    """The options of the first layout that can be planned on so many GPUs, or why none can."""
    missing = settings.server.engine == "sglang" and settings.model.path is None and settings.server.command is None
    if missing:  # nothing is wrong yet: a command can still name it
        settings = settings.model_copy(update={"model": settings.model.model_copy(update={"path": "MODEL"})})
    problem = None
    for pp in (each for each in range(1, gpus + 1) if gpus % each == 0):
        try:
            plan = make_plan(settings, pp=pp, tp=gpus // pp, run_id="doctor")
        except NsysK3Error as error:
            problem = problem or str(error)
        else:
            return f"--pp {plan.pp} --tp {plan.tp}" + (" --model FOLDER" if missing else ""), None
    return None, problem


@contextmanager
def _reached(settings: Settings, names: Sequence[str], run_id: str) -> Iterator[tuple[list[Host], dict[str, str]]]:
    """The hosts that can be reached, and why the others cannot; nothing is left on them in the end."""
    hosts: list[Host] = []
    lost: dict[str, str] = {}

    def connect(host: Host) -> None:
        try:
            host.connect()
        except NsysK3Error as error:
            lost[host.name] = str(error).removeprefix(f"{host.name}: ")

    for name in names:
        try:
            hosts.append(
                Host(settings.cluster, name, run_id, [settings.container.cli] if settings.container.cli else [])
            )
        except NsysK3Error as error:
            lost[name] = str(error).removeprefix(f"{name}: ")
    now = True
    try:
        if hosts:
            on_each(hosts, connect)
        yield [host for host in hosts if host.name not in lost], lost
        now = False
    finally:
        if hosts:
            on_each(hosts, lambda host: host.close(now))


def _reach(settings: Settings, host: str, why_not: str | None) -> Line:
    launcher = settings.cluster.launcher
    if why_not is None:
        return Line(host, "reach", "ok", f"by {'srun' if launcher == 'srun' else 'ssh'}")
    alone = len(settings.cluster.hosts) == 1 and is_this_machine(host)
    options = "".join(f"{each} " for each in settings.cluster.ssh_options)
    fix = None if launcher == "srun" or alone else f"`ssh {options}{host} true` must work first, and ask for nothing"
    return Line(host, "reach", "cannot", why_not, fix, "failed")
