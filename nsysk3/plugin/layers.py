"""Ranges around the decoder layers of any SGLang model, and around the parts that tell its collectives apart."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from nsysk3.plugin.ranges import Ranges

# SGLang's own layer markers begin so; with the same beginning both name one stack of layers.
ROOT = "model"
_STACKS = ("layers", "h", "blocks")
_OTHER_STACKS = re.compile(r"vision|visual|vit\b|audio|image|video|encoder|projector|mtp|nextn|draft", re.IGNORECASE)
_MISSING = "PPMissingLayer"  # what stands for another stage's layer
_ATTENTION_PARTS = ("self_attn", "linear_attn", "attn", "attention", "mixer")
_MLP_PARTS = ("mlp", "feed_forward", "block_sparse_moe", "moe")
_OUTSIDE = ("embed_tokens", "logits_processor")
# Kimi-K3's classes first; the rest of SGLang's are named much the same.
_ATTENTION = ((r"Delta|KDA", "kda"), (r"MLA", "mla"))
_MLP = ((r"MoE|Moe", "moe"), (r"MLP|Mlp|FeedForward", "dense"))


@dataclass(frozen=True)
class Wrapped:
    """The layers of this stage that got ranges."""

    path: str = ""
    layers: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """``4-7`` as the rank mark says it."""
        return f"{self.layers[0]}-{self.layers[-1]}" if self.layers else "none"


def wrap_layers(model: Any, ranges: Ranges, is_compiling: Callable[[], bool]) -> Wrapped:
    """Hook every decoder layer of ``model`` that this stage holds, and what is in and around them.

    The layers are the longest list of modules called layers, h or blocks outside towers for images, sound or drafts.
    Their numbers are the places in that list, which SGLang fills with placeholders for other stages' layers, so they
    are global.
    """
    named = dict(model.named_modules())
    path = _decoder_stack(named)
    if path is None:
        return Wrapped()
    wrapped = []
    for number, layer in enumerate(named[path]):
        if type(layer).__name__ == _MISSING:
            continue
        _wrap(layer, f"nsysk3.layer {number}{_description(layer)}", ranges, is_compiling)
        for part, module in _children(layer):
            if part in _ATTENTION_PARTS + _MLP_PARTS:
                _wrap(module, f"{ROOT}.{path}.{number}.{part}", ranges, is_compiling)
        wrapped.append(number)
    for name, module in named.items():
        if name.rpartition(".")[2] in _OUTSIDE and not _OTHER_STACKS.search(name):
            _wrap(module, f"{ROOT}.{name}", ranges, is_compiling)
    return Wrapped(path, tuple(wrapped))


def _decoder_stack(named: dict[str, Any]) -> str | None:
    stacks = {
        name: len(module)
        for name, module in named.items()
        if name.rpartition(".")[2] in _STACKS and hasattr(module, "__len__") and not _OTHER_STACKS.search(name)
    }
    outer = {name: size for name, size in stacks.items() if not any(name.startswith(f"{other}.") for other in stacks)}
    return max(outer, key=lambda name: outer[name], default=None)


def _children(module: Any) -> Iterator[tuple[str, Any]]:
    return iter(module.named_children())


def _description(layer: Any) -> str:
    """`` attn=kda mlp=moe bank=write``: Kimi-K3's layers take turns, and those that write the residual bank differ."""
    parts = dict(_children(layer))
    attention = next((parts[name] for name in _ATTENTION_PARTS if name in parts), None)
    mlp = next((parts[name] for name in _MLP_PARTS if name in parts), None)
    said = [("attn", _kind(attention, _ATTENTION)), ("mlp", _kind(mlp, _MLP))]
    if getattr(layer, "is_block_write_layer", False):
        said.append(("bank", "write"))
    return "".join(f" {key}={value}" for key, value in said if value)


def _kind(module: Any, kinds: tuple[tuple[str, str], ...]) -> str:
    if module is None:
        return ""
    name = type(module).__name__
    return next((kind for pattern, kind in kinds if re.search(pattern, name)), name)


def _wrap(module: Any, text: str, ranges: Ranges, is_compiling: Callable[[], bool]) -> None:
    if type(module).__name__ == _MISSING:
        return
    opened: list[bool] = []

    # Tracing compilers take is_compiling as True and leave the rest out of what they compile.
    def enter(*_: Any) -> None:
        if not is_compiling():
            opened.append(ranges.push(text))

    def leave(*_: Any) -> None:
        if not is_compiling() and opened and opened.pop():
            ranges.pop()

    module.register_forward_pre_hook(enter, prepend=True)
    module.register_forward_hook(leave, always_call=True)  # also when the module raises
