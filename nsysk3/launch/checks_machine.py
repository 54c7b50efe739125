"""Checks of a host's machine: GPUs, memory, RDMA, network, ports, disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from nsysk3.launch.checks import GIB, Answers, Verdicts
from nsysk3.launch.commands import flag_value
from nsysk3.launch.gpus import runs_on_cpu
from nsysk3.launch.model import model_facts
from nsysk3.launch.plan import NodePlan, Plan
from nsysk3.launch.topology import stage_layers
from nsysk3.run.words import counted

# A GPU that nobody uses still holds a little for the driver.
_IDLE_MIB = 1024
_LEAST_DISK, _GOOD_DISK = 2 * GIB, 20 * GIB
_LEAST_SHM = 1 * GIB


def check_gpus(plan: Plan, node: NodePlan, answers: Answers) -> Verdicts:
    """Are there as many GPUs as the plan uses, all idle, of one kind, and large enough for the weights?"""
    found = answers["gpus"]
    if runs_on_cpu(plan.settings, plan.all_args) or (plan.settings.server.command and "error" in found):
        yield "note", "CPU", None
        return
    if "error" in found:
        yield "fatal", "none", f"no GPU can be used: {found['error']}; its driver must answer to nvidia-smi"
        return
    visible = _visible(found["gpus"], plan.settings.env.get("CUDA_VISIBLE_DEVICES"))
    needed = sorted({rank.device for rank in node.ranks})
    if needed[-1] >= len(visible):
        yield (
            "fatal", f"{len(visible)} of {needed[-1] + 1}",
            f"{counted(len(visible), 'GPU')}, but the plan needs {needed[-1] + 1}; give another --pp, --tp or --hosts",
        )  # fmt: skip
        return
    used = [visible[index] for index in needed]
    busy = [gpu for gpu in used if (gpu["used_mib"] or 0) > _IDLE_MIB]
    names = sorted({gpu["name"] for gpu in used})
    if busy:
        yield "fatal", f"{len(busy)} busy", _busy(busy, found["processes"])
    else:
        yield "ok", f"{len(used)} idle", None
    if len(names) > 1:
        yield "warning", "mixed", f"different GPUs in one run: {', '.join(names)}"
    yield from _memory(plan, node, answers, dict(zip(needed, used, strict=True)))


def _visible(gpus: Sequence[Mapping[str, Any]], setting: str | None) -> list[Mapping[str, Any]]:
    """GPUs in the order in which the server's processes count them."""
    if setting is None:
        return list(gpus)
    by_name = {str(gpu["index"]): gpu for gpu in gpus} | {gpu["uuid"]: gpu for gpu in gpus}
    return [by_name[name.strip()] for name in setting.split(",") if name.strip() in by_name]


def _busy(gpus: Sequence[Mapping[str, Any]], processes: Sequence[Mapping[str, Any]]) -> str:
    users = [each for each in processes if each["uuid"] in {gpu["uuid"] for gpu in gpus}]
    indices = ", ".join(str(gpu["index"]) for gpu in gpus)
    most = max(gpu["used_mib"] for gpu in gpus)
    by = f" by {', '.join(sorted({each['name'] + ' (pid ' + str(each['pid']) + ')' for each in users})[:4])}"
    return f"GPU {indices} in use{by if users else ''}, up to {most:,} MiB; end that, or --force to go on all the same"


def _memory(plan: Plan, node: NodePlan, answers: Answers, gpus: Mapping[int, Mapping[str, Any]]) -> Verdicts:
    """Whether the weights fit, by the model as this host has it."""
    needs = gpu_bytes(plan, answers)
    share = flag_value(plan.all_args, "--mem-fraction-static")
    for stage in sorted({rank.pp for rank in node.ranks}) if needs else ():
        totals = [gpus[rank.device]["total_mib"] for rank in node.ranks if rank.pp == stage]
        if None in totals:
            continue
        room = min(totals) * 2**20 * (float(share) if share else 1.0)
        said = f"stage {stage} needs about {needs[stage] / GIB:.1f} GiB of weights on each GPU, of {room / GIB:.1f} GiB"
        said += f" ({min(totals):,} MiB x --mem-fraction-static {share})" if share else ""
        # The estimate knows neither replicated weights nor padding: only what is far off is certain.
        if needs[stage] > 1.1 * room:
            yield "fatal", "too small", f"{said}; give more GPUs"
        elif needs[stage] > 0.9 * room:
            yield "warning", "tight", f"{said}: little or nothing is left for the cache"


def gpu_bytes(plan: Plan, answers: Answers) -> tuple[int, ...]:
    """Weights on each GPU of each stage, bytes, by the plan or the model as a host has it; else empty."""
    found = answers.get("model", {})
    if plan.gpu_bytes or "config" not in found:
        return plan.gpu_bytes
    facts = model_facts(str(plan.settings.model.path), found["config"], found["bytes"] or None)
    partition = plan.settings.env.get("SGLANG_PP_LAYER_PARTITION")
    return facts.gpu_bytes(stage_layers(facts.layers, plan.pp, partition), plan.tp) if facts.layers else ()


def check_driver(plan: Plan, node: NodePlan, answers: Answers) -> Verdicts:
    """The version of the GPUs' driver; whether it is the same everywhere is judged over all hosts."""
    if driver := answers["gpus"].get("driver"):
        yield "ok", driver, None


