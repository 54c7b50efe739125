"""What a running server says of itself, held against what the plan asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nsysk3.errors import RunFailedError
from nsysk3.run.redact import redact

# The first is SGLang's name since 0.5.16 or so; the second was its name before and still warns in the server's log.
ENDPOINTS = ("/server_info", "/get_server_info")
# Names of one value over the versions; those of the plan come first.
_NAMES = {
    "tp_size": ("tp_size", "tensor_parallel_size"),
    "pp_size": ("pp_size", "pipeline_parallel_size"),
    "ep_size": ("ep_size", "expert_parallel_size", "moe_ep_size"),
    "moe_runner_backend": ("moe_runner_backend", "moe_backend"),
}
# Values that the scheduler chooses when it starts: the arguments then say null, the running state the number.
_RUNNING = frozenset({"pp_max_micro_batch_size"})


def fetch_info(url: str, timeout_s: float = 30.0) -> tuple[dict[str, Any], str]:
    """What the server says, and the endpoint that said it.  Raises RunFailedError when none answers with a document."""
    import httpx

    said = []
    for endpoint in ENDPOINTS:
        try:
            response = httpx.get(url + endpoint, timeout=timeout_s, trust_env=False)
            document = response.json() if response.status_code == 200 else None
        except (httpx.HTTPError, ValueError) as error:
            said.append(f"{endpoint}: {type(error).__name__}")
            continue
        if isinstance(document, dict):
            return document, endpoint
        said.append(f"{endpoint}: HTTP {response.status_code}")
    keyed = any("HTTP 401" in each for each in said)
    advice = "it wants a key: start it without --api-key" if keyed else "is it SGLang?"
    raise RunFailedError(f"{url}: the server does not say what it runs ({', '.join(said)}); {advice}")


def value_of(info: Mapping[str, Any], name: str) -> object | None:
    """One value by any of its names, None where this version does not report it."""
    states = info.get("internal_states")
    state = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
    places = (state, info) if name in _RUNNING else (info, state)
    for place in places:
        for known in _NAMES.get(name, (name,)):
            if place.get(known) is not None:
                return place[known]  # type: ignore[no-any-return]
    return None


def mismatches(info: Mapping[str, Any], expected: Mapping[str, object]) -> list[str]:
    """A line for every value that is not what the plan asked for; what this version does not report is no mismatch."""
    lines = []
    for name, wanted in expected.items():
        found = value_of(info, name)
        if found is not None and not _same(found, wanted):
            lines.append(f"{name} is {found!r}, the plan asked for {wanted!r}")
    return lines


def unreported(info: Mapping[str, Any], expected: Mapping[str, object]) -> list[str]:
    """Names of what the plan asked for and this version of the server does not tell."""
    return [name for name in expected if value_of(info, name) is None]


@dataclass(frozen=True)
class Admission:
    """How many requests the pipeline takes in at once.

    Attributes:
        micro_batch: the resolved ``pp_max_micro_batch_size``: running requests of one micro-batch.
        slots: micro-batches under way, ``PP + pp_async_batch_depth``.
        running: most requests that run at once; None where the server does not tell ``max_running_requests`` either.
    """

    micro_batch: int
    slots: int
    running: int | None

    @property
    def admits(self) -> int:
        """Most requests that the scheduler lets run at once."""
        together = self.micro_batch * self.slots
        return together if self.running is None else min(together, self.running)

    def meaning(self, concurrency: int) -> str:
        """What this does to a load of ``concurrency`` requests at once, as one line."""
        head = f"pp_max_micro_batch_size = {self.micro_batch}, {self.slots} micro-batches under way: "
        waiting = concurrency - self.admits
        if waiting > 0:
            return (
                f"{head}at most {self.admits} requests run at once, so of C={concurrency} {waiting} always wait in the "
                "queue and TTFT holds that wait"
            )
        if concurrency < self.slots:
            return f"{head}all C={concurrency} requests run at once, fewer than the pipeline holds"
        return f"{head}all C={concurrency} requests run at once"


def admission(info: Mapping[str, Any]) -> Admission | None:
    """What the scheduler admits, None without a pipeline or where this version does not report it."""
    micro, stages = value_of(info, "pp_max_micro_batch_size"), value_of(info, "pp_size")
    if not isinstance(micro, int) or not isinstance(stages, int) or stages < 2 or micro < 1:
        return None
    depth = value_of(info, "pp_async_batch_depth")
    running = value_of(info, "effective_max_running_requests_per_dp") or value_of(info, "max_running_requests")
    return Admission(
        micro, stages + (depth if isinstance(depth, int) else 0), running if isinstance(running, int) else None
    )


def redacted(document: Any, name: str = "") -> Any:
    """A copy of what the server said without its secrets (API keys, tokens in commands)."""
    if isinstance(document, dict):
        return {key: redacted(value, str(key)) for key, value in document.items()}
    if isinstance(document, list):
        return [redacted(value, name) for value in document]
    return redact(name, document) if isinstance(document, str) else document


def _same(found: object, wanted: object) -> bool:
    if isinstance(found, bool) or isinstance(wanted, bool):
        return found is wanted
    if isinstance(found, int | float) and isinstance(wanted, int | float):
        return abs(found - wanted) < 1e-6
    return str(found) == str(wanted)
