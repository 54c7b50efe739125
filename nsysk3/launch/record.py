"""What a plan leaves in ``run.json``: no secret, and under the names by which runs are compared."""

from __future__ import annotations

from typing import Any

from nsysk3 import __version__
from nsysk3.launch.commands import SP_SWITCHES
from nsysk3.launch.plan import Plan
from nsysk3.run.manifest import Feature, Manifest, Topology
from nsysk3.run.redact import redact, redact_argv

_LAYOUT = frozenset({"pp_size", "tp_size", "ep_size", "nnodes"})


def planned_manifest(plan: Plan) -> Manifest:
    """The manifest of a run that is only planned."""
    settings = plan.settings
    env = {name: redact(name, value) for name, value in plan.nodes[0].env.items() if name != "TMPDIR"}
    server: dict[str, Any] = {name: value for name, value in plan.expected.items() if name not in _LAYOUT}
    server |= {"args": redact_argv(plan.all_args), "env": env, "sp": settings.server.sp}
    if settings.model.path is not None:
        server["model_path"] = settings.model.path
    if settings.container.image is not None:
        server["image"] = settings.container.image
    if plan.layers:
        server["layers"] = plan.layers[-1].stop
    container = settings.container
    return Manifest(
        run_id=plan.run_id,
        status="planned",
        engine=settings.server.engine,
        topology=Topology(pp=plan.pp, tp=plan.tp, ep=plan.ep, nnodes=len(plan.nodes)),
        hosts=[node.host for node in plan.nodes],
        ranks=list(plan.ranks),
        server=server,
        load={
            "input_len": settings.load.input_len, "output_len": settings.load.output_len,
            "max_concurrency": settings.load.concurrency, "num_prompts": plan.requests, "dataset": "random-ids",
            "random_range_ratio": 1.0, "warmup": settings.load.warmup, "seed": settings.load.seed,
            "client": settings.load.client,
        },
        nsys={"forwards": settings.window.forwards, "num_steps": plan.steps, "options": settings.nsys.options},
        versions={"nsysk3": __version__},
        container={
            "cli": container.cli, "image": container.image, "digest": container.digest,
            "options": redact_argv(container.options),
        } if container.cli else None,
        features=_requested(plan),
        notes=[*plan.warnings, *plan.notes] or None,
    )  # fmt: skip


def _requested(plan: Plan) -> list[Feature] | None:
    """What the server was asked for and may decline; whether it did is for its log and the trace to say."""
    env = plan.nodes[0].env
    names = [name for name in (*SP_SWITCHES, "NSYSK3_MARKERS") if env.get(name) == "1"]
    return [Feature(name=name, requested=True, reason="the run has not got that far") for name in names] or None
