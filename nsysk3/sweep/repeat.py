"""One repeat: a load on a running service, checked, and what is kept of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from nsysk3.run.config import Load
from nsysk3.run.files import write_text
from nsysk3.run.words import counted
from nsysk3.sweep.folder import DONE, FAILED, Folder, Repeat
from nsysk3.sweep.job import now
from nsysk3.sweep.matrix import Cell
from nsysk3.sweep.record import make_room

if TYPE_CHECKING:
    from nsysk3.launch.load_record import LoadResult

_SAY_EVERY_S = 15.0


def run_repeat(
    folder: Folder,
    cell: Cell,
    send: Callable[[Callable[[int], None]], LoadResult],
    *,
    requests: int,
    load: Load,
    attempt: int,
    say: Callable[[str], None],
) -> Repeat:
    """Send the load of a repeat and keep its JSON line, its text and its row; it counts if every request came back.

    ``send`` is given a function to call with the number of requests that have ended.
    """
    where = f"C={cell.concurrency} repeat {cell.repeat}"
    started, began = now(), time.monotonic()
    last = began

    def done(count: int) -> None:
        nonlocal last
        if time.monotonic() - last > _SAY_EVERY_S:
            last = time.monotonic()
            say(f"{where}: {count} of {requests} requests after {last - began:.0f} s")

    result = send(done)
    for path in (folder.raw(cell), folder.bench(cell)):
        make_room(path)
    result.write(folder.raw(cell))
    row = repeat_row(result.record, cell, requests=requests, load=load, attempt=attempt, started=started)
    write_text(folder.bench(cell), f"{result.output.rstrip()}\n" if result.output else bench_text(result.record, row))
    folder.keep_results([row])
    if row.status == DONE:
        say(f"{where}: {row.completed} of {requests} requests, {_number(row.input_tps)} input tokens/s, "
            f"TTFT p50 {_seconds(row.ttft_p50_ms)}, p95 {_seconds(row.ttft_p95_ms)}")  # fmt: skip
    else:
        say(f"{where}: does not count: {row.completed} of {requests} requests completed; {row.cause}")
    return row


def repeat_row(
    record: Mapping[str, Any], cell: Cell, *, requests: int, load: Load, attempt: int = 1, started: str | None = None
) -> Repeat:
    """The row of results.csv that a JSON line of a serving benchmark makes; what the line lacks is None."""
    errors = [str(error) for error in record.get("errors") or () if error]
    completed = int(record.get("completed") or 0)
    cause = None
    if errors:
        cause = errors[0]
    elif completed != requests:
        cause = f"{counted(requests - completed, 'request')} did not complete"
    elif not record.get("input_throughput") or _unmeasured(record["input_throughput"]):
        cause = "the benchmark tells no throughput"
    cached = [count for count in record.get("cached_tokens") or () if count is not None]
    layout = cell.layout
    record = {name: None if _unmeasured(value) else value for name, value in record.items()}
    return Repeat(
        layout.pp, layout.tp, layout.ep, cell.concurrency, cell.repeat, FAILED if cause else DONE, requests, completed,
        max(len(errors), requests - completed), record.get("duration"), record.get("input_throughput"),
        record.get("output_throughput"), record.get("mean_ttft_ms"), record.get("median_ttft_ms"),
        _percentile(record, "ttft", 95), _percentile(record, "ttft", 99), record.get("median_e2e_latency_ms"),
        _percentile(record, "e2e_latency", 95), record.get("total_input_tokens"), sum(cached) if cached else None,
        started, attempt, record.get("client") or load.client, f"raw/{cell.name}.jsonl",
        " ".join(cause.split())[:300] if cause else None,
    )  # fmt: skip


def _unmeasured(value: object) -> bool:
    """Benchmarks print NaN or infinity for what they had no request to measure by."""
    return isinstance(value, float) and not math.isfinite(value)


def _percentile(record: Mapping[str, Any], name: str, share: int) -> float | None:
    """As the line tells it; older benchmarks told no p95, then from the single requests where it has them."""
    told = record.get(f"p{share}_{name}_ms")
    if told is not None or name != "ttft":
        return told
    from nsysk3.launch.load_record import percentile

    values = [value for value in record.get("ttfts") or () if value]
    return percentile(values, share / 100) * 1000 if values else None


def bench_text(record: Mapping[str, Any], row: Repeat) -> str:
    """What the built-in client measured, for a reader."""
    pairs = [
        ("Successful requests", row.completed), ("Failed requests", row.errors), ("Concurrency", row.concurrency),
        ("Duration (s)", row.duration_s), ("Total input tokens", row.input_tokens),
        ("Input token throughput (tok/s)", row.input_tps), ("Output token throughput (tok/s)", row.output_tps),
        ("Mean TTFT (ms)", row.ttft_mean_ms), ("Median TTFT (ms)", row.ttft_p50_ms), ("P95 TTFT (ms)", row.ttft_p95_ms),
        ("P99 TTFT (ms)", row.ttft_p99_ms), ("Median E2E latency (ms)", row.e2e_p50_ms),
        ("P95 E2E latency (ms)", row.e2e_p95_ms),
    ]  # fmt: skip
    title = f"{row.layout.label} C={row.concurrency} repeat {row.repeat} ({row.client})"
    lines = [title, "=" * len(title), *(f"{name + ':':<40}{_number(value)}" for name, value in pairs)]
    lines += [f"error: {error}" for error in dict.fromkeys(str(error) for error in record.get("errors") or () if error)]
    return "\n".join(lines) + "\n"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def _seconds(ms: float | None) -> str:
    return "-" if ms is None else f"{ms / 1000:,.3g} s" if ms < 1000 else f"{ms / 1000:,.2f} s"
