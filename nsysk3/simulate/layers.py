"""The kernels of one forward on one stage, in launch order.

Names, order, relative times and the modules around them follow real traces of SGLang serving the Kimi-K3 architecture
on H200; how long a layer takes is the machine's (see config.Machine).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nsysk3.simulate.config import Config, layer_split
from nsysk3.simulate.symbols import LAUNCH_CALLS, SYMBOL_KEYS, SYMBOLS

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

FORWARD_STREAM, SCHEDULE_STREAM, COPY_STREAM = 70, 94, 90
PREVIOUS_STREAM, NEXT_STREAM, RESULT_STREAM = 98, 102, 106
ROLES = ("compute", "allreduce", "reduce_scatter", "all_gather", "p2p", "copy")
COMPUTE, ALLREDUCE, REDUCE_SCATTER, ALL_GATHER, P2P, COPY = range(len(ROLES))
# What a communication kernel is for; the names are those of docs/metrics.md.
PURPOSES = (
    "", "embedding", "attention", "moe", "dense_mlp", "logits", "pp_gather", "activation", "result", "sequence",
)  # fmt: skip
PURPOSE = {name: number for number, name in enumerate(PURPOSES)}
BF16 = 2

# (symbol, share of a layer's time on one rank, module inside the layer).  Shares are microseconds of the H200 trace.
_KDA = (
    ("res_score", 230, ""),
    ("res_combine", 117, ""),
    ("norm", 95, "input_layernorm"),
    ("gemm", 8000, "self_attn.fused_qkvg_proj"),
    ("gemm_small", 42, "self_attn"),
    ("copy", 80, "self_attn"),
    ("conv", 170, "self_attn.attn"),
    ("conv", 170, "self_attn.attn"),
    ("conv", 170, "self_attn.attn"),
    ("l2norm", 98, "self_attn.attn"),
    ("l2norm", 98, "self_attn.attn"),
    ("kda_gate", 235, "self_attn.attn"),
    ("kda_intra", 720, "self_attn.attn"),
    ("fill", 31, "self_attn.attn"),
    ("kda_inter", 650, "self_attn.attn"),
    ("kda_wu", 410, "self_attn.attn"),
    ("kda_h", 680, "self_attn.attn"),
    ("kda_o", 570, "self_attn.attn"),
    ("gated_norm", 146, "self_attn.o_norm"),
    ("gemm_out", 1900, "self_attn.o_proj"),
)
_MLA = (
    ("res_score", 230, ""),
    ("res_combine", 117, ""),
    ("norm", 95, "input_layernorm"),
    ("gemm_small", 328, "self_attn.fused_qkv_a_proj_with_mqa"),
    ("norm", 17, "self_attn.q_a_layernorm"),
    ("gemm", 636, "self_attn.q_b_proj"),
    ("norm", 13, "self_attn.kv_a_layernorm"),
    ("kv_store", 5, "self_attn.attn_mha"),
    ("gemm", 345, "self_attn.kv_b_proj"),
    ("copy", 250, "self_attn.attn_mha"),
    ("flash", 6900, "self_attn.attn_mha"),
    ("gemm", 1860, "self_attn.g_proj"),
    ("mla_gate", 143, "self_attn"),
    ("gemm_out", 1870, "self_attn.o_proj"),
)
_BEFORE_MLP = (("add", 80, ""), ("res_score", 230, ""), ("res_combine", 117, ""), ("norm", 95, "post_attention_layernorm"))  # noqa: E501  # fmt: skip
_MOE = (
    ("gemm", 1470, "mlp"),
    ("copy", 73, "mlp"),
    ("situ", 42, "mlp.shared_experts.act_fn"),
    ("gemm_out", 480, "mlp"),
    ("router", 15, "mlp.topk"),
    ("moe_align", 29, "mlp.experts"),
    ("moe_gemm", 9700, "mlp.experts"),
    ("situ", 300, "mlp.experts"),
    ("moe_gemm", 5600, "mlp.experts"),
    ("moe_sum", 233, "mlp.experts"),
)
_AFTER_MOE = (
    ("norm", 45, "mlp.routed_expert_norm"),
    ("gemm_out", 560, "mlp.routed_expert_up_proj"),
    ("add3", 106, "mlp"),
)
_DENSE = (
    ("gemm", 7000, "mlp.gate_up_proj"),
    ("situ", 250, "mlp.act_fn"),
    ("gemm_out", 3000, "mlp.down_proj"),
)
# Small kernels before the layers, each as late as the host is: nothing hides their launches.
_PRELUDE = (
    ("tokens", 10_500, SCHEDULE_STREAM), ("position", 2_600, FORWARD_STREAM), ("index", 4_000, FORWARD_STREAM),
    ("fill", 1_500, FORWARD_STREAM), ("index", 2_200, FORWARD_STREAM), ("fill", 1_400, FORWARD_STREAM),
)  # fmt: skip
_PRELUDE_HOST_NS = 55_000
_GAP_NS = 1_600
_TAIL = (("index", 4_100), ("gemm_head", 118_000))
_SAMPLING = (("argmax", 12_300), ("index", 2_200))


class Slot(NamedTuple):
    """One kernel of a forward before it has a time; ``ns`` is 0 for communication."""

    symbol: str
    ns: float
    host_ns: float
    stream: int = FORWARD_STREAM
    layer: int = -1
    module: str | None = None
    role: int = COMPUTE
    purpose: str = ""
    bytes: int = 0


@dataclass(frozen=True)
class Slots:
    """Kernels in launch order, as columns."""

    symbol: Ints
    ns: Floats
    host_ns: Floats
    stream: Ints
    layer: Ints
    role: Ints
    purpose: Ints
    bytes: Ints
    call: Ints
    modules: tuple[str | None, ...]

    def __len__(self) -> int:
        return len(self.symbol)


def columns(slots: list[Slot]) -> Slots:
    """Slots as columns."""
    calls = list(LAUNCH_CALLS)
    keys = {key: index for index, key in enumerate(SYMBOL_KEYS)}

    def whole(values: list[int]) -> Ints:
        return np.array(values, np.int64)

    return Slots(
        whole([keys[slot.symbol] for slot in slots]),
        np.array([slot.ns for slot in slots], np.float64),
        np.array([slot.host_ns for slot in slots], np.float64),
        whole([slot.stream for slot in slots]),
        whole([slot.layer for slot in slots]),
        whole([slot.role for slot in slots]),
        whole([PURPOSE[slot.purpose] for slot in slots]),
        whole([slot.bytes for slot in slots]),
        whole([calls.index(SYMBOLS[slot.symbol].call) for slot in slots]),
        tuple(slot.module for slot in slots),
    )


@lru_cache(maxsize=256)
def forward_slots(config: Config, stage: int) -> Slots:
    """The forward stream's kernels of one micro-batch on one stage, boundary and sampled result apart."""
    layers = layer_split(config.model.layers, config.pp)[stage]
    host = config.machine.host_launch_ns
    slots = [Slot(symbol, ns, _PRELUDE_HOST_NS, stream) for symbol, ns, stream in _PRELUDE]
    if stage == 0:
        slots.append(Slot("embed", 60_000, host, module="embed_tokens"))
        slots += _reduce(config, "embedding", config.model.hidden, -1, "embed_tokens")
    else:
        # The inherited residual bank is copied into a longer one before the first layer adds its row.
        slots.append(Slot("copy", 155_000, host))
    for layer in layers:
        slots += _layer(config, layer)
    if stage == config.pp - 1:
        slots += [Slot(symbol, ns, host, module="logits_processor") for symbol, ns in _TAIL]
        if config.tp > 1:
            share = config.model.vocab // config.tp * BF16
            slots.append(Slot("all_gather", 0, host, role=ALL_GATHER, purpose="logits", bytes=share,
                              module="logits_processor"))  # fmt: skip
        slots += [Slot(symbol, ns, host, module="logits_processor") for symbol, ns in _SAMPLING]
    return columns(slots)


