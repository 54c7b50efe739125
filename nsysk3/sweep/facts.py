"""What a server says of itself that must be the same for two layouts to be comparable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nsysk3.run.manifest import SAID
from nsysk3.sweep.record import LayoutRecord

NAMES = ("version", "model_path", *SAID, "chunked_prefill_size", "quantization", "dtype", "kv_cache_dtype")


def facts_of(info: Mapping[str, Any], versions: Mapping[str, str]) -> dict[str, Any]:
    """The facts that the server and its host tell."""
    from nsysk3.launch.server_info import value_of

    found = {name: value_of(info, name) for name in NAMES}
    found |= {name: versions.get(name) for name in ("gpu", "driver", "torch", "image_digest")}
    return {name: value for name, value in found.items() if value is not None}


def drift(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Facts of a layout that are not as they were when it was started before, a line each."""
    return [
        f"{name} was {value} when it was started before, is {now[name]} now"
        for name, value in before.items()
        if name in now and now[name] != value
    ]


def unlike(known: LayoutRecord, others: Sequence[LayoutRecord]) -> list[str]:
    """Facts in which a layout is unlike the first other one that has any."""
    first = next((each for each in others if each is not known and each.facts), None)
    if first is None:
        return []
    return [
        f"{name} is {known.facts[name]}, but {value} with {first.layout.label}"
        for name, value in first.facts.items()
        if name in known.facts and known.facts[name] != value
    ]
