#!/usr/bin/env python3
"""Make a deeper or shallower config of a Kimi-K3 model folder; weights are not read, for servers with random ones.

usage: deepen.py MODEL LAYERS OUT

Writes OUT/config.json: MODEL's with LAYERS layers in the same pattern of linear (KDA) and full attention (MLA).
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

# Rows that the kernels of the attention residual have room for.
MOST_BLOCKS = 8


def deepened(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """The config with another number of layers.  Raises ValueError where its pattern does not go on."""
    made: dict[str, Any] = copy.deepcopy(config)
    text = made.get("text_config") or made  # the language model's part, where it is multimodal
    attention = text["linear_attn_config"]
    full, linear = attention["full_attn_layers"], attention["kda_layers"]  # counted from 1
    every = full[0]
    before = range(1, text["num_hidden_layers"] + 1)
    if full != [layer for layer in before if layer % every == 0] or linear != [n for n in before if n % every]:
        raise ValueError(f"full attention is not in every {every}th of its {len(before)} layers")
    size = text.get("attn_res_block_size")
    if size and -(-layers // size) > MOST_BLOCKS:
        raise ValueError(f"{layers} layers are more than {MOST_BLOCKS} residual blocks of {size}")
    if layers < every:
        raise ValueError(f"{layers} layers hold none with full attention, of which every {every}th is one")
    numbers = range(1, layers + 1)
    text["num_hidden_layers"] = layers
    attention["full_attn_layers"] = [layer for layer in numbers if layer % every == 0]
    attention["kda_layers"] = [layer for layer in numbers if layer % every]
    return made


def main() -> int:
    if len(sys.argv) != 4 or not sys.argv[2].isdecimal():
        sys.exit(__doc__)
    source, layers, out = Path(sys.argv[1]) / "config.json", int(sys.argv[2]), Path(sys.argv[3])
    try:
        made = deepened(json.loads(source.read_text("utf-8")), layers)
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"{source}: {error!r}")
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(made, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