def check_rdma(plan: Plan, node: NodePlan, answers: Answers) -> Verdicts:
    """The devices that NCCL_IB_HCA names, and the nodes in /dev that using them needs."""
    wanted = plan.settings.env.get("NCCL_IB_HCA", "")
    if not wanted or wanted.startswith("^") or plan.settings.env.get("NCCL_IB_DISABLE") == "1":
        return
    devices = answers["infiniband"].get("devices", {})
    exact, index = wanted.startswith("="), plan.settings.env.get("NCCL_IB_GID_INDEX")
    named = [each.partition(":")[0] for each in wanted.lstrip("=").split(",") if each]
    chosen = {name: ports for name, ports in devices.items() if any(_is(name, each, exact) for each in named)}
    missing = [each for each in named if not any(_is(name, each, exact) for name in devices)]
    down = sorted(name for name, ports in chosen.items() if not any(p["state"] == "ACTIVE" for p in ports.values()))
    blank = sorted(
        name for name, ports in chosen.items() if all(not (p["gid"] or "").strip("0:") for p in ports.values())
    )
    if missing:
        there = ", ".join(sorted(devices)) or "none"
        yield "fatal", "missing", f"NCCL_IB_HCA names {', '.join(missing)}, but the RDMA devices here are: {there}"
    elif not any(each.startswith("uverbs") for each in answers["verbs"].get("nodes", ())):
        where = "in the container; add --device /dev/infiniband to container.options" if node.container else "here"
        yield "fatal", "no verbs", f"no /dev/infiniband/uverbs* {where}"
    elif down:
        yield "fatal", "down", f"no active port on {', '.join(down)}; check the link, or leave it out of NCCL_IB_HCA"
    elif index is not None and blank:
        yield "fatal", "no GID", f"NCCL_IB_GID_INDEX={index} is empty on {', '.join(blank)}; see show_gids"
    else:
        yield "ok", f"{len(chosen)} active", None
    if answers["memory"].get("memlock") is not None:
        way = "add --ulimit memlock=-1 to container.options" if node.container else "raise it (ulimit -l unlimited)"
        yield "warning", "memlock", f"locked memory is limited to {answers['memory']['memlock']:,} bytes: {way}"


def _is(name: str, pattern: str, exact: bool) -> bool:
    """NCCL takes names as beginnings unless they are marked exact."""
    return name == pattern if exact else name.startswith(pattern)


def check_interfaces(plan: Plan, node: NodePlan, answers: Answers) -> Verdicts:
    """The interfaces that NCCL and Gloo are told to use."""
    interfaces = answers["interfaces"].get("interfaces", {})
    shown = []
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        wanted = node.env.get(variable, "")
        if not wanted or wanted.startswith("^"):
            continue
        exact = wanted.startswith("=") or variable.startswith("GLOO")
        for name in wanted.lstrip("=").split(","):
            found = [each for each in interfaces if _is(each, name, exact)]
            if not found:
                there = ", ".join(each for each in interfaces if each != "lo")
                yield "fatal", f"no {name}", f"{variable}={wanted}: no interface {name}; here are: {there}"
            elif all(interfaces[each] == "down" for each in found):
                yield "fatal", f"{name} down", f"{variable}={wanted}: {name} is down"
            elif name not in shown:
                shown.append(name)
                yield "ok", name, None


def check_ports(plan: Plan, node: NodePlan, answers: Answers) -> Verdicts:
    """The ports that the first host will listen on."""
    if "ports" not in answers:
        return
    if "error" in answers["ports"]:
        yield "warning", "unknown", f"whether the ports are free could not be found out: {answers['ports']['error']}"
        return
    for port, why in answers["ports"]["taken"].items():
        name = "cluster.port" if int(port) == plan.settings.cluster.port else "cluster.dist_port"
        yield "fatal", f"{port} taken", f"port {port} is taken ({why}); end what listens there or set {name}"
    if not answers["ports"]["taken"]:
        yield "ok", "free", None


def check_disk(plan: Plan, node: NodePlan, answers: Answers) -> Verdicts:
    """Room for the report, and for what Nsight writes before there is one."""
    found = answers["disk"]
    if "error" in found:
        yield "fatal", "unknown", f"cluster.scratch: {found['error']}"
        return
    text = f"{found['free'] / GIB:,.0f} GiB"
    if PurePosixPath(found["folder"]) != PurePosixPath(plan.settings.cluster.scratch):
        yield "fatal", "missing", f"cluster.scratch: no {plan.settings.cluster.scratch} there; make it, or set another"
    elif not found["writable"]:
        yield "fatal", "read-only", f"cluster.scratch: may not write in {found['folder']}; set another"
    elif found["free"] < _LEAST_DISK:
        yield "fatal", text, f"only {found['free'] / GIB:.1f} GiB free in {found['folder']}; set cluster.scratch"
    elif found["free"] < _GOOD_DISK:
        yield "warning", text, f"{found['free'] / GIB:.1f} GiB free in {found['folder']}: a long window may need more"
    else:
        yield "ok", text, None


def check_shm(plan: Plan, node: NodePlan, answers: Answers) -> Verdicts:
    """Shared memory, over which NCCL joins the GPUs of a host; a container has 64 MiB of it unless told."""
    found = answers["memory"]
    if "error" in found or found["shm"] >= _LEAST_SHM:
        return
    way = "add --shm-size 32g to container.options" if node.container else "remount /dev/shm larger"
    yield "warning", "small", f"/dev/shm holds {found['shm'] / 2**20:,.0f} MiB, NCCL needs more between GPUs: {way}"
