"""Checks of a host's software: nsys, image, server, model."""

from __future__ import annotations

from nsysk3.errors import InputError
from nsysk3.launch.checks import GIB, Answers, Verdicts
from nsysk3.launch.commands import flag_value
from nsysk3.launch.model import model_facts
from nsysk3.launch.plan import NodePlan, Plan


def check_nsys(plan: Plan, node: NodePlan, answers: Answers) -> Verdicts:
    """Is there an nsys that knows the options used?"""
    if node.report is None:
        return
    found = answers["nsys"]
    where = f" in the image {plan.settings.container.image}" if plan.settings.container.cli else ""
    if "error" in found:
        yield "fatal", "missing", f"{found['error']}{where}; install Nsight Systems there or set nsys.path"
    elif found["lacks"]:
        lacks = ", ".join(found["lacks"])
        yield "fatal", str(found["version"]), f"nsys {found['version']} has no {lacks}; install 2022.1 or newer"
    else:
        yield "ok", str(found["version"] or "unknown"), None


def check_image(plan: Plan, node: NodePlan, answers: Answers) -> Verdicts:
    """Is the image here, and the one that was meant?"""
    if "image" not in answers:
        return
    container, found = plan.settings.container, answers["image"]
    if "error" in found:
        yield "fatal", "no " + str(container.cli), f"{found['error']}; install it or unset container.cli"
    elif found["id"] is None:
        yield "fatal", "no image", f"image {container.image} is not here ({found['why']}); load or pull it on this host"
    elif container.digest and container.digest not in (found["id"], *found["digests"]):
        yield (
            "fatal", "other image",
            f"image {container.image} is {found['id'][:19]}, not container.digest {container.digest[:19]}",
        )  # fmt: skip
    else:
        yield "ok", found["id"].removeprefix("sha256:")[:12], None


def check_packages(plan: Plan, node: NodePlan, answers: Answers) -> Verdicts:
    """Has the server's Python what the server, the markers and the SP kernels need?"""
    server, found = plan.settings.server, answers["packages"]
    if server.command:
        yield "note", "own command", None
        return
    if "error" in found:
        yield "fatal", "no Python", f"server.python: {found['error']}"
        return
    versions = found["packages"]
    needed = "sglang" if server.engine == "sglang" else "torch"
    if versions[needed] is None:
        yield "fatal", f"no {needed}", f"{server.python} has no {needed}; set server.python to one that has"
        return
    yield "ok", f"{needed} {versions[needed]}", None
    uses = server.engine == "torch" or server.sp == "nsysk3"
    if versions["nsysk3"] is None and (uses or server.markers):
        cost = "" if uses else " (without it there are no markers; server.markers = false says that this is wanted)"
        yield (
            "fatal" if uses else "warning", "no nsysk3",
            f"{server.python} has no nsysk3: `{server.python} -m pip install --no-deps nsysk3` there{cost}",
        )  # fmt: skip
    plugin = found.get("plugin")
    if plugin and not plugin["ok"]:
        yield "warning", "plugin", f"nsysk3's plugin does not fit this SGLang: {plugin['said'].splitlines()[-1]}"


def check_model(plan: Plan, node: NodePlan, answers: Answers) -> Verdicts:
    """Is the model here, whole, and can it be split as planned?"""
    if "model" not in answers:
        return
    found = answers["model"]
    if "error" in found:
        yield "fatal", "missing", f"model: {found['error']}; set model.path to where every host has it"
        return
    try:
        facts = model_facts(str(plan.settings.model.path), found["config"], found["bytes"] or None)
        facts.check(plan.pp, plan.tp, plan.ep)
    except InputError as error:
        yield "fatal", "no fit", str(error)
        return
    if found["missing"]:
        names = ", ".join(found["missing"][:3])
        yield "fatal", f"{len(found['missing'])} missing", f"model: weight files of its index are missing: {names}"
    elif not found["files"] and flag_value(plan.all_args, "--load-format") != "dummy":
        yield "fatal", "no weights", "model: no weight files; copy them, or give --load-format dummy to the server"
    else:
        yield "ok", f"{found['bytes'] / GIB:,.0f} GiB" if found["files"] else "dummy", None
