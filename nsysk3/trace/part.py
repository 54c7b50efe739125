"""One report, read: its GPU work, its NCCL calls, and what it says about itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl

from nsysk3.errors import InputError
from nsysk3.run.files import unfinished_beside
from nsysk3.run.inputs import REPORT_SUFFIX
from nsysk3.trace.events import GpuEvents, read_gpu_events
from nsysk3.trace.facts import ReportFacts, facts_of
from nsysk3.trace.identity import Rank
from nsysk3.trace.launches import read_launches, with_launches
from nsysk3.trace.nccl import payloads_exported, read_nccl_calls, shared_work
from nsysk3.trace.nsys import Nsys, cached_export, export_report, find_nsys
from nsysk3.trace.report import Report, open_report, pid_of

Progress = Callable[[str], None]

# Notes are read; result.json has them all.
_DIAGNOSTICS_SHOWN = 5


@dataclass(frozen=True)
class Seen:
    """What one report adds to the picture of the run, without its rows.

    ``places``: the (process, GPU) pairs that worked, in order; ``names``: ``name_id``, ``short_name``, ``name`` of its
    kernels; ``inits``: ``pid``, ``rank``, ``nranks`` of its ncclCommInitRank calls; ``sizes``: ``comm``, ``nranks`` of
    the communicators that its payloads tell the size of; ``shared``: see shared_work; ``dropped``: GPU rows left out.
    """

    facts: ReportFacts
    places: tuple[Rank, ...]
    names: pl.DataFrame
    inits: pl.DataFrame
    sizes: pl.DataFrame
    shared: pl.DataFrame
    dropped: int
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Part:
    """One report's rows.

    ``events``: read_gpu_events's with the launch (``tid``, ``api_start``, ``api_end``); ``calls``: read_nccl_calls's.
    """

    seen: Seen
    events: pl.DataFrame
    calls: pl.DataFrame

    def slices(self, ranks: pl.DataFrame, names: pl.Series) -> list[tuple[int, pl.DataFrame]]:
        """The events of each rank, in rank order, with ``rank`` and ``report`` in place of process and GPU.

        ``ranks``: rows of Roster.ranks of this report; ``names``: the run's name_id of each of its own.
        """
        place = {
            (-1 if pid is None else pid, device): (rank, report)
            for rank, report, pid, device in ranks.select("rank", "report", "pid", "device_id").iter_rows()
        }
        # Events are in order already, place by place.
        pid, device = (self.events[name].fill_null(-1).to_numpy() for name in ("pid", "device_id"))
        bounds = [0, *(np.flatnonzero(np.diff(pid) | np.diff(device)) + 1).tolist(), self.events.height]
        frame = self.events.with_columns(names.gather(self.events["name_id"]).alias("name_id")).drop("pid", "device_id")
        found = []
        for low, high in pairwise(bounds):
            rank, report = place.get((pid[low], device[low]), (None, 0)) if high > low else (None, 0)
            if rank is not None:
                whose = (pl.lit(rank, pl.Int32).alias("rank"), pl.lit(report, pl.Int64).alias("report"))
                found.append((rank, frame.slice(low, high - low).with_columns(whose)))
        return sorted(found, key=lambda pair: pair[0])


class Tool:
    """Finds nsys once, and only when a report needs it."""

    def __init__(self, explicit: str | Path | None) -> None:
        self._explicit = explicit
        self._found: Nsys | None = None

    def get(self) -> Nsys:
        """The nsys; raises MissingToolError."""
        if self._found is None:
            self._found = find_nsys(self._explicit)
        return self._found


def open_trace(
    path: Path,
    name: str,
    host: str | None,
    tool: Tool,
    *,
    shown_as: Path | None = None,
    progress: Progress | None = None,
) -> Report:
    """Open an export, or the export of an ``.nsys-rep``, which is made where there is none.  Raises NsysK3Error."""
    shown = shown_as or path
    if path.name.lower().endswith(REPORT_SUFFIX):
        # A good export of this very report needs no nsys at all.
        path = cached_export(path) or export_report(path, tool.get(), progress=progress)
    return open_report(path, name, host, shown_as=shown)


def read_part(report: Report, shown_as: str | None = None) -> Part:
    """Read one report; ``shown_as``: how it is to be called.  Raises InputError for one without GPU work."""
    gpu = read_gpu_events(report)
    places = _places(report, gpu)
    if not places:
        raise InputError(_why_empty(report, gpu.dropped))
    launches = read_launches(report)
    events = with_launches(gpu.frame, launches)
    calls = read_nccl_calls(report)
    notes = _notes(report, events, gpu.dropped)
    notes += _missing_workers(report, events, calls, set(launches["pid"].unique().to_list())) + _said(report, events)
    inits = calls.filter(pl.col("op").str.starts_with("ncclCommInitRank"))
    inits = inits.select(pid_of(pl.col("tid")).alias("pid"), "rank", "nranks")
    sizes = calls.select("comm", "nranks").drop_nulls().unique()
    facts, shared = facts_of(report, shown_as), shared_work(calls)
    seen = Seen(facts, tuple(places), gpu.names, inits, sizes, shared, gpu.dropped, tuple(notes))
    return Part(seen, events, calls)


def _places(report: Report, gpu: GpuEvents) -> list[Rank]:
    """The (process, GPU) pairs that ran kernels or graphs; copies alone (a launcher's set-up) make no rank."""
    worked = gpu.frame.select("pid", "device_id").filter(gpu.frame["kind"] != "copy").unique()
    exact = worked.join(report.devices, on=["pid", "device_id"], how="left")
    whole = report.devices.filter(pl.col("pid").is_null()).drop("pid")
    rows = exact.join(whole, on="device_id", how="left", suffix="_any").select(
        "pid",
        "device_id",
        pl.coalesce("gpu_uuid", "gpu_uuid_any"),
        pl.coalesce("gpu_name", "gpu_name_any"),
    )
    return [
        Rank(0, report.name, report.host, pid, device, uuid, name)
        for pid, device, uuid, name in rows.sort("pid", "device_id").iter_rows()
    ]


def _why_empty(report: Report, dropped: int) -> str:
    known = (
        "CUPTI_ACTIVITY_KIND_KERNEL",
        "NVTX_EVENTS",
        "ANALYSIS_DETAILS",
        "TARGET_INFO_SESSION_START_TIME",
        "StringIds",
    )
    if not any(report.source.columns(table) for table in known):
        return f"{report.path}: not an Nsight Systems export (none of its tables is here)"
    if dropped:
        return f"{report.path}: damaged: none of its {dropped} GPU rows has a time and a GPU; export the report again"
    said = next((" ".join(d.text.split()) for d in report.diagnostics if "CUDA" in d.text), None)
    detail = f'; Nsight said "{said}"' if said else ""
    return (
        f"{report.path}: no GPU work in this trace{detail}; capture with `nsys profile -t cuda,nvtx "
        "--trace-fork-before-exec=true` and let the window hold the work"
    )


def _notes(report: Report, events: pl.DataFrame, dropped: int) -> list[str]:
    found = []
    if report.clock == "none":
        found.append(f"{report.name}: the export has no session start time, so it cannot be placed on UTC")
    if dropped:
        found.append(f"{report.name}: {dropped} GPU rows dropped (no time or GPU, or a time that cannot be)")
    if not payloads_exported(report):
        found.append(
            f"{report.name}: NCCL payloads were not exported (communicators and bytes unknown); "
            "export with `nsys export --include-blobs=true`"
        )
    found += [
        f"{report.name}: {beside.name} lies beside the file, left by a writer that did not finish; it was not merged, "
        "so rows may be missing or half changed: export the report again"
        for beside in unfinished_beside(report.path)
        if beside.stat().st_size
    ]
    if events["api_end"].null_count() == events.height:
        found.append(f"{report.name}: no CUDA API calls in the export, so idle time is not told apart by late launches")
    return found


def _said(report: Report, events: pl.DataFrame) -> list[str]:
    found = []
    said = [" ".join(diagnostic.text.split()) for diagnostic in report.diagnostics if diagnostic.matters]
    found += [f"{report.name}: Nsight said {text!r}" for text in said[:_DIAGNOSTICS_SHOWN]]
    if (events["kind"] == "graph").any():
        found.append(
            f"{report.name}: CUDA graphs were traced as a whole, so their kernels are unknown; "
            "capture with `--cuda-graph-trace=node`"
        )
    return found


def _missing_workers(report: Report, events: pl.DataFrame, calls: pl.DataFrame, launching: set[int]) -> list[str]:
    """Processes that plainly used CUDA or NCCL, and GPUs that were opened, without one kernel in the trace."""
    worked = set(events["pid"].drop_nulls().unique().to_list())
    pids = set(launching)
    pids |= set(calls.select(pid_of(pl.col("tid")))["tid"].drop_nulls().unique().to_list())
    found = []
    if pids - worked:
        shown = ", ".join(str(pid) for pid in sorted(pids - worked))
        found.append(
            f"{report.name}: processes {shown} launched GPU or NCCL work but have no kernels in the trace; "
            "capture with `--trace-fork-before-exec=true` and let every worker end before the capture is closed"
        )
    opened = report.devices.filter(pl.col("pid").is_not_null())
    used = set(events["device_id"].unique().to_list())
    idle = sorted(set(opened["device_id"].drop_nulls().to_list()) - used)
    lost = sorted(set(opened["pid"].to_list()) - worked - pids)
    if idle and lost:
        found.append(
            f"{report.name}: GPUs {', '.join(map(str, idle))} were opened by processes without kernels "
            f"({', '.join(map(str, lost))}); if those are workers, capture with `--trace-fork-before-exec=true`"
        )
    return found
