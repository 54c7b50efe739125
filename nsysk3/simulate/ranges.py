"""NVTX ranges: SGLang's layer markers around launches, and NCCL's own ranges with their payloads."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from nsysk3.simulate.config import Config
from nsysk3.simulate.layers import Slots, forward_slots

Ints = NDArray[np.int64]

NCCL_DOMAIN = 1
_SCHEMA_BASE = 2**24
# Entry types of NVTX payloads: u64, size_t, i32; the reduction enum's number is that of NCCL 2.28.9.
_U64, _SIZE, _I32, _OPERATIONS = 18, 22, 5, _SCHEMA_BASE + 20
SCHEMAS = {
    "ncclAllGather": (_SCHEMA_BASE + 4, (("NCCL communicator ID", _U64, None), ("Message size [bytes]", _SIZE, 8))),
    "ncclAllReduce": (
        _SCHEMA_BASE + 5,
        (("NCCL communicator ID", _U64, None), ("Message size [bytes]", _SIZE, 8), ("Reduction operation", _OPERATIONS, 16)),  # noqa: E501
    ),
    "ncclReduceScatter": (
        _SCHEMA_BASE + 7,
        (("NCCL communicator ID", _U64, None), ("Message size [bytes]", _SIZE, 8), ("Reduction operation", _OPERATIONS, 16)),  # noqa: E501
    ),
    "ncclSend": (
        _SCHEMA_BASE + 9,
        (("NCCL communicator ID", _U64, None), ("Message size [bytes]", _SIZE, 8), ("Peer rank", _I32, 16)),
    ),
    "ncclRecv": (
        _SCHEMA_BASE + 10,
        (("NCCL communicator ID", _U64, None), ("Message size [bytes]", _SIZE, 8), ("Peer rank", _I32, 16)),
    ),
}  # fmt: skip
OPERATIONS = ("Sum", "Product", "Max", "Min", "Avg")
_HEADER_BYTES = 32
_MODEL = "model.language_model"
_DEEPEST = 5


def payload_bytes(call: str) -> int:
    """Size of a call's payload without the header."""
    return 16 if len(SCHEMAS[call][1]) == 2 else 24


def payload(call: str, communicator: int, size: int, peer: int = 0) -> bytes:
    """A call's payload as an export with blobs holds it: Nsight's header, then NCCL's structure."""
    length = payload_bytes(call)
    head = struct.pack("<QIIQQ", NCCL_DOMAIN, SCHEMAS[call][0], 0, length, _HEADER_BYTES)
    return head + struct.pack("<QQii", communicator, size, peer, 0)[:length]


def communicator_id(*parts: object) -> int:
    """A number that the members of one communicator agree on."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little")


@dataclass(frozen=True)
class LayerRanges:
    """Ranges of one forward: text, and the slots whose launches they open before and close after."""

    texts: tuple[str, ...]
    first: Ints
    last: Ints
    depth: Ints

    def times(self, launch: Ints, api_ns: int) -> tuple[Ints, Ints]:
        """Start and end on the host, [rank, range]; outer ranges lie around inner ones."""
        margin = 200 + 400 * (_DEEPEST - self.depth)
        return launch[:, self.first] - margin, launch[:, self.last] + api_ns + margin


@lru_cache(maxsize=256)
def layer_ranges(config: Config, stage: int) -> LayerRanges:
    """The module ranges that SGLang's layerwise markers put around a forward of a stage."""
    slots = forward_slots(config, stage)
    open_at: dict[tuple[str, ...], int] = {}
    found: list[tuple[tuple[str, ...], int, int]] = []
    for slot in range(len(slots) + 1):
        path = _path(slots, slot) if slot < len(slots) else ()
        for inner in [known for known in open_at if known != path[: len(known)]]:
            found.append((inner, open_at.pop(inner), slot - 1))
        for length in range(1, len(path) + 1):
            open_at.setdefault(path[:length], slot)
    found.sort(key=lambda each: (each[1], len(each[0])))
    return LayerRanges(
        tuple(_text(config, path) for path, _, _ in found),
        np.array([first for _, first, _ in found], np.int64),
        np.array([last for _, _, last in found], np.int64),
        np.array([len(path) - 1 for path, _, _ in found], np.int64),
    )


def _path(slots: Slots, slot: int) -> tuple[str, ...]:
    """Nested module names around a launch, outermost first."""
    module, layer = slots.modules[slot], int(slots.layer[slot])
    if layer >= 0:
        parts = [_MODEL, f"{_MODEL}.model", f"{_MODEL}.model.layers.{layer}"]
        names = module.split(".") if module else []
        # Children of self_attn and mlp are ranges of their own inside them.
        if names:
            parts.append(f"{parts[2]}.{names[0]}")
        if len(names) > 1:
            parts.append(f"{parts[2]}.{module}")
        return tuple(parts)
    if module is None:
        return ()
    return (_MODEL, f"{_MODEL}.{module}") if module == "logits_processor" else (f"{_MODEL}.model.{module}",)


def _text(config: Config, path: tuple[str, ...]) -> str:
    """A Python dict, as SGLang formats its markers; modules called with keywords have no inputs."""
    name = path[-1]
    leaf = name.rsplit(".", 1)[-1]
    width = _WIDTHS.get(leaf, config.model.hidden)
    marker: dict[str, object] = {"Module": name}
    if leaf in _WEIGHTS:
        marker["TrainableParams"] = {"weight": [width, config.model.hidden]}
    if leaf == "model":
        marker["Inputs"] = [[config.chunk_tokens]]
    elif leaf == "mlp" or leaf in _WEIGHTS:
        marker["Inputs"] = [[config.chunk_tokens, config.model.hidden]]
    return repr(marker)


_WIDTHS = {"o_proj": 7168, "routed_expert_up_proj": 7168}
_WEIGHTS = {
    "o_proj", "fused_qkvg_proj", "q_b_proj", "kv_b_proj", "g_proj", "gate_up_proj", "down_proj", "input_layernorm",
    "post_attention_layernorm", "routed_expert_norm", "routed_expert_up_proj",
}  # fmt: skip
