"""What a run will start, decided and checked before anything starts."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nsysk3.errors import InputError
from nsysk3.launch import advice
from nsysk3.launch.commands import (
    check_server_args,
    expected_info,
    in_container,
    nsys_command,
    number,
    server_command,
    server_environment,
)
from nsysk3.launch.gpus import local_gpus, runs_on_cpu
from nsysk3.launch.model import ModelFacts, read_model
from nsysk3.launch.shell import shell_lines
from nsysk3.launch.topology import check_layout, default_ep, place_ranks, stage_layers
from nsysk3.launch.transport import is_this_machine
from nsysk3.run.config import Settings
from nsysk3.run.manifest import RankEntry

__all__ = ["NodePlan", "Plan", "local_gpus", "make_plan", "shell_lines"]

# Sockets of Python and of SGLang lie in the temporary folder; their addresses end at 107 bytes.
_LONGEST_TMPDIR = 72
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_HOST = re.compile(r"[A-Za-z0-9_.:@%\[\]][A-Za-z0-9_.:@%\[\]-]*")


@dataclass(frozen=True)
class NodePlan:
    """What one host runs."""

    host: str
    node_rank: int
    ranks: tuple[RankEntry, ...]
    argv: tuple[str, ...]
    """The whole command: the container's part, Nsight's, the server's."""
    server_argv: tuple[str, ...]
    env: dict[str, str]
    scratch: str
    """Folder of the run on the host; must exist when the command starts, and goes with the run."""
    report: str | None
    """Path of the report on the host without its suffix; None where nothing is profiled."""
    container: str | None
    """Name of the container, if there is one."""


@dataclass(frozen=True)
class Plan:
    """A run, before it starts."""

    run_id: str
    settings: Settings
    pp: int
    tp: int
    ep: int
    nodes: tuple[NodePlan, ...]
    url: str
    steps: int
    """``num_steps`` of /start_profile: the forwards wanted, and twice as many as the pipeline holds."""
    requests: int
    """Requests of one load."""
    expected: dict[str, object]
    """What /server_info must say, by its names."""
    extra_args: tuple[str, ...] = ()
    layers: tuple[range, ...] = ()
    """Layers of each stage; empty where the model is not known."""
    gpu_bytes: tuple[int, ...] = ()
    """Estimated bytes of weights on each GPU of each stage; empty where the model is not known."""
    model: ModelFacts | None = None
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def all_args(self) -> tuple[str, ...]:
        """The user's own arguments of the server."""
        return (*self.settings.server.args, *self.extra_args)

    @property
    def ranks(self) -> tuple[RankEntry, ...]:
        """All ranks, in the order of their world ranks."""
        return tuple(sorted((rank for node in self.nodes for rank in node.ranks), key=lambda rank: rank.world_rank))


def make_plan(
    settings: Settings,
    *,
    pp: int,
    tp: int | None = None,
    ep: int | None = None,
    run_id: str,
    profiled: bool = True,
    extra_args: Sequence[str] = (),
) -> Plan:
    """Decide what every host runs.  Starts nothing but, where TP is to be found out, ``nvidia-smi -L`` here.

    ``tp`` None: the GPUs over PP; ``ep`` None: min(4, TP).  ``profiled`` False: the same server without nsys.
    ``extra_args`` come after the settings' own server arguments.  Raises InputError, with the way out, for everything
    that can be known to fail.
    """
    if not _RUN_ID.fullmatch(run_id):
        raise InputError(f"run id {run_id!r}: letters, digits, dot, dash and underscore only, 63 at most")
    hosts = _hosts(settings)
    args = (*settings.server.args, *extra_args)
    check_server_args(args)
    tp = _tensor_parallel(settings, pp, tp)
    spread = settings.server.engine == "sglang" and advice.spreads_experts(args)
    if spread and ep not in (None, tp):
        raise InputError(f"--ep {ep}: with this --moe-a2a-backend SGLang makes EP equal to TP ({tp}); leave --ep out")
    ep = ep if ep is not None else tp if spread else default_ep(tp)
    check_layout(pp, tp, ep, len(hosts))
    _check_settings(settings, args)
    model = _model(settings)
    if model:
        model.check(pp, tp, ep)
    layers = _layers(settings, args, pp, model)
    placed = place_ranks(
        hosts, pp, tp, ep, base_gpu=number(args, 0, "--base-gpu-id"), gpu_step=number(args, 1, "--gpu-id-step")
    )
    depth = number(args, 0, "--pp-async-batch-depth")
    ranged = not runs_on_cpu(settings, args)
    steps = settings.window.forwards + 2 * (pp + depth)
    requests = _requests(settings, steps)
    address, bind = _addresses(settings)
    nodes = tuple(
        _node(settings, args, placed[node], node=node, pp=pp, tp=tp, ep=ep, meet=address, bind=bind, run_id=run_id,
              profiled=profiled, ranged=ranged)
        for node in range(len(hosts))
    )  # fmt: skip
    return Plan(
        run_id=run_id,
        settings=settings,
        pp=pp,
        tp=tp,
        ep=ep,
        nodes=nodes,
        url=f"http://{_in_url(address)}:{settings.cluster.port}",
        steps=steps,
        requests=requests,
        expected=expected_info(args, settings, pp=pp, tp=tp, ep=ep, nodes=len(hosts)),
        extra_args=tuple(extra_args),
        layers=layers,
        gpu_bytes=model.gpu_bytes(layers, tp) if model and layers else (),
        model=model,
        warnings=tuple(
            advice.warnings(
                settings,
                args,
                pp=pp,
                depth=depth,
                steps=steps if profiled else 0,
                requests=requests,
                no_gpu=profiled and not ranged,
            )
        ),
        notes=tuple(advice.notes(settings, args, pp=pp, tp=tp, depth=depth)),
    )


