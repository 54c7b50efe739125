"""What the doctor asks of a host besides preflight: features of nsys, permissions, NCCL, kernels, containers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from nsysk3.doctor.here import features_text
from nsysk3.doctor.lines import Line, State
from nsysk3.run.config import Settings

Answers = Mapping[str, Any]
# NCCL's NVTX ranges carry sizes since the first, communicators and ranks since the second.
_SIZES, _COMMUNICATORS = (2, 16), (2, 25)
_NEEDED_CAPABILITY = "9.0"


def questions_of(settings: Settings) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is asked of a host's machine, and what where the server will run."""
    python = settings.server.python
    server = {"permissions": None, "nccl": python, "kernels": python, "nsys_features": settings.nsys.path or "nsys"}
    return {"containers": None}, server


def _features(settings: Settings, host: str, found: Answers) -> Iterator[Line]:
    can = found["nsys_features"]
    if "error" not in can and "error" not in found["nsys"]:
        yield Line(host, "nsys features", "ok", features_text(can))


def _hooks(settings: Settings, host: str, found: Answers) -> Iterator[Line]:
    """Do the plugin's hooks match the SGLang that is there?  Where not, preflight has said so."""
    plugin = found["packages"].get("plugin")
    if plugin and plugin["ok"]:
        yield Line(host, "SGLang hooks", "ok", plugin["said"].splitlines()[-1])


def _permissions(settings: Settings, host: str, found: Answers) -> Iterator[Line]:
    """nsysk3's captures sample nothing, so that they need no permission; the user's own options may."""
    may = found["permissions"]
    if "error" in may:
        return
    options = settings.nsys.options
    samples = [each for each in options if re.match(r"(-s|--sample|--cpuctxsw)\b(?!=none)", each)]
    counts = [each for each in options if each.startswith("--gpu-metrics-device")]
    paranoid = may["paranoid"]
    if samples and not may["powers"] and (paranoid is None or paranoid > 2):
        fix = "sudo sysctl kernel.perf_event_paranoid=2, or leave it out of nsys.options"
        yield Line(host, "perf", "warning", f"{samples[0]} needs perf_event_paranoid 2, it is {paranoid}", fix)
    elif counts and not may["powers"] and may["counters_for_admin_only"]:
        fix = "set NVreg_RestrictProfilingToAdminUsers=0 for the driver, or leave it out of nsys.options"
        yield Line(host, "perf", "warning", f"{counts[0]} needs GPU counters, which only root may read here", fix)
    else:
        asked = "enough for nsys.options" if samples or counts else "no matter, captures sample no CPU"
        yield Line(host, "perf", "ok", f"perf_event_paranoid {'unknown' if paranoid is None else paranoid}: {asked}")


def _nccl(settings: Settings, host: str, found: Answers) -> Iterator[Line]:
    """What of messages and communicators a trace will say."""
    nccl = found["nccl"]
    if "error" in nccl:
        return  # no Python: said already
    version = nccl["version"]
    if nccl["off"] or settings.env.get("NCCL_NVTX_DISABLE", "0") not in ("", "0"):
        fix = "unset it: kernels alone tell neither sizes nor peers"
        yield Line(host, "NCCL NVTX", "warning", f"NCCL {version or ''}: NCCL_NVTX_DISABLE is set", fix)
    elif version is None:
        torch = found["packages"].get("packages", {}).get("torch")
        if torch and "+cpu" not in torch:
            text = f"no NCCL found beside torch {torch}, nor on the system: what its ranges say is not known"
            yield Line(host, "NCCL NVTX", "warning", text)
    else:
        release = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
        if release >= _COMMUNICATORS:
            yield Line(host, "NCCL NVTX", "ok", f"NCCL {version}: communicators, ranks, sizes, peers")
            return
        has = "sizes and peers, no communicators" if release >= _SIZES else "no payloads"
        yield Line(host, "NCCL NVTX", "warning", f"NCCL {version}: {has}", "use NCCL 2.25 or newer")


def _containers(settings: Settings, host: str, found: Answers) -> Iterator[Line]:
    there = found["containers"].get("found", {})
    wanted = settings.container.cli
    if wanted and wanted not in there:
        return  # the check of the image says it
    said = ", ".join(f"{name} {each.get('version') or '(no answer)'}" for name, each in there.items())
    if wanted and "error" in there[wanted]:
        yield Line(host, "containers", "cannot", there[wanted]["error"], f"start {wanted} there, or join its group")
    else:
        yield Line(host, "containers", "ok", said or "none (needed only with container.cli)")


def _kernels(settings: Settings, host: str, found: Answers) -> Iterator[Line]:
    """nsysk3's own CUDA kernels: an extra, so that their absence is a warning only where they were asked for."""
    why = why_no_kernels(found)
    state: State = "ok" if why is None or settings.server.sp != "nsysk3" else "warning"
    kernels = found["kernels"]
    how = "built" if kernels.get("built") else f"built at first use by {kernels.get('nvcc')}"
    yield Line(host, "kernels", state, f"no CUDA kernels: {why}" if why else f"CUDA kernels: {how}")


def why_no_kernels(found: Answers) -> str | None:
    """Why the CUDA kernels cannot run on a host; None where they can."""
    kernels, packages = found["kernels"], found["packages"].get("packages", {})
    if "error" in kernels:
        return str(kernels["error"])
    if not packages.get("torch"):
        return "no torch in the server's Python"
    if not packages.get("nsysk3"):
        return "no nsysk3 in the server's Python"
    if not kernels["capable"]:
        return "no GPU"
    if set(kernels["capable"]) != {_NEEDED_CAPABILITY}:
        return (
            f"made for compute capability {_NEEDED_CAPABILITY}, here it is {', '.join(sorted(set(kernels['capable'])))}"
        )
    if not kernels["built"] and not kernels["nvcc"]:
        return str(kernels.get("why") or "not built, and no nvcc to build them (CUDA_HOME)")
    return None


EXTRAS: tuple[Callable[[Settings, str, Answers], Iterator[Line]], ...] = (
    _features, _hooks, _permissions, _nccl, _containers, _kernels,
)  # fmt: skip
