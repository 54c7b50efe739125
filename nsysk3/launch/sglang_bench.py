"""The load by SGLang's own serving benchmark, where the server's Python is: on the first host or in its container."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from nsysk3.errors import RunFailedError
from nsysk3.launch.load_record import LoadResult
from nsysk3.launch.service import Service

if TYPE_CHECKING:
    from nsysk3.launch.window import Flow

# Its name since 0.5.16 or so, and before.
MODULES = ("sglang.benchmark.serving", "sglang.bench_serving")
_NOT_THERE = ("No module named", "ModuleNotFoundError")


def run_sglang_bench(
    service: Service, *, requests: int, concurrency: int, seed: int, flow: Flow | None = None
) -> LoadResult:
    """Run it against a healthy server and return its record, with details.

    It tells nothing while it runs, so ``flow`` learns of finished requests from the server's log.  Raises
    RunFailedError when it is not installed there or fails; it needs a tokenizer, which not every model folder has.
    """
    load = service.plan.settings.load
    limit = load.request_timeout_s * math.ceil(requests / concurrency)
    arguments = [
        "--backend", "sglang", "--base-url", service.url_on_first_host, "--dataset-name", "random-ids",
        "--random-input-len", f"{load.input_len}", "--random-output-len", f"{load.output_len}",
        "--random-range-ratio", "1.0", "--max-concurrency", f"{concurrency}", "--num-prompts", f"{requests}",
        "--seed", f"{seed}", "--warmup-requests", "0", "--output-details", "--disable-tqdm",
        "--output-file", "/dev/stdout",
    ]  # fmt: skip
    if flow:
        chunks, since = math.ceil(load.input_len / load.chunk), service.mark()[0]
        flow.count = lambda: service.prefills(since) // chunks
    said = ""
    for module in MODULES:
        done = service.run_beside([service.plan.settings.server.python, "-m", module, *arguments], limit)
        if record := _record(done.out):
            return LoadResult(record | {"client": module, "seed": seed}, output=_without_record(done.out + done.err))
        said = (done.err.strip() or done.out.strip() or f"exit code {done.code}").splitlines()[-1]
        if not any(words in done.err for words in _NOT_THERE):
            break
    raise RunFailedError(
        f'SGLang\'s benchmark did not run on {service.plan.nodes[0].host}: {said[:300]}; use [load] client = "builtin"'
    )


def _record(output: str) -> dict[str, Any] | None:
    """The line of JSON that it appends to its output file, among what it prints."""
    for line in reversed(output.splitlines()):
        if line.startswith("{") and '"completed"' in line:
            document = json.loads(line)
            return document if isinstance(document, dict) else None
    return None


def _without_record(output: str) -> str:
    return "\n".join(line for line in output.splitlines() if not line.startswith("{"))
