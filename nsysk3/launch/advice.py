"""What a plan should be told about before it runs: settings that start well and then mislead or fail."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from nsysk3.launch.commands import flag_value, number
from nsysk3.run.config import Settings

# Where the default limits of SGLang were seen to end a start.
_DEEP = 16
_EP_BACKENDS = frozenset(
    {"deepep", "deepep_v2", "mooncake", "nixl", "mori", "ascend_fuseep", "flashinfer", "megamoe", "pplx",
     "flashinfer_megamoe"}
)  # fmt: skip


def spreads_experts(args: Sequence[str]) -> bool:
    """Whether an all-to-all backend is asked for: SGLang then makes EP equal to TP, whatever --ep-size says."""
    return flag_value(args, "--moe-a2a-backend") in _EP_BACKENDS


def warnings(
    settings: Settings, args: Sequence[str], *, pp: int, depth: int, steps: int, requests: int, no_gpu: bool = False
) -> Iterator[str]:
    """What makes the numbers mean something else than they seem to; ``depth`` is --pp-async-batch-depth.

    ``no_gpu``: a trace is to be made of a server without GPUs.
    """
    if no_gpu:
        yield "the server runs without GPUs: the trace will hold no GPU work, and is kept but not analysed"
    concurrency = settings.load.concurrency
    batch = number(args, 0, "--pp-max-micro-batch-size")
    slots = pp + depth
    if batch and pp > 1 and batch * slots < concurrency:
        wait = concurrency - batch * slots
        yield (
            f"--pp-max-micro-batch-size {batch}: each of the pipeline's {slots} slots admits {batch} request"
            f"{'s' * (batch > 1)} at a time, so of C={concurrency} at most {batch * slots} run and {wait} wait in the "
            "queue: TTFT then measures the queue, and no forward holds more than that. SGLang's own value is "
            "max(max_running_requests // PP, 1); leave the option out unless this is what you want to measure"
        )
    elif batch == 1 and pp > 1:
        yield (
            f"--pp-max-micro-batch-size 1: each of the pipeline's {slots} slots admits one request at a time; C above "
            f"{slots} would only wait in the queue. SGLang's own value is max(max_running_requests // PP, 1)"
        )
    running = number(args, 0, "--max-running-requests")
    if running and running < concurrency:
        yield f"--max-running-requests {running} is below C={concurrency}: the other requests wait in the queue"
    forwards = requests * math.ceil(settings.load.input_len / settings.load.chunk)
    if forwards < steps:
        yield f"--requests {requests}: {forwards} prefill forwards, but the window needs {steps}: it will end short"


def notes(settings: Settings, args: Sequence[str], *, pp: int, tp: int, depth: int) -> Iterator[str]:
    """What is good to know of a plan, and needs no change."""
    server, load = settings.server, settings.load
    if server.engine == "sglang" and pp >= _DEEP:
        missing = []
        if not any(
            flag_value(args, name) is not None for name in ("--disable-decode-cuda-graph", "--disable-cuda-graph")
        ):
            missing.append("--disable-decode-cuda-graph (before SGLang 0.5.17: --disable-cuda-graph)")
        if flag_value(args, "--watchdog-timeout") is None:
            missing.append("--watchdog-timeout 3600")
        if missing:
            yield (
                f"PP {pp}: the capture of decode graphs can fail (custom all-reduce IPC) and the warm-up can outlast "
                f"the watchdog's 300 s; where it does, add {' and '.join(missing)}"
            )
    if load.concurrency < pp + depth and load.input_len <= load.chunk:
        yield f"C={load.concurrency} is below the {pp + depth} slots of the pipeline: it cannot be full"
    if load.output_len > 1:
        yield f"--output-len {load.output_len}: the window will hold decode steps too"
    if server.engine == "sglang" and server.sp != "off" and not (spreads_experts(args) and tp > 1):
        yield (
            f"--sp {server.sp}: SGLang shards rows only with an expert-parallel --moe-a2a-backend (deepep, megamoe) "
            "and TP > 1; without, its all-reduces stay and the run will say that it fell back"
        )
    if server.engine == "sglang" and flag_value(args, "--disable-radix-cache") is None:
        yield "no --disable-radix-cache: a repeated prompt would be answered from the cache, not computed"
