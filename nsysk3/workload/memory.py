"""Memory that a rank takes where it computes on CPUs, told before anything starts.  No torch in here."""

from __future__ import annotations

from nsysk3.workload.options import Options
from nsysk3.workload.shape import Shape

_NUMBER = 4  # bytes: on CPUs everything is float32
# Tensors [tokens, heads x head_dim] that a KDA layer has at once, as measured; no other part has more.
_AT_ONCE = 40
_PROCESS = 220 * 2**20  # Python and torch, as measured


def weight_bytes(options: Options, stage: int) -> int:
    """Weights of one rank of a stage."""
    shape, tp = options.shape(), options.tp_size
    outer = shape.vocab * shape.hidden // tp
    count = sum(_layer(shape, layer, tp) for layer in shape.stage(stage, options.pp_size))
    count += outer * (stage == 0) + (outer + 2 * shape.hidden) * (stage == options.pp_size - 1)
    return _NUMBER * count


def working_bytes(options: Options, tokens: int) -> int:
    """About what one rank takes besides its weights, with micro-batches of so many tokens."""
    shape = options.shape()
    return _PROCESS + _NUMBER * _AT_ONCE * tokens * shape.heads * shape.head_dim // options.tp_size


def _layer(shape: Shape, layer: int, tp: int) -> int:
    """Numbers among a layer's weights on one rank: as ``kda``, ``mla`` and ``moe`` make them, two reads beside."""
    hidden, width = shape.hidden, shape.heads * shape.head_dim
    if shape.is_mla(layer):
        low = shape.q_lora + shape.kv_lora
        by_head = shape.heads * (shape.head_dim + shape.shared_key_dim) * shape.q_lora + 2 * width * shape.kv_lora
        attention = (low + shape.shared_key_dim) * hidden + low + (by_head + 2 * width * hidden) // tp
    else:
        by_head = (5 * width + shape.heads) * hidden + width * (3 * shape.conv + shape.decay_rank + 1)
        attention = shape.decay_rank * hidden + shape.head_dim + by_head // tp
    if shape.is_dense(layer):
        return attention + 3 * hidden * shape.dense // tp + 4 * hidden
    divided = 3 * (shape.experts * shape.expert * shape.latent + hidden * shape.shared) // tp
    return attention + shape.experts * (hidden + 1) + shape.latent * (2 * hidden + 1) + divided + 4 * hidden
