"""What a load measured, under the names of SGLang's serving benchmark."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nsysk3.run.files import replacing


@dataclass
class Outcome:
    """One request.  Times in seconds: ``sent_s`` since the load began, ``ttft_s`` and ``latency_s`` since sending."""

    sent_s: float
    input_len: int
    ttft_s: float | None = None
    latency_s: float = 0.0
    output_len: int = 0
    itl_s: list[float] = field(default_factory=list)
    cached_tokens: int | None = None
    text: str = ""
    error: str = ""


@dataclass(frozen=True)
class LoadResult:
    """One load.  ``record`` is one line of SGLang's JSONL with its details, and what nsysk3 adds to it."""

    record: dict[str, Any]
    output: str = ""
    """What another program that ran the load printed."""

    @property
    def completed(self) -> int:
        """Requests that got all their tokens."""
        return int(self.record["completed"])

    @property
    def errors(self) -> list[str]:
        """Why the others did not, one text each."""
        return [str(error) for error in self.record.get("errors") or () if error]

    @property
    def input_tps(self) -> float | None:
        """Prompt tokens of completed requests a second of the whole load; None when none completed."""
        value = self.record.get("input_throughput")
        return float(value) if value is not None and self.completed else None

    def write(self, path: Path) -> None:
        """Write the record as one JSON line."""
        with replacing(path) as beside:
            beside.write_text(json.dumps(self.record) + "\n", "utf-8")


def make_record(
    outcomes: Sequence[Outcome],
    *,
    input_len: int,
    output_len: int,
    concurrency: int,
    request_rate: float | None,
    seed: int,
    began_ns: int,
) -> dict[str, Any]:
    """The record of a load; what a load without completed requests cannot know is null.

    ``duration`` is seconds from the first request's sending to the last one's end.  Details are in the order of
    sending, a failed request with output length 0 and a null time to first token.
    """
    good = [each for each in outcomes if not each.error]
    first = min((each.sent_s for each in outcomes), default=0.0)
    duration = max((each.sent_s + each.latency_s for each in outcomes), default=0.0) - first
    inputs = sum(each.input_len for each in good)
    outputs = sum(each.output_len for each in good)
    ttfts = [each.ttft_s for each in good if each.ttft_s is not None]
    record: dict[str, Any] = {
        "tag": None,
        "backend": "sglang",
        "dataset_name": "random-ids",
        "request_rate": request_rate or "inf",
        "max_concurrency": concurrency,
        "sharegpt_output_len": None,
        "random_input_len": input_len,
        "random_output_len": output_len,
        "random_range_ratio": 1.0,
        "server_info": None,
        "duration": duration,
        "completed": len(good),
        "total_input_tokens": inputs,
        "total_input_text_tokens": inputs,
        "total_input_vision_tokens": 0,
        "total_output_tokens": outputs,
        "total_output_tokens_retokenized": None,  # token ids were sent, so nothing is tokenized here
        "request_throughput": _rate(len(good), duration),
        "input_throughput": _rate(inputs, duration),
        "output_throughput": _rate(outputs, duration),
        "total_throughput": _rate(inputs + outputs, duration),
        **_statistics("e2e_latency", [each.latency_s for each in good]),
        **_statistics("ttft", ttfts),
        **_statistics("tpot", [_tpot(each) for each in good if each.output_len > 1]),
        **_statistics("itl", [gap for each in good for gap in each.itl_s]),
        "concurrency": sum(each.latency_s for each in good) / duration if good and duration else None,
        "accept_length": None,
        "max_output_tokens_per_s": _most_tokens_a_second(good, first),
        "max_concurrent_requests": _most_at_once(outcomes),
        "input_lens": [each.input_len for each in outcomes],
        "output_lens": [0 if each.error else each.output_len for each in outcomes],
        "ttfts": [None if each.error else each.ttft_s for each in outcomes],
        "itls": [each.itl_s for each in outcomes],
        "generated_texts": [each.text for each in outcomes],
        "errors": [each.error for each in outcomes],
        # Not SGLang's: when each request was sent and how long it took, for whoever wants to see the load settle.
        "start_times": [each.sent_s for each in outcomes],
        "latencies": [each.latency_s for each in outcomes],
        "cached_tokens": [each.cached_tokens for each in outcomes],
        "seed": seed,
        "began_ns": began_ns,
        "client": "nsysk3",
    }
    return record


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` (0 to 1) of them lie, interpolated as numpy does.  ``values`` is not empty."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * share
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _statistics(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    mean = math.fsum(seconds) / len(seconds) if seconds else None
    values: dict[str, float | None] = {"mean": mean, "median": percentile(seconds, 0.5) if seconds else None}
    values["std"] = (
        None if mean is None else math.sqrt(math.fsum((each - mean) ** 2 for each in seconds) / len(seconds))
    )
    for share in (90, 95, 99):
        values[f"p{share}"] = percentile(seconds, share / 100) if seconds else None
    return {f"{key}_{name}_ms": None if value is None else value * 1000 for key, value in values.items()}


def _rate(count: int, duration: float) -> float | None:
    return count / duration if duration > 0 else None


def _tpot(each: Outcome) -> float:
    return (each.latency_s - (each.ttft_s or 0.0)) / (each.output_len - 1)


def _most_tokens_a_second(good: Sequence[Outcome], first: float) -> float | None:
    seconds: Counter[int] = Counter()
    for each in good:
        at = each.sent_s - first + (each.ttft_s or 0.0)
        for gap in (0.0, *each.itl_s):
            at += gap
            seconds[int(at)] += 1
    return float(max(seconds.values())) if seconds else None


def _most_at_once(outcomes: Sequence[Outcome]) -> int:
    """The largest number of requests that were in flight together."""
    edges = [(each.sent_s, 1) for each in outcomes] + [(each.sent_s + each.latency_s, -1) for each in outcomes]
    now = most = 0
    for _, change in sorted(edges):
        now += change
        most = max(most, now)
    return most