def _layer(config: Config, layer: int) -> list[Slot]:
    model = config.model
    scale = config.machine.layer_compute_ns / _mean_share(config)
    host = config.machine.host_launch_ns
    dense = layer < model.dense_layers
    attention = _MLA if model.is_mla(layer) else _KDA

    def work(part: tuple[tuple[str, int, str], ...]) -> list[Slot]:
        return [Slot(symbol, share * scale, host, layer=layer, module=module) for symbol, share, module in part]

    slots = work(attention)
    if config.fault("sp-fallback"):
        slots += _scatter(config, layer)
    else:
        slots += _reduce(config, "attention", model.hidden, layer, "self_attn.o_proj")
    slots += work(_BEFORE_MLP)
    if dense:
        return slots + work(_DENSE) + _reduce(config, "dense_mlp", model.hidden, layer, "mlp.down_proj")
    slots += work(_MOE)
    slots += _reduce(config, "moe", model.latent + model.hidden, layer, "mlp")
    return slots + work(_AFTER_MOE)


def _reduce(config: Config, purpose: str, width: int, layer: int, module: str) -> list[Slot]:
    """An AllReduce over the TP group, if there is one."""
    if config.tp == 1:
        return []
    size = config.chunk_tokens * width * BF16
    host = config.machine.host_launch_ns
    return [Slot("allreduce", 0, host, FORWARD_STREAM, layer, module, ALLREDUCE, purpose, size)]


def _scatter(config: Config, layer: int) -> list[Slot]:
    """Sequence parallelism that fell back to NCCL: the AllReduce as ReduceScatter and AllGather."""
    if config.tp == 1:
        return []
    share = config.chunk_tokens * config.model.hidden * BF16 // config.tp
    host = config.machine.host_launch_ns
    common = (0, host, FORWARD_STREAM, layer, "self_attn.o_proj")
    return [
        Slot("reduce_scatter", *common, REDUCE_SCATTER, "sequence", share),
        Slot("all_gather", *common, ALL_GATHER, "sequence", share),
    ]


def _mean_share(config: Config) -> float:
    """Mean over the layers of the sum of their shares, so that layer_compute_ns is the mean layer's time."""
    model = config.model
    total = 0
    for layer in range(model.layers):
        parts = (_MLA if model.is_mla(layer) else _KDA) + _BEFORE_MLP
        parts += _DENSE if layer < model.dense_layers else _MOE + _AFTER_MOE
        total += sum(share for _, share, _ in parts)
    return total / model.layers


GAP_NS = _GAP_NS


def boundary_bytes(config: Config, stage: int) -> tuple[int, int]:
    """Bytes one rank sends from ``stage`` to the next a micro-batch: hidden states, and the residual bank.

    Every rank of the TP group sends its slice; the receivers gather them.  The bank has grown by then to the rows of
    all layers up to the boundary.
    """
    row = config.chunk_tokens * config.model.hidden * BF16 // config.tp
    last = layer_split(config.model.layers, config.pp)[stage].stop
    return row, row * config.model.bank_rows(last)
