"""A plan as text: the commands of every host, for a shell, and the table of its ranks."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from nsysk3.run.redact import redact, redact_argv
from nsysk3.run.words import counted

if TYPE_CHECKING:
    from nsysk3.launch.plan import NodePlan, Plan

_WIDTH = 112


def shell_lines(plan: Plan) -> str:
    """Every command on every host, to be copied into a shell; secrets are hidden: fill them in."""
    blocks = []
    for node in plan.nodes:
        blocks += [f"# {node.host}: node rank {node.node_rank}, {_place(node)}", command_text(node), ""]
    if any(word.startswith("--capture-range") for word in plan.nodes[0].argv):
        body = f'{{"activities": ["CUDA_PROFILER"], "num_steps": {plan.steps}}}'
        opened = ("curl", "-X", "POST", f"{plan.url}/start_profile", "-H", "Content-Type: application/json", "-d", body)
        blocks += [
            f"# under load, opens the capture for {plan.steps} forwards of the first stage",
            wrapped(opened),
            "",
        ]
    return "\n".join(blocks)


def command_text(node: NodePlan) -> str:
    """What one host runs, with its folder and environment."""
    folder = f"mkdir -p {shlex.quote(node.scratch)}"
    return f"{folder} && cd {shlex.quote(node.scratch)} && \\\n{wrapped(['env', *_pairs(node.env), *node.argv])}"


def wrapped(argv: Sequence[str]) -> str:
    """A command quoted for a shell and broken into lines that it reads as one; secrets are hidden."""
    together: list[str] = []
    for word in map(shlex.quote, redact_argv(argv)):
        if together and not word.startswith("-") and together[-1].startswith("-") and " " not in together[-1]:
            together[-1] += f" {word}"  # an option and its value stay on one line
        else:
            together.append(word)
    lines: list[str] = []
    for words in together:
        if lines and len(lines[-1]) + 1 + len(words) <= _WIDTH:
            lines[-1] += f" {words}"
        else:
            lines.append(words)
    return " \\\n    ".join(lines)


def _pairs(env: Mapping[str, str]) -> Iterable[str]:
    return (f"{name}={redact(name, value)}" for name, value in sorted(env.items()))


def _place(node: NodePlan) -> str:
    devices = sorted(entry.device for entry in node.ranks)
    stages = sorted({entry.pp for entry in node.ranks})
    return f"GPU {_span(devices)}, stage {_span(stages)}"


def _span(numbers: Sequence[int]) -> str:
    """Ascending numbers in short: 0-3, or 0,2,4."""
    if len(numbers) > 1 and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return ",".join(map(str, numbers))


def plan_table(plan: Plan) -> str:
    """Which ranks run where, a line for the ranks of a stage on a host."""
    rows: list[tuple[str, ...]] = [("host", "GPU", "stage", "ranks", "TP", "EP", "layers", "weights a GPU")]
    for node in plan.nodes:
        for stage in sorted({rank.pp for rank in node.ranks}):
            ranks = [rank for rank in node.ranks if rank.pp == stage]
            layers = plan.layers[stage] if plan.layers else None
            rows.append(
                (
                    node.host,
                    _span([rank.device for rank in ranks]),
                    str(stage),
                    _span([rank.world_rank for rank in ranks]),
                    _span([rank.tp for rank in ranks]),
                    _span(sorted({rank.ep for rank in ranks if rank.ep is not None})),
                    f"{_span(layers)} ({len(layers)})" if layers else "",
                    f"about {plan.gpu_bytes[stage] / 2**30:.1f} GiB" if plan.gpu_bytes else "",
                )
            )
    known = 8 if plan.gpu_bytes else 7 if plan.layers else 6
    rows = [row[:known] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(known)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    load = plan.settings.load
    where = f"{len(plan.nodes)} hosts" if len(plan.nodes) > 1 else plan.nodes[0].host
    head = f"run {plan.run_id}: PP{plan.pp}/TP{plan.tp}/EP{plan.ep}, {counted(len(plan.ranks), 'GPU')} on {where}"
    tail = (
        f"load: {plan.requests} requests of {load.input_len:,} -> {load.output_len} tokens, C={load.concurrency}, "
        f"chunk {load.chunk:,}; window: {plan.settings.window.forwards} forwards wanted, {plan.steps} captured"
    )
    return "\n".join([head, *lines, tail])


def dry_run_text(plan: Plan) -> str:
    """All of a plan as a script: the table and what to know as comments, then the commands of each host."""
    said = [f"WARNING: {text}" for text in plan.warnings] + [f"note: {text}" for text in plan.notes]
    comments = "\n".join(f"# {line}" for line in (*plan_table(plan).splitlines(), *said))
    return f"{comments}\n\n{shell_lines(plan)}"
