"""A run as a Chrome JSON trace, which Perfetto and chrome://tracing open: aligned clocks, flow arrows for P2P."""

from __future__ import annotations

import gzip
import heapq
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl

from nsysk3.report.text import clean
from nsysk3.run.files import replacing

# Microseconds with three decimals keep the nanosecond; counted from the first event a double loses none of it.
_US = 1e3
_STATES = {
    "wait_collective": "wait: last rank", "wait_upstream": "wait: upstream", "wait_downstream": "wait: downstream",
}  # fmt: skip


def trace_events(
    events: pl.DataFrame, ranks: pl.DataFrame, names: pl.DataFrame, pairs: pl.DataFrame
) -> Iterator[dict[str, Any]]:
    """The events of the format, one by one.

    ``events`` are on the common clock (``cross_rank``'s), ``pairs`` its P2P messages with the rows of their two halves.
    One process a rank, one track a stream; where kernels of a stream overlap, as they may with programmatic launches,
    the later goes on a track of its own beside it, for slices of one track must nest.
    """
    numbered = events.with_row_index("event").sort("rank", "stream", "start", "end", "event")
    origin = int(events["start"].min() or 0)  # type: ignore[arg-type]
    tracks: dict[tuple[int, int, int], int] = {}
    place: dict[int, tuple[int, int]] = {}
    wanted = set(pairs["send_event"].to_list()) | set(pairs["recv_event"].to_list())
    texts = {key: clean(value, 300) for key, value in names.select("name_id", "short_name").iter_rows()}
    known = [name for name in ("category", "layer", "forward", "wait_ns", "wait_state") if name in numbered.columns]
    yield from _processes(ranks)
    for (rank, stream), rows in numbered.group_by("rank", "stream", maintain_order=True):
        columns = ["event", "start", "end", "name_id", "role", *known]
        for row, lane in _lanes(rows.select(columns).iter_rows(named=True)):
            key = (int(str(rank)), int(str(stream)), lane)
            if key not in tracks:
                tracks[key] = len(tracks) + 1
                yield from _track(key, tracks[key])
            track = tracks[key]
            if row["event"] in wanted:
                place[row["event"]] = (key[0], track)
            yield from _slices(row, key[0], track, origin, texts)
    yield from _flows(pairs, place, origin)


def write_trace(
    out: str | Path, events: pl.DataFrame, ranks: pl.DataFrame, names: pl.DataFrame, pairs: pl.DataFrame
) -> int:
    """Write the trace, gzipped where the name ends so; the number of events.  Beside and renamed, as all files are."""
    path = Path(out)
    count = 0
    with replacing(path) as beside:
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(beside, "wt", encoding="utf-8") as file:
            file.write('{"displayTimeUnit":"ns","traceEvents":[\n')
            for count, event in enumerate(trace_events(events, ranks, names, pairs), 1):
                file.write(("" if count == 1 else ",\n") + json.dumps(event, ensure_ascii=True, separators=(",", ":")))
            file.write("\n]}\n")
    return count


def _processes(ranks: pl.DataFrame) -> Iterator[dict[str, Any]]:
    columns = ["rank", "world_rank", "pp_rank", "tp_rank", "host", "device_id"]
    for rank, world, pp, tp, host, device in ranks.select(columns).iter_rows():
        labels = [f"{name}{value}" for name, value in (("PP", pp), ("TP", tp)) if value is not None]
        name = " ".join([f"rank {world}", *labels, f"({clean(host, 60)}:{device})"])
        yield _meta("process_name", rank, 0, name=name)
        yield _meta("process_sort_index", rank, 0, sort_index=world)


def _track(key: tuple[int, int, int], track: int) -> Iterator[dict[str, Any]]:
    rank, stream, lane = key
    yield _meta("thread_name", rank, track, name=f"stream {stream}" + (f" ({lane + 1})" if lane else ""))
    yield _meta("thread_sort_index", rank, track, sort_index=track)


def _meta(what: str, rank: int, track: int, **values: object) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": track, "args": values}


def _lanes(rows: Iterator[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], int]]:
    """Each event with the first lane that is free when it starts."""
    busy: list[tuple[int, int]] = []
    free: list[int] = []
    lanes = 0
    for row in rows:
        while busy and busy[0][0] <= row["start"]:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            heapq.heappush(free, lanes)
            lanes += 1
        lane = heapq.heappop(free)
        heapq.heappush(busy, (row["end"], lane))
        yield row, lane


def _slices(row: dict[str, Any], rank: int, track: int, origin: int, texts: dict[int, str]) -> Iterator[dict[str, Any]]:
    args = {
        name: row[name]
        for name in ("category", "layer", "forward", "wait_ns", "wait_state")
        if row.get(name) is not None
    }
    start, spent = row["start"] - origin, row["end"] - row["start"]
    yield {
        "ph": "X", "name": texts.get(row["name_id"], "?"), "cat": str(row["role"]), "pid": rank, "tid": track,
        "ts": start / _US, "dur": spent / _US, "args": args,
    }  # fmt: skip
    # The wait as a slice inside its kernel: seen at a glance, and summed by a query.
    if row.get("wait_ns") and row.get("wait_state") in _STATES:
        yield {
            "ph": "X", "name": _STATES[row["wait_state"]], "cat": "wait", "pid": rank, "tid": track, "ts": start / _US,
            "dur": min(row["wait_ns"], spent) / _US,
        }  # fmt: skip


def _flows(pairs: pl.DataFrame, place: dict[int, tuple[int, int]], origin: int) -> Iterator[dict[str, Any]]:
    """An arrow from each send to its receive; the ends lie inside the slices that they bind to."""
    columns = ["send_event", "recv_event", "send_start_utc_ns", "recv_start_utc_ns", "recv_end_utc_ns", "kind"]
    for number, (send, recv, start, begin, end, kind) in enumerate(pairs.select(columns).iter_rows(), 1):
        if send not in place or recv not in place:
            continue
        for ph, event, at in (("s", send, start), ("f", recv, max(begin, end - 1))):
            rank, track = place[event]
            arrow = {"ph": ph, "id": number, "name": f"P2P {kind}", "cat": "p2p", "pid": rank, "tid": track}
            yield arrow | {"ts": (at - origin) / _US} | ({"bp": "e"} if ph == "f" else {})
