"""Sizes of the model: Kimi-K3's, and smaller ones of the same build."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nsysk3.errors import InputError


@dataclass(frozen=True)
class Shape:
    """Sizes of a K3-shaped model; every layer but the first is a mixture of experts."""

    layers: int
    hidden: int
    heads: int
    head_dim: int  # of KDA's keys and values, MLA's values and the part of its keys that differs by head
    shared_key_dim: int  # the part of MLA's keys that all heads share
    q_lora: int
    kv_lora: int
    dense: int  # width of the first layer's MLP
    experts: int
    top_k: int
    expert: int  # width of one expert
    latent: int  # what experts read and write
    shared: int  # width of the shared experts together
    block: int  # layers between two writes to the attention-residual bank
    vocab: int
    context: int  # longest prompt and answer together
    decay_rank: int = 128
    conv: int = 4  # taps of KDA's convolution
    eps: float = 1e-5
    routed_scale: float = 1.0

    def is_mla(self, layer: int) -> bool:
        """Full attention in every 4th layer and in the last; KDA in the others."""
        return layer % 4 == 3 or layer == self.layers - 1

    def is_dense(self, layer: int) -> bool:
        """The first layer has no experts."""
        return layer == 0

    def bank_rows(self, end_layer: int) -> int:
        """Rows of the bank that are written once the layers before ``end_layer`` have run."""
        return -(-end_layer // self.block)

    def stage(self, stage: int, stages: int) -> range:
        """Layers of a pipeline stage, divided as SGLang does: those left over go to the last stages."""
        each, more = divmod(self.layers, stages)
        first_longer = stages - more
        start = stage * each + max(stage - first_longer, 0)
        return range(start, start + each + (stage >= first_longer))


SCALES = {
    # For CPUs: a few milliseconds a layer and chunk of 64 tokens.
    "small": Shape(
        layers=8, hidden=256, heads=8, head_dim=32, shared_key_dim=16, q_lora=64, kv_lora=64, dense=512, experts=8,
        top_k=2, expert=128, latent=128, shared=256, block=2, vocab=32_768, context=65_536, decay_rank=32,
    ),
    # K3's widths, few layers and experts: about 16 GB in bfloat16, so that one GPU holds a stage with room to spare.
    "medium": Shape(
        layers=8, hidden=7168, heads=96, head_dim=128, shared_key_dim=64, q_lora=1536, kv_lora=512, dense=18_432,
        experts=32, top_k=8, expert=1536, latent=3584, shared=3072, block=4, vocab=32_768, context=262_144,
    ),
    # All of K3's sizes: 59 GB of experts a layer in bfloat16, so --layers chooses what fits.
    "k3": Shape(
        layers=93, hidden=7168, heads=96, head_dim=128, shared_key_dim=64, q_lora=1536, kv_lora=512, dense=33_792,
        experts=896, top_k=16, expert=3072, latent=3584, shared=6144, block=12, vocab=163_840, context=1_048_576,
    ),
}  # fmt: skip


def make_shape(scale: str, layers: int | None = None, block: int | None = None) -> Shape:
    """The shape of a scale, with another number of layers or another block of the attention residual.

    Raises InputError when there is no such scale or a number is below 1.
    """
    if scale not in SCALES:
        raise InputError(f"--scale {scale}: one of {', '.join(SCALES)}")
    for name, value in (("--layers", layers), ("--attn-res-block-size", block)):
        if value is not None and value < 1:
            raise InputError(f"{name} {value}: must be at least 1")
    shape = SCALES[scale]
    return replace(shape, layers=layers or shape.layers, block=block or shape.block)
