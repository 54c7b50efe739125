"""What ``/server_info`` and ``/model_info`` say, under SGLang's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from nsysk3 import __version__
from nsysk3.workload.options import Options
from nsysk3.workload.shape import Shape

MODEL = "nsysk3-k3-shaped"
GIB = 1 << 30
# SGLang's options that have one value here; None for what has no meaning.
_FIXED: dict[str, Any] = {
    "model_path": MODEL, "served_model_name": MODEL, "load_format": "dummy", "tokenizer_path": None,
    "skip_tokenizer_init": True, "moe_runner_backend": "torch", "moe_a2a_backend": "none", "moe_dp_size": 1,
    "attention_backend": "torch", "attn_dp_size": 1, "disable_radix_cache": True, "disable_custom_all_reduce": True,
    "disable_overlap_schedule": False, "mem_fraction_static": None, "max_prefill_tokens": None, "page_size": 1,
}  # fmt: skip


def model_information(options: Options, shape: Shape) -> dict[str, Any]:
    """Of the model, its sizes among it."""
    return {
        "model_path": MODEL, "served_model_name": MODEL, "tokenizer_path": None, "is_generation": True,
        "load_format": "dummy", "model_type": "nsysk3_k3_shaped", "scale": options.scale, "shape": asdict(shape),
    }  # fmt: skip


def server_information(
    options: Options, shape: Shape, ranks: Sequence[dict[str, Any]], launch_command: str, startup_s: float | None
) -> dict[str, Any]:
    """Resolved options, flat; ``internal_states[0]`` holds what came of them.

    ``ranks``: what each rank says of itself.  Memory in ``memory_usage`` is in GiB and the largest of any rank, as
    SGLang has it; ``ranks`` has bytes.
    """
    device = ranks[0]["device"] if ranks else None
    given = {name: value for name, value in options.document().items() if not name.startswith("imbalance")}
    passes = [[rank["layers"], rank["layer_passes"]] for rank in ranks if rank["tp"] == 0]
    return {
        **_FIXED,
        **given,
        "device": device,
        "dtype": ranks[0]["dtype"] if ranks else None,
        "context_length": shape.context,
        "max_total_num_tokens": None,  # memory is taken as requests come
        "pp_max_micro_batch_size": options.micro_batch_requests,
        "imbalance": None
        if options.imbalance_factor == 1
        else {"stage": options.imbalance_stage, "factor": options.imbalance_factor},
        "launch_command": launch_command,
        "startup_time": startup_s,
        "version": __version__,
        "engine": "nsysk3.workload",
        "internal_states": [
            {
                "pp_max_micro_batch_size": options.micro_batch_requests,
                "world_size": options.world_size,
                "effective_max_running_requests_per_dp": options.max_running_requests,
                "micro_batches_under_way": options.depth,
                "layers_and_passes_of_stages": passes,
                "memory_usage": {
                    "weight": _largest(ranks, "weight_bytes"),
                    "allocated": _largest(ranks, "allocated_bytes"),
                    "peak": _largest(ranks, "peak_bytes"),
                    "reserved": _largest(ranks, "reserved_bytes"),
                },
                "ranks": [{key: value for key, value in rank.items() if key != "kind"} for rank in ranks],
            }
        ],
    }


def _largest(ranks: Sequence[dict[str, Any]], name: str) -> float | None:
    """GiB; None where no rank can tell."""
    known = [rank[name] for rank in ranks if rank.get(name) is not None]
    return round(max(known) / GIB, 3) if known else None
