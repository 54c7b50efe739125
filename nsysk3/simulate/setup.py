"""From what was asked for to a configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from nsysk3.simulate.config import Config, Machine
from nsysk3.simulate.faults import parse_fault
from nsysk3.simulate.presets import preset as find_preset

# Compute of a mean K3 layer on a TP group of 32, and how it grows as the group shrinks: between the fitted values of
# the presets, which are larger slices but more efficient ones (assumption).
_TP32_LAYER_NS = 11_000_000.0
_EXPONENT = 0.85
_ALLREDUCE_NS = {1: 0.0, 2: 3_290_000.0, 4: 4_930_000.0, 8: 6_000_000.0, 16: 6_240_000.0, 32: 6_590_000.0}


def configure(preset: str | None, faults: Sequence[str], changes: Mapping[str, object]) -> Config:
    """A preset, or the default layout, with the ``changes`` that are not None.

    Keys are those of Config, and ``layers``, ``layer_us``, ``offset_ms`` and ``drift_ppm``.  Raises InputError for what
    cannot be.
    """
    given = {name: value for name, value in changes.items() if value is not None}
    model = {"layers": given.pop("layers")} if "layers" in given else {}
    machine = {"layer_compute_ns": float(str(given.pop("layer_us"))) * 1e3} if "layer_us" in given else {}
    clocks: dict[str, float] = {}
    if "offset_ms" in given:
        clocks["offset_ns"] = float(str(given.pop("offset_ms"))) * 1e6
    if "drift_ppm" in given:
        clocks["drift_ppm"] = float(str(given.pop("drift_ppm")))
    base = find_preset(preset) if preset else _typical(given)
    base = replace(
        base,
        model=replace(base.model, **model),
        machine=replace(base.machine, **machine),
        clocks=replace(base.clocks, **clocks),
        faults=tuple(parse_fault(text) for text in faults),
    )
    reshaped = preset and any(given.get(name, getattr(base, name)) != getattr(base, name) for name in ("pp", "tp"))
    if reshaped or model or machine:
        base = replace(base, simulated="simulated", published=())
    return replace(base, **given)


def _typical(given: dict[str, object]) -> Config:
    """A layout without a preset: machine speeds between those that were published, experts split as far as they go."""
    pp, tp = int(str(given.get("pp", 8))), int(str(given.get("tp", 4)))
    near = min(_ALLREDUCE_NS, key=lambda size: abs(size - tp))
    machine = Machine(
        layer_compute_ns=_TP32_LAYER_NS * (32 / max(tp, 1)) ** _EXPONENT, allreduce_128mib_ns=max(_ALLREDUCE_NS[near], 1.0)
    )
    ep = next((size for size in (4, 2) if tp % size == 0), 1)
    nodes = next((count for count in (4, 2) if pp * tp % count == 0 and pp * tp >= 8 * count), 1)
    for name, value in (("pp", pp), ("tp", tp), ("ep", ep)):
        given.setdefault(name, value)
    given.setdefault("nodes", nodes)
    return Config(pp=1, tp=1, ep=1, nodes=1, machine=machine)
