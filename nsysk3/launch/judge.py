"""Whether what a host has is what the plan needs; pure functions from a probe's answers to checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from nsysk3.launch import checks_machine as machine
from nsysk3.launch import checks_software as software
from nsysk3.launch.checks import Answers, Check, Verdicts
from nsysk3.launch.checks_memory import check_memory
from nsysk3.launch.plan import NodePlan, Plan

# A few milliseconds shift arrows between hosts; that is said, not refused.
_GOOD_CLOCK_NS = 5_000_000

_CHECKS: tuple[tuple[str, Callable[[Plan, NodePlan, Answers], Verdicts]], ...] = (
    ("nsys", software.check_nsys),
    ("GPUs", machine.check_gpus),
    ("memory", check_memory),
    ("driver", machine.check_driver),
    ("image", software.check_image),
    ("server", software.check_packages),
    ("model", software.check_model),
    ("RDMA", machine.check_rdma),
    ("network", machine.check_interfaces),
    ("ports", machine.check_ports),
    ("disk", machine.check_disk),
    ("shm", machine.check_shm),
)


def judge(plan: Plan, node: NodePlan, answers: Answers) -> list[Check]:
    """Every check of one host; only that one where nothing could be asked of it."""
    if why := answers["host"].get("error"):
        return [Check(node.host, "probe", "fatal", "failed", f"nothing could be asked: {why}; set cluster.python")]
    return [
        Check(node.host, name, level, text, problem)
        for name, check in _CHECKS
        for level, text, problem in check(plan, node, answers)
    ]


def judge_clock(host: str, offset_ns: int, uncertainty_ns: int) -> Check:
    """How well the clocks of the reports can be put on one line."""
    text = f"{offset_ns / 1e6:+.3f} ± {uncertainty_ns / 1e6:.3f} ms"
    if uncertainty_ns > _GOOD_CLOCK_NS:
        return Check(
            host, "clock", "warning", text,
            f"its clock is known to {uncertainty_ns / 1e6:.1f} ms only (slow round trips): analyze aligns by the trace",
        )  # fmt: skip
    return Check(host, "clock", "ok", text)


def differences(answers: Mapping[str, Answers]) -> Iterator[Check]:
    """What should be the same on every host and is not."""
    for name, pick in _SAME.items():
        values = {host: pick(found) for host, found in answers.items()}
        known = {host: value for host, value in values.items() if value}
        if len(set(known.values())) > 1:
            said = ", ".join(f"{host} {value}" for host, value in known.items())
            yield Check("all hosts", name, "warning", "differs", f"{name} differs between hosts: {said}")


_SAME: dict[str, Callable[[Answers], str | None]] = {
    "nsys": lambda found: found.get("nsys", {}).get("version"),
    "driver": lambda found: found["gpus"].get("driver"),
    "GPU": lambda found: ", ".join(sorted({gpu["name"] for gpu in found["gpus"].get("gpus", ())})),
    "image": lambda found: found.get("image", {}).get("id"),
    "sglang": lambda found: found["packages"].get("packages", {}).get("sglang"),
    "torch": lambda found: found["packages"].get("packages", {}).get("torch"),
    "model": lambda found: str(found["model"]["bytes"]) if found.get("model", {}).get("bytes") else None,
}
