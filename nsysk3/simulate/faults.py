"""Things that go wrong in real captures, on demand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from nsysk3.errors import InputError
from nsysk3.simulate.config import Config, Fault, no_such
from nsysk3.simulate.node import Faulty

_Number = TypeVar("_Number", int, float)
# Name to what its argument means, with the default.
FAULTS = {
    "lost-kernels": "share of kernel records that are lost (0.02)",
    "straggler": "RANK[:FACTOR] of a slow GPU (1:1.15)",
    "cut-window": "NODE[:SHARE] whose capture stops after that share of the run (last node:0.6)",
    "no-nvtx-rank": "rank whose process has no NVTX (0)",
    "imbalanced-stage": "STAGE[:FACTOR] that takes longer (last stage:1.5)",
    "ep-change": "EP size instead of the preset's (half of it)",
    "sp-fallback": "sequence parallelism asked for, but run by NCCL",
    "graph-rank": "rank whose layers are replayed as a whole CUDA graph (0)",
    "corrupt-rows": "share of kernel rows with a damaged time or name (0.01)",
}


def parse_fault(text: str) -> Fault:
    """``NAME`` or ``NAME=ARG``.  Raises InputError for a name that is not known."""
    name, _, argument = text.partition("=")
    if name not in FAULTS:
        raise no_such("--fault", name, FAULTS)
    return Fault(name, argument or None)


def apply_faults(config: Config) -> Config:
    """The configuration as the faults change it."""
    changed = config.fault("ep-change")
    if changed is None:
        return config
    ep = _whole(changed, max(1, config.ep // 2), config.tp)
    if config.tp % ep:
        raise InputError(f"--fault ep-change={ep}: TP{config.tp} is not a multiple of it")
    # Fewer expert groups: each rank computes on all experts' shards, a little less efficiently (assumption).
    machine = replace(config.machine, layer_compute_ns=config.machine.layer_compute_ns * 1.06)
    return replace(config, ep=ep, machine=machine)


def compute_factors(config: Config) -> NDArray[np.float64]:
    """How much longer each rank computes: [stage, tp]."""
    factors = np.ones((config.pp, config.tp))
    slow = config.fault("straggler")
    if slow:
        rank, factor = _pair(slow, min(1, config.world - 1), 1.15, config.world)
        factors[rank // config.tp, rank % config.tp] *= factor
    heavy = config.fault("imbalanced-stage")
    if heavy:
        stage, factor = _pair(heavy, config.pp - 1, 1.5, config.pp)
        factors[stage] *= factor
    return factors


def recording_faults(config: Config) -> Faulty:
    """What goes wrong while recording."""

    def ranks(name: str) -> frozenset[int]:
        fault = config.fault(name)
        return frozenset() if fault is None else frozenset({_whole(fault, 0, config.world - 1)})

    return Faulty(
        ranks("no-nvtx-rank"), ranks("graph-rank"), _share(config, "lost-kernels", 0.02),
        _share(config, "corrupt-rows", 0.01),
    )  # fmt: skip


def cut_window(config: Config) -> tuple[int, float] | None:
    """Which node's capture stops early, and after what share of the run."""
    fault = config.fault("cut-window")
    if fault is None:
        return None
    node, share = _pair(fault, config.nodes - 1, 0.6, config.nodes)
    if not 0 < share <= 1:
        raise InputError(f"--fault cut-window: {share} is not a share")
    return node, share


def _share(config: Config, name: str, default: float) -> float:
    fault = config.fault(name)
    if fault is None:
        return 0.0
    share = _number(fault, default, float)
    if not 0 <= share < 1:
        raise InputError(f"--fault {name}: {share} is not a share")
    return share


def _whole(fault: Fault, default: int, most: int) -> int:
    value = _number(fault, default, int)
    if not 0 <= value <= most:
        raise InputError(f"--fault {fault.name}: {value} is not between 0 and {most}")
    return value


def _pair(fault: Fault, which: int, factor: float, count: int) -> tuple[int, float]:
    first, _, second = (fault.argument or "").partition(":")
    chosen = _whole(Fault(fault.name, first or None), which, count - 1)
    value = _number(Fault(fault.name, second or None), factor, float)
    if value <= 0:
        raise InputError(f"--fault {fault.name}: {value} must be more than 0")
    return chosen, value


def _number(fault: Fault, default: _Number, kind: Callable[[str], _Number]) -> _Number:
    if fault.argument is None:
        return default
    try:
        value = kind(fault.argument)
    except ValueError as error:
        raise InputError(f"--fault {fault.name}={fault.argument}: not a number") from error
    if not math.isfinite(value):
        raise InputError(f"--fault {fault.name}={fault.argument}: not a finite number")
    return value
