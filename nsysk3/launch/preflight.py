"""Look at every host before anything starts there: one probe a host, all at once, and what it means for the plan."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from nsysk3.errors import MissingToolError
from nsysk3.launch.checks import Check
from nsysk3.launch.commands import in_container
from nsysk3.launch.judge import differences, judge, judge_clock
from nsysk3.launch.plan import NodePlan, Plan
from nsysk3.run.manifest import HostClock

if TYPE_CHECKING:
    from nsysk3.launch.hosts import Host

# Of a host, and of a container that has first to be made from its image.
_TIMEOUT_S = 120.0
_NAMES = ("sglang", "torch", "nsysk3", "nvtx", "transformers")


@dataclass(frozen=True)
class Preflight:
    """What the hosts have."""

    checks: tuple[Check, ...]
    answers: Mapping[str, Mapping[str, Any]]
    clocks: tuple[HostClock, ...]

    @property
    def problems(self) -> tuple[Check, ...]:
        """Checks that have something to say, the fatal ones first."""
        worst = {"fatal": 0, "warning": 1}
        return tuple(sorted((each for each in self.checks if each.problem), key=lambda check: worst[check.level]))

    def raise_if_fatal(self) -> None:
        """Raises MissingToolError for the first fatal problem, with its host and way out; counts the others."""
        fatal = [check for check in self.checks if check.level == "fatal"]
        if fatal:
            more = f" (and {len(fatal) - 1} more, above)" if len(fatal) > 1 else ""
            raise MissingToolError(f"preflight: {fatal[0].host}: {fatal[0].problem}{more}")

    def versions(self) -> dict[str, str]:
        """Versions of what the first host runs, for the manifest."""
        first = next(iter(self.answers.values()), {})
        packages = first.get("packages", {}).get("packages", {})
        found = {name: packages.get(name) for name in _NAMES if name != "nsysk3"}
        found |= {"nsysk3_plugin": packages.get("nsysk3"), "python": first.get("packages", {}).get("python")}
        found |= {"nsys": first.get("nsys", {}).get("version"), "driver": first.get("gpus", {}).get("driver")}
        found["gpu"] = ", ".join(sorted({gpu["name"] for gpu in first.get("gpus", {}).get("gpus", ())}))
        found["image_digest"] = first.get("image", {}).get("id")
        return {name: value for name, value in found.items() if value}


def preflight(plan: Plan, hosts: Sequence[Host], *, say: Callable[[str], None] | None = None) -> Preflight:
    """Ask every host, all at once, and judge; starts nothing that lasts and raises for no problem it finds.

    ``hosts``: open, in the order of the plan's nodes.  Raises RunFailedError where a host is lost meanwhile.
    """
    if say:
        say(f"looking at {', '.join(node.host for node in plan.nodes)}")
    return verdict(plan, *look(plan, hosts))


def look(
    plan: Plan, hosts: Sequence[Host], more: tuple[Mapping[str, Any], Mapping[str, Any]] = ({}, {})
) -> tuple[dict[str, dict[str, Any]], tuple[HostClock, ...]]:
    """What every host answers, and its clock; ``more``: what to ask besides of the machine, and where a server runs."""
    with ThreadPoolExecutor(len(hosts)) as pool:
        asked = list(pool.map(lambda node, host: _ask(plan, node, host, more), plan.nodes, hosts))
        clocks = list(pool.map(lambda host: host.clock(), hosts))
    known = [
        HostClock(host=node.host, offset_ns=clock.offset_ns, uncertainty_ns=clock.uncertainty_ns, when="preflight")
        for node, clock in zip(plan.nodes, clocks, strict=True)
    ]
    return {node.host: found for node, found in zip(plan.nodes, asked, strict=True)}, tuple(known)


def verdict(plan: Plan, answers: Mapping[str, Mapping[str, Any]], clocks: tuple[HostClock, ...]) -> Preflight:
    """What the answers of all hosts mean for a plan."""
    checks = [check for node in plan.nodes for check in judge(plan, node, answers[node.host])]
    checks += _address(plan)
    if len(plan.nodes) > 1:
        checks += [judge_clock(each.host, each.offset_ns, each.uncertainty_ns) for each in clocks]
        checks += differences(answers)
    return Preflight(tuple(checks), answers, clocks)


def _ask(plan: Plan, node: NodePlan, host: Host, more: tuple[Mapping[str, Any], Mapping[str, Any]]) -> dict[str, Any]:
    """Answers of one host: those of the machine, and those of where the server will run."""
    machine, server = ({**asked, **extra} for asked, extra in zip(questions(plan, node), more, strict=True))
    found = _run(host, [plan.settings.cluster.python], {}, machine)
    env = {name: value for name, value in node.env.items() if name != "TMPDIR"}  # which does not exist yet
    if node.container is None:
        return found | _run(host, [plan.settings.cluster.python], env, server)
    if found["image"].get("id") is None:
        return found | {name: {"error": "there is no image to look into"} for name in server}
    name = f"nsysk3-{plan.run_id}-probe-{node.node_rank}"
    outside = in_container(plan.settings, name, plan.run_id, env, plan.settings.cluster.scratch)
    return found | _run(host, [*outside, plan.settings.server.python], env, server)


def questions(plan: Plan, node: NodePlan) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is asked of a host's machine, and what is asked where the server will run: in its container, if any."""
    settings = plan.settings
    gid = settings.env.get("NCCL_IB_GID_INDEX", "")
    machine: dict[str, Any] = {
        "host": None, "gpus": None, "interfaces": None, "infiniband": int(gid) if gid.isdigit() else None,
        "disk": settings.cluster.scratch,
    }  # fmt: skip
    if node.node_rank == 0:
        machine["ports"] = [settings.cluster.port, *([settings.cluster.dist_port] if len(plan.nodes) > 1 else [])]
    if settings.container.cli:
        machine["image"] = {"cli": settings.container.cli, "image": settings.container.image}
    plugin = settings.server.engine == "sglang" and (settings.server.markers or settings.server.sp == "nsysk3")
    server: dict[str, Any] = {
        "memory": None, "verbs": None,
        "packages": {"python": settings.server.python, "names": list(_NAMES), "plugin": plugin},
    }  # fmt: skip
    if node.report is not None:
        server["nsys"] = settings.nsys.path or "nsys"
    if settings.server.engine == "sglang" and settings.model.path is not None:
        server["model"] = settings.model.path
    return machine, server


def _run(host: Host, python: Sequence[str], env: Mapping[str, str], question: Mapping[str, Any]) -> dict[str, Any]:
    source = files("nsysk3.launch").joinpath("probe.py").read_text("utf-8")
    done = host.run([*python, "-c", source, json.dumps(question)], env=dict(env), timeout_s=_TIMEOUT_S)
    try:
        answers: dict[str, Any] = json.loads(done.out.splitlines()[-1])
    except (IndexError, ValueError):
        said = (done.err.strip() or done.out.strip() or f"exit code {done.code}").splitlines()[-1]
        return {name: {"error": f"{python[-1]}: {said[:300]}"} for name in question}
    return answers


def _address(plan: Plan) -> list[Check]:
    """Can this machine reach the server's address by its name?"""
    address = plan.url.removeprefix("http://").rpartition(":")[0].strip("[]")
    try:
        socket.getaddrinfo(address, plan.settings.cluster.port, type=socket.SOCK_STREAM)
    except OSError as error:
        problem = f"this machine does not know the address {address} ({error.strerror}): set cluster.address"
        return [Check(plan.nodes[0].host, "address", "fatal", "unknown", problem)]
    return []
