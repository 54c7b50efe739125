"""The Chrome JSON trace, held against the rules of the format."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from command import run
from conftest import FIXTURES
from report_runs import PP2

from nsysk3.analysis.cross import cross_rank
from nsysk3.analysis.roles import assign_roles
from nsysk3.classify import RuleSet
from nsysk3.report.perfetto import trace_events
from nsysk3.trace.load import load

Event = dict[str, Any]
TWO_REPORTS = FIXTURES / "h200" / "pp2-two-reports"


@cache
def exported(path: Path) -> list[Event]:
    loaded = load(path)
    named = assign_roles(loaded.events, loaded.names, loaded.nccl_calls, RuleSet.load(None))
    found = cross_rank(named, loaded.ranks, len(loaded.reports))
    return list(trace_events(found.events, loaded.ranks, loaded.names, found.pairs))


def of(events: list[Event], phase: str) -> list[Event]:
    return [event for event in events if event["ph"] == phase]


@pytest.mark.parametrize("path", [PP2, TWO_REPORTS])
def test_every_event_has_what_its_phase_needs(path: Path) -> None:
    for event in exported(path):
        assert event["ph"] in "XMsf"
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["name"]
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
        if event["ph"] in "sf":
            assert event["id"]
            assert event["ts"] >= 0
        assert event.get("bp") == ("e" if event["ph"] == "f" else None)


@pytest.mark.parametrize("path", [PP2, TWO_REPORTS])
def test_slices_of_one_track_nest(path: Path) -> None:
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in of(exported(path), "X"):
        tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in tracks.values():
        open_until: list[float] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= start + 1e-3:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-3
            open_until.append(end)


@pytest.mark.parametrize("path", [PP2, TWO_REPORTS])
def test_arrows_start_and_end_inside_slices_and_run_forward(path: Path) -> None:
    events = exported(path)
    spans = defaultdict(list)
    for event in of(events, "X"):
        spans[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    starts, ends = ({event["id"]: event for event in of(events, phase)} for phase in "sf")
    assert starts.keys() == ends.keys()
    assert len(starts) > 0
    for arrow in (*starts.values(), *ends.values()):
        assert any(a - 1e-3 <= arrow["ts"] <= b + 1e-3 for a, b in spans[arrow["pid"], arrow["tid"]])
    for number, start in starts.items():
        assert start["pid"] != ends[number]["pid"]
        assert start["ts"] <= ends[number]["ts"]


def test_tracks_are_named_once_and_every_event_is_there() -> None:
    events = exported(PP2)
    named = [(event["name"], event["pid"], event["tid"]) for event in of(events, "M")]
    assert len(named) == len(set(named))
    tracks = {(event["pid"], event["tid"]) for event in of(events, "X")}
    assert tracks <= {(pid, tid) for name, pid, tid in named if name == "thread_name"}
    kernels = [event for event in of(events, "X") if event["cat"] != "wait"]
    loaded = load(PP2)
    assert len(kernels) == loaded.events.height
    spent = (loaded.events["end"] - loaded.events["start"]).sum()
    assert sum(event["dur"] for event in kernels) == pytest.approx(spent / 1e3)


def test_overlapping_kernels_of_a_stream_go_on_tracks_of_their_own() -> None:
    events = pl.DataFrame(
        {"rank": [0] * 4, "stream": [7] * 4, "start": [0, 50, 100, 120], "end": [100, 130, 140, 150],
         "name_id": [0] * 4, "role": ["compute"] * 4}
    )  # fmt: skip
    ranks = pl.DataFrame(
        {"rank": [0], "world_rank": [0], "pp_rank": [None], "tp_rank": [None], "host": ["h"], "device_id": [0]}
    )
    integers = ("send_event", "recv_event", "send_start_utc_ns", "recv_start_utc_ns", "recv_end_utc_ns")
    schema = dict.fromkeys(integers, pl.Int64)
    pairs = pl.DataFrame(schema={**schema, "kind": pl.String})
    names = pl.DataFrame({"name_id": [0], "short_name": ["<b>\u202e"]})
    made = of(list(trace_events(events, ranks, names, pairs)), "X")
    assert sorted((event["ts"], event["tid"]) for event in made) == [(0, 1), (0.05, 2), (0.1, 1), (0.12, 3)]
    assert made[0]["name"] == "<b>‹U+202E›"


def test_command_writes_a_gzipped_trace_whole(tmp_path: Path) -> None:
    out = tmp_path / "trace.json.gz"
    assert run("export-trace", PP2, "--out", out, "-q").code == 0
    with gzip.open(out, "rt") as file:
        document = json.load(file)
    assert document["traceEvents"] == json.loads(json.dumps(exported(PP2)))
    assert [path.name for path in tmp_path.iterdir()] == [out.name]
    assert run("export-trace", PP2, "--out", tmp_path / "no" / "trace.json", "-q").code == 3
