"""What a model's config.json says about how it can be split, and how much memory its weights need."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsysk3.errors import InputError

# Bits of a stored weight by the name of the quantization, scales included; others are not guessed.
_BITS = {"mxfp4": 4.25, "fp8": 8.0, "modelopt_fp4": 4.5, "nvfp4": 4.5}

_ABSURD = 10**8
_MOST_LAYERS = 10_000


@dataclass(frozen=True)
class ModelFacts:
    """The sizes of a model that decide a plan; what its config.json does not say is None or empty."""

    path: str
    layers: int | None
    heads: tuple[int, ...]
    """Every number of attention heads in it: each must be a multiple of TP."""
    experts: int | None
    expert_size: int | None
    """Inner width of an expert."""
    first_bytes: float
    """Weights before the first layer (embedding), as computed from the sizes."""
    last_bytes: float
    """Weights after the last layer (head)."""
    layer_bytes: tuple[float, ...]
    """Weights of each layer; empty where the sizes do not tell."""
    weight_bytes: int | None = None
    """What the weight files hold; None where there are none (random weights)."""

    def check(self, pp: int, tp: int, ep: int) -> None:
        """Raises InputError where the model cannot be split so."""
        if self.layers is not None and self.layers < pp:
            raise InputError(f"--pp {pp}: {self.path} has only {self.layers} layers")
        for heads in self.heads:
            if heads % tp:
                raise InputError(f"--tp {tp}: does not divide the {heads} attention heads of {self.path}")
        if self.experts is not None and self.experts % ep:
            raise InputError(f"--ep {ep}: does not divide the {self.experts} experts of {self.path}")
        if self.expert_size is not None and self.expert_size % (tp // ep):
            raise InputError(
                f"--tp {tp} --ep {ep}: TP/EP = {tp // ep} does not divide the experts' width {self.expert_size} "
                f"of {self.path}"
            )

    def gpu_bytes(self, stages: Sequence[range], tp: int) -> tuple[int, ...]:
        """Weights on each GPU of each stage, bytes, as if all were split by TP; empty where the sizes do not tell.

        The shares of the stages come from the model's sizes, the total from the weight files where there are any.
        """
        computed = sum(self.layer_bytes) + self.first_bytes + self.last_bytes
        if not self.layer_bytes:
            return ()
        scale = self.weight_bytes / computed if self.weight_bytes else 1.0
        found = []
        for number, layers in enumerate(stages):
            own = sum(self.layer_bytes[layer] for layer in layers)
            own += self.first_bytes * (number == 0) + self.last_bytes * (number == len(stages) - 1)
            found.append(round(own * scale / tp))
        return tuple(found)


def read_model(folder: Path) -> ModelFacts | None:
    """The model in a folder of this machine; None where it holds no readable config.json.  No weight is read."""
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        files = [each for each in folder.iterdir() if each.suffix in (".safetensors", ".bin")]
        return model_facts(str(folder), config, sum(each.stat().st_size for each in files) or None)
    except (OSError, ValueError):
        return None


def model_facts(path: str, config: Mapping[str, Any], weight_bytes: int | None) -> ModelFacts:
    """Facts from the content of a config.json; the language model's part of it where it is multimodal."""
    text = config.get("text_config") if isinstance(config.get("text_config"), Mapping) else config
    sizes = _Sizes(text or {})
    layers = min(sizes("num_hidden_layers", "n_layer"), _MOST_LAYERS)
    linear = _Sizes(sizes.section("linear_attn_config"))
    heads = {sizes("num_attention_heads"), linear("num_heads")} - {0}
    quantization = config.get("quantization_config") or sizes.section("quantization_config")
    per_layer, outer = _weights(sizes, linear, layers, _expert_bits(quantization))
    return ModelFacts(
        path=path,
        layers=layers or None,
        heads=tuple(sorted(heads)),
        experts=sizes("num_experts", "n_routed_experts", "num_local_experts") or None,
        expert_size=sizes("moe_intermediate_size") or None,
        first_bytes=outer,
        last_bytes=outer,
        layer_bytes=per_layer,
        weight_bytes=weight_bytes,
    )


class _Sizes:
    """The positive whole numbers of a config by any of their names, 0 where it has none that can be meant."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def __call__(self, *names: str) -> int:
        for name in names:
            value = self._config.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and 0 < value < _ABSURD:
                return value
        return 0

    def section(self, name: str) -> Mapping[str, Any]:
        value = self._config.get(name)
        return value if isinstance(value, Mapping) else {}

    def numbers(self, name: str) -> frozenset[int]:
        value = self._config.get(name)
        return frozenset(each for each in value if isinstance(each, int)) if isinstance(value, list) else frozenset()

    def true(self, name: str) -> bool:
        return self._config.get(name) is True


def _expert_bits(quantization: Any) -> float | None:
    """Bits of an expert's weight; None for a quantization that this does not know."""
    if not isinstance(quantization, Mapping) or not quantization:
        return 16.0
    return _BITS.get(str(quantization.get("quant_method")))


def _weights(sizes: _Sizes, linear: _Sizes, layers: int, expert_bits: float | None) -> tuple[tuple[float, ...], float]:
    """Bytes of every layer and of the embedding (which the head equals)."""
    hidden, vocab = sizes("hidden_size"), sizes("vocab_size")
    if not (layers and hidden and vocab and sizes("num_attention_heads") and expert_bits):
        return (), 0.0
    kda = linear.numbers("kda_layers")  # counted from 1
    experts = sizes("num_experts", "n_routed_experts", "num_local_experts")
    dense_layers = sizes("first_k_dense_replace") if experts else layers
    found = []
    for layer in range(layers):
        attention = _linear_attention(linear, hidden) if layer + 1 in kda else _attention(sizes, hidden)
        if layer < dense_layers or not experts:
            found.append(2.0 * (attention + 3 * hidden * sizes("intermediate_size")))
            continue
        latent = sizes("routed_expert_hidden_size")
        width = sizes("moe_intermediate_size", "intermediate_size")
        routed = experts * 3 * (latent or hidden) * width
        beside = 3 * hidden * width * sizes("num_shared_experts", "n_shared_experts") + hidden * experts
        found.append(2.0 * (attention + beside + 2 * hidden * latent) + routed * expert_bits / 8)
    return tuple(found), 2.0 * vocab * hidden


def _attention(sizes: _Sizes, hidden: int) -> int:
    """Weights of a multi-head layer, with latent (MLA) or plain keys and values."""
    heads = sizes("num_attention_heads")
    if latent := sizes("kv_lora_rank"):
        nope, rope, value = sizes("qk_nope_head_dim"), sizes("qk_rope_head_dim"), sizes("v_head_dim")
        low = sizes("q_lora_rank")
        query = hidden * low + low * heads * (nope + rope) if low else hidden * heads * (nope + rope)
        gate = hidden * heads * value if sizes.true("mla_use_output_gate") else 0
        keys = hidden * (latent + rope) + latent * heads * (nope + value)
        return query + keys + heads * value * hidden + gate
    width = sizes("head_dim") or hidden // heads
    return hidden * width * (2 * heads + 2 * (sizes("num_key_value_heads") or heads))


def _linear_attention(linear: _Sizes, hidden: int) -> int:
    """Weights of a KDA layer: query, key, value, gate and output, and the narrow decay gate."""
    heads, width = linear("num_heads"), linear("head_dim")
    return 5 * hidden * heads * width + hidden * (width + heads) + width * heads * width
