"""From what was asked for to a configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from nsysk3.errors import InputError
from nsysk3.simulate.config import Config, Machine
from nsysk3.simulate.faults import parse_fault
from nsysk3.simulate.presets import preset as find_preset

# Compute of a mean K3 layer on a TP group of 32, and how it grows as the group shrinks: between the fitted values of
# the presets, which are larger slices but more efficient ones (assumption).
_TP32_LAYER_NS = 11_000_000.0
_EXPONENT = 0.85
# What a preset was calibrated with: with another value of these its figures are no longer the published ones.
_CALIBRATED = ("pp", "tp", "micro_batches", "in_flight", "chunk_tokens", "cut_layers", "scale")
_ALLREDUCE_NS = {1: 0.0, 2: 3_290_000.0, 4: 4_930_000.0, 8: 6_000_000.0, 16: 6_240_000.0, 32: 6_590_000.0}


def configure(preset: str | None, faults: Sequence[str], changes: Mapping[str, Any]) -> Config:
    """A preset, or the default layout, with the ``changes`` that are not None.

    Keys are those of Config, and ``layers``, ``layer_us``, ``offset_ms``, ``drift_ppm`` and ``wander_ns``.  Raises
    InputError for what cannot be.
    """
    given = {name: value for name, value in changes.items() if value is not None}
    for name, value in given.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"--{name.replace('_', '-')}: {value} is not a finite number")
    model = {"layers": given.pop("layers")} if "layers" in given else {}
    machine: dict[str, Any] = {"layer_compute_ns": given.pop("layer_us") * 1e3} if "layer_us" in given else {}
    clocks: dict[str, Any] = {"offset_ns": given.pop("offset_ms") * 1e6} if "offset_ms" in given else {}
    clocks |= {name: given.pop(name) for name in ("drift_ppm", "wander_ns") if name in given}
    base = find_preset(preset) if preset else _typical(given)
    calibrated = all(given.get(name, getattr(base, name)) == getattr(base, name) for name in _CALIBRATED)
    if model or machine or not calibrated:
        given |= {"simulated": "simulated", "published": ()}
    return replace(
        base,
        model=replace(base.model, **model),
        machine=replace(base.machine, **machine),
        clocks=replace(base.clocks, **clocks),
        faults=tuple(parse_fault(text) for text in faults),
        **given,
    )


def _typical(given: dict[str, Any]) -> Config:
    """A layout without a preset: machine speeds between those that were published, experts split as far as they go."""
    pp, tp = given.get("pp", 8), given.get("tp", 4)
    near = min(_ALLREDUCE_NS, key=lambda size: abs(size - tp))
    compute = _TP32_LAYER_NS * (32 / max(tp, 1)) ** _EXPONENT
    machine = Machine(layer_compute_ns=compute, allreduce_128mib_ns=_ALLREDUCE_NS[near])
    ep = next((size for size in (4, 2) if tp % size == 0), 1)
    nodes = next((count for count in (4, 2) if pp * tp % count == 0 and pp * tp >= 8 * count), 1)
    for name, value in (("pp", pp), ("tp", tp), ("ep", ep)):
        given.setdefault(name, value)
    given.setdefault("nodes", nodes)
    return Config(pp=1, tp=1, ep=1, nodes=1, machine=machine)