def _hosts(settings: Settings) -> list[str]:
    hosts = settings.cluster.hosts
    for host in hosts:
        if not _HOST.fullmatch(host):
            raise InputError(f"cluster.hosts: {host!r} is no name of a host")
    return hosts


def _tensor_parallel(settings: Settings, pp: int, tp: int | None) -> int:
    """TP as given, else the GPUs over PP."""
    cluster = settings.cluster
    nodes = len(cluster.hosts)
    if pp < 1:
        raise InputError(f"--pp {pp}: must be 1 or more")
    if tp is not None:
        if cluster.gpus_per_host is not None and pp * tp != cluster.gpus_per_host * nodes:
            raise InputError(
                f"PP {pp} x TP {tp} = {pp * tp} GPUs, but cluster.gpus_per_host x hosts = "
                f"{cluster.gpus_per_host} x {nodes} = {cluster.gpus_per_host * nodes}"
            )
        return tp
    a_host = cluster.gpus_per_host
    if a_host is None and all(is_this_machine(host) for host in cluster.hosts):
        a_host = local_gpus(settings.env.get("CUDA_VISIBLE_DEVICES"))
        if a_host is None:
            raise InputError("no GPU found on this machine (nvidia-smi -L): give --tp")
    if a_host is None:
        raise InputError("TP is not known: give --tp, or cluster.gpus_per_host")
    if a_host * nodes % pp:
        raise InputError(f"--pp {pp}: does not divide the {a_host * nodes} GPUs")
    return a_host * nodes // pp


def _check_settings(settings: Settings, args: Sequence[str]) -> None:
    """Settings that cannot go together."""
    container, model, server = settings.container, settings.model, settings.server
    if bool(container.cli) != bool(container.image):
        missing, there = ("image", "cli") if container.cli else ("cli", "image")
        raise InputError(f"container.{there} is set but container.{missing} is not")
    if (container.digest or container.options) and not container.cli:
        raise InputError("container.digest and container.options need container.cli and container.image")
    if server.engine == "sglang" and model.path is None and server.command is None:
        raise InputError("no model: give --model, or model.path in nsysk3.toml (or --engine torch, which needs none)")
    if settings.cluster.port == settings.cluster.dist_port:
        raise InputError(f"cluster.port and cluster.dist_port are both {settings.cluster.port}")
    page = number(args, 1, "--page-size")
    if page > 0 and settings.load.chunk % page:
        raise InputError(f"--chunk (load.chunk) {settings.load.chunk}: must be a multiple of --page-size {page}")


def _model(settings: Settings) -> ModelFacts | None:
    """The model, where this machine can read it; preflight looks at it on the hosts."""
    if settings.server.engine != "sglang" or settings.model.path is None:
        return None
    return read_model(Path(settings.model.path))


def _layers(settings: Settings, args: Sequence[str], pp: int, model: ModelFacts | None) -> tuple[range, ...]:
    layers = model.layers if model else None
    if settings.server.engine == "torch":
        layers = number(args, 0, "--layers") or None
    if layers is None:
        return ()
    return stage_layers(layers, pp, settings.env.get("SGLANG_PP_LAYER_PARTITION"))


def _requests(settings: Settings, steps: int) -> int:
    """Enough requests to fill the pipeline, hold a window of ``steps`` forwards, and still be under load at its end."""
    load = settings.load
    if load.requests is not None:
        return load.requests
    a_request = math.ceil(load.input_len / load.chunk)
    return max(5 * load.concurrency, 2 * load.concurrency + math.ceil(steps / a_request))


def _addresses(settings: Settings) -> tuple[str, str]:
    """What others call the first host, and the address its server listens on."""
    cluster = settings.cluster
    first = cluster.hosts[0].rpartition("@")[2]
    here = cluster.launcher == "local" or is_this_machine(cluster.hosts[0])
    if cluster.address is None and len(cluster.hosts) == 1 and here:
        return "127.0.0.1", "127.0.0.1"
    address = cluster.address or first
    return address, "::" if ":" in address else "0.0.0.0"


def _in_url(address: str) -> str:
    return f"[{address.strip('[]')}]" if ":" in address else address


def _node(
    settings: Settings, args: Sequence[str], ranks: tuple[RankEntry, ...], *, node: int, pp: int, tp: int, ep: int,
    meet: str, bind: str, run_id: str, profiled: bool, ranged: bool,
) -> NodePlan:  # fmt: skip
    cluster = settings.cluster
    scratch = f"{cluster.scratch.rstrip('/')}/nsysk3-{run_id}-{node}"  # two hosts of a plan can be one machine
    report = f"{scratch}/trace" if profiled else None
    env = server_environment(settings)
    if len(scratch.encode()) <= _LONGEST_TMPDIR:
        env.setdefault("TMPDIR", scratch)
    server = server_command(
        settings, args, pp=pp, tp=tp, ep=ep, node=node, nodes=len(cluster.hosts),
        meet=f"{_in_url(meet)}:{cluster.dist_port}", bind=bind,
    )  # fmt: skip
    around = nsys_command(settings, report, ranged=ranged) if report else ()
    inside = (*around, *server)
    container = f"nsysk3-{run_id}-{node}" if settings.container.cli else None
    outside = in_container(settings, container, run_id, env, scratch) if container else ()
    return NodePlan(
        host=cluster.hosts[node],
        node_rank=node,
        ranks=ranks,
        argv=(*outside, *inside),
        server_argv=server,
        env=env,
        scratch=scratch,
        report=report,
        container=container,
    )
