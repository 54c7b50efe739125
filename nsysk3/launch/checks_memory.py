"""Whether a host has the memory for ranks that compute on its CPUs; the kernel kills what takes more."""

from __future__ import annotations

from nsysk3.errors import InputError
from nsysk3.launch.checks import GIB, Answers, Verdicts
from nsysk3.launch.checks_machine import gpu_bytes
from nsysk3.launch.commands import flag_value
from nsysk3.launch.gpus import runs_on_cpu
from nsysk3.launch.plan import NodePlan, Plan
from nsysk3.run.words import counted

_TIGHT = 0.9


def check_memory(plan: Plan, node: NodePlan, answers: Answers) -> Verdicts:
    """Is what the ranks of a host will take available there?  Nothing is said of ranks on GPUs."""
    available = answers["memory"].get("available")
    if available is None or not runs_on_cpu(plan.settings, plan.all_args):
        return
    needs = _needs(plan, node, answers)
    if needs is None:
        return
    weights, working = needs
    text = f"{available / GIB:,.1f} GiB"
    said = (
        f"{counted(len(node.ranks), 'rank')} on its CPUs will take about {(weights + working) / GIB:,.1f} GiB of "
        f"memory ({weights / GIB:,.1f} of it weights), of {text} available"
    )
    if weights + working > available:
        yield "fatal", text, f"{said}: the kernel would kill them; {_way_out(plan)}"
    elif weights + working > _TIGHT * available:
        yield "warning", text, f"{said}: little or nothing is left for others; {_way_out(plan)}"
    else:
        yield "ok", text, None


def _needs(plan: Plan, node: NodePlan, answers: Answers) -> tuple[int, int] | None:
    """Bytes of weights and of what is computed with them, over all ranks of a host; None where nothing tells."""
    if plan.settings.server.engine == "sglang":
        by_stage = gpu_bytes(plan, answers)
        return (sum(by_stage[rank.pp] for rank in node.ranks), 0) if by_stage else None
    if plan.settings.server.command or not node.server_argv:
        return None
    from nsysk3.workload.memory import weight_bytes, working_bytes
    from nsysk3.workload.options import parse

    try:
        options = parse(node.server_argv[3:])  # after PYTHON -m nsysk3.workload
    except InputError:
        return None  # as the server will say
    load = plan.settings.load
    tokens = min(load.chunk, load.concurrency * load.input_len)
    weights = sum(weight_bytes(options, rank.pp) for rank in node.ranks)
    return weights, len(node.ranks) * working_bytes(options, tokens)


def _way_out(plan: Plan) -> str:
    if plan.settings.server.engine == "sglang":
        return "give more hosts, or run on GPUs"
    small = flag_value(plan.all_args, "--scale") == "small"
    return f"give {'' if small else '`-- --scale small`, `-- --layers N` or '}a smaller --chunk, or run on GPUs"
