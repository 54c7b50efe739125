"""The benchmark's JSONL: one line a repeat, with the fields of SGLang's serving benchmark."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from nsysk3.simulate.config import Config

_REPEATS = 3


def write_bench(config: Config, folder: Path, last_ns: int) -> None:
    """Write bench/*.jsonl: the preset's published throughput and TTFT, else what the simulated window implies."""
    folder.mkdir()
    published = dict(config.published)
    rng = np.random.default_rng((config.seed, 5))
    for repeat in range(_REPEATS):
        # Repeats lie around the published median, within its published range of 0.7 %.
        wobble = 1 + float(rng.uniform(0.0005, 0.003)) * (repeat - _REPEATS // 2)
        line = _line(config, published, last_ns, wobble)
        name = f"pp{config.pp}-c{config.concurrency}-r{repeat + 1}"
        (folder / f"{name}.jsonl").write_text(json.dumps(line) + "\n", "utf-8")


def _line(config: Config, published: dict[str, float], last_ns: int, wobble: float) -> dict[str, object]:
    tokens = config.requests * config.prompt_tokens
    window_s = max(last_ns - config.idle_before_ns, 1) / 1e9
    rate = published.get("input_tps", config.forwards * config.chunk_tokens / window_s) * wobble
    seconds = tokens / rate
    ttft = published.get("ttft_p50_s", config.concurrency * config.prompt_tokens / rate) * 1e3 / wobble
    tail = published.get("ttft_p95_s", ttft * 1.08 / 1e3) * 1e3 / wobble
    ttfts = np.interp(np.linspace(0, 1, config.requests), [0, 0.5, 0.95, 1], [0.8 * ttft, ttft, tail, tail * 1.01])
    summary = {
        "mean": float(ttfts.mean()), "median": ttft, "std": float(ttfts.std()), "p90": float(np.quantile(ttfts, 0.9)),
        "p95": tail, "p99": float(ttfts[-1]),
    }  # fmt: skip
    return {
        "tag": config.name, "simulated": config.simulated, "backend": "sglang", "dataset_name": "random-ids",
        "request_rate": "inf", "max_concurrency": config.concurrency, "random_input_len": config.prompt_tokens,
        "random_output_len": 1, "random_range_ratio": 1.0, "duration": seconds, "completed": config.requests,
        "total_input_tokens": tokens, "total_output_tokens": config.requests,
        "request_throughput": config.requests / seconds, "input_throughput": rate,
        "output_throughput": config.requests / seconds, "total_throughput": rate + config.requests / seconds,
        **{f"{name}_{what}_ms": value for what in ("ttft", "e2e_latency") for name, value in summary.items()},
        "concurrency": config.concurrency, "errors": [""] * config.requests,
        "ttfts": [float(value) / 1e3 for value in ttfts], "input_lens": [config.prompt_tokens] * config.requests,
        "output_lens": [1] * config.requests,
    }  # fmt: skip
