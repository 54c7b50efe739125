"""The loads of a run: warm-up, the same requests without and with the capture, each kept as one JSONL and one log."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nsysk3.errors import RunFailedError
from nsysk3.launch.load import run_load
from nsysk3.launch.load_record import LoadResult
from nsysk3.launch.plan import Plan
from nsysk3.launch.service import Service
from nsysk3.launch.sglang_bench import run_sglang_bench
from nsysk3.launch.window import Flow
from nsysk3.run.files import write_text

TELL_EVERY_S = 20.0
# Prompts differ between the loads of a run, or a prefix cache would answer the second.
_SEEDS = {"warmup": 7919, "baseline": 104_729, "window": 0, "plain": 104_729}


class Loads:
    """Runs the loads of a plan against its server and keeps what they measured in ``bench/``."""

    def __init__(self, plan: Plan, out: Path, say: Callable[[str], None]) -> None:
        self.plan = plan
        self._folder = out / "bench"
        self._say = say
        self._results: dict[str, LoadResult] = {}

    @property
    def steady_after(self) -> int:
        """Requests after which the load is steady: a whole wave, so that others are queued behind those that run."""
        load = self.plan.settings.load
        return max(1, min(load.concurrency, self.plan.requests // 3))

    def record(self, name: str) -> dict[str, Any] | None:
        """The record of a load that was run, else None."""
        return self._results[name].record if name in self._results else None

    def summary(self) -> list[dict[str, Any]]:
        """What each load came to, for the manifest."""
        names = ("completed", "duration", "input_throughput", "median_ttft_ms", "p95_ttft_ms")
        return [
            {"name": name, "file": f"bench/{name}.jsonl", "errors": len(result.errors)}
            | {field: result.record.get(field) for field in names}
            for name, result in self._results.items()
        ]

    def notes(self) -> list[str]:
        """What a reader of the loads' numbers must know."""
        return [said for name, result in self._results.items() if (said := failed(f"{name} load", result))]

    def warm_up(self, service: Service) -> None:
        """Let the server compile and fill its pools; raises RunFailedError when no request succeeds."""
        load = self.plan.settings.load
        self._say(f"warming up with {load.warmup} requests")
        result = self._send(service, "warmup", load.warmup, min(load.concurrency, load.warmup))
        self._check(service, "warm-up", result)
        self._warn("warm-up", result)

    def run(self, service: Service, name: str) -> LoadResult:
        """One load with the capture closed, kept under its name."""
        result = self._send(service, name, self.plan.requests, self.plan.settings.load.concurrency)
        self.keep(name, result)
        self._check(service, f"{name} load", result)
        return result

    def profiled(self, service: Service) -> Callable[[Flow], LoadResult]:
        """The load that the capture is opened in, for ``window.capture``."""
        return lambda flow: self._send(service, "window", self.plan.requests, self.plan.settings.load.concurrency, flow)

    def keep(self, name: str, result: LoadResult) -> None:
        """Write what a load measured, and tell it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._results[name] = result
        result.write(self._folder / f"{name}.jsonl")
        text = told(name, result)
        write_text(self._folder / f"{name}.log", "\n".join([text, *result.errors, result.output]).rstrip() + "\n")
        self._say(text)
        self._warn(f"{name} load", result)

    def _send(
        self, service: Service, name: str, requests: int, concurrency: int, flow: Flow | None = None
    ) -> LoadResult:
        load = self.plan.settings.load
        lost = flow.lost if flow else service.lost
        seed = load.seed + _SEEDS[name]
        if load.client == "sglang" and name != "warmup":
            return run_sglang_bench(service, requests=requests, concurrency=concurrency, seed=seed, flow=flow)
        last = time.monotonic()

        def on_done(count: int) -> None:
            nonlocal last
            if flow:
                flow.on_done(count)
            if time.monotonic() - last > TELL_EVERY_S:
                last = time.monotonic()
                self._say(f"{name} load: {count} of {requests} requests")

        return run_load(
            service.url,
            input_len=load.input_len,
            output_len=load.output_len,
            concurrency=concurrency,
            requests=requests,
            seed=seed,
            timeout_s=load.request_timeout_s,
            stop=(lambda: flow.enough) if flow else None,
            on_done=on_done,
            lost=lost,
        )

    def _check(self, service: Service, what: str, result: LoadResult) -> None:
        """Raises when the server died, or answered nothing."""
        if failure := service.gone() if result.errors else service.failure():
            raise service.failed(failure, f"died in the {what}")
        if not result.completed:
            first = result.errors[0] if result.errors else "no reason given"
            raise RunFailedError(
                f"{what}: none of {len(result.record['errors'])} requests was answered: {first}; see the server's log"
            )

    def _warn(self, what: str, result: LoadResult) -> None:
        if said := failed(what, result):
            self._say(f"WARNING: {said}")


def failed(what: str, result: LoadResult) -> str | None:
    """How many requests of a load failed, as one line; None where none did."""
    errors, sent = result.errors, result.completed + len(result.errors)
    return f"{what}: {len(errors)} of {sent} requests failed, the first: {errors[0]}" if errors else None


def told(name: str, result: LoadResult) -> str:
    """A load as one line."""
    record = result.record
    total = result.completed + len(result.errors)
    rate = "no throughput" if result.input_tps is None else f"{result.input_tps:,.0f} input tokens/s"
    ttft, late = record.get("median_ttft_ms"), record.get("p95_ttft_ms")
    first = "" if ttft is None or late is None else f", TTFT p50 {ttft / 1000:.3g} s, p95 {late / 1000:.3g} s"
    took = record.get("duration")
    lasted = "" if took is None or not math.isfinite(took) else f" in {took:.1f} s"
    return f"{name} load: {result.completed}/{total} requests{lasted}, {rate}{first}"
