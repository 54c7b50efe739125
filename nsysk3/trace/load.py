"""Load the traces of one run: reports, ranks and GPU work, from whatever the paths hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import itemgetter
from pathlib import Path

import numpy as np
import polars as pl

from nsysk3.errors import InputError, NsysK3Error
from nsysk3.run.inputs import REPORT_SUFFIX, Problem, TraceInput, find_inputs, is_export_dir
from nsysk3.run.manifest import Manifest, read_manifest
from nsysk3.trace.events import GpuEvents, read_gpu_events
from nsysk3.trace.identity import Rank, identify
from nsysk3.trace.launches import read_launches, with_launches
from nsysk3.trace.nccl import payloads_exported, read_nccl_calls
from nsysk3.trace.nsys import Nsys, cached_export, export_report, find_nsys
from nsysk3.trace.report import Report, open_report, pid_of

Progress = Callable[[str], None]

# Notes are read; result.json has them all.
_DIAGNOSTICS_SHOWN = 5


@dataclass(frozen=True)
class Run:
    """Everything the analyses need of one run.

    ``ranks``: one row a rank in rank order: ``rank`` (row number), ``report``, ``report_name``, ``host``, ``pid``,
    ``device_id``, ``gpu_uuid``, ``gpu_name``, ``world_rank``, ``pp_rank``, ``tp_rank``, ``ep_rank``, ``rank_source``,
    ``dropped_rows``.
    ``events``: GPU work sorted by (rank, start, end, stream): see read_gpu_events, with ``rank`` and ``report`` instead
    of pid and device, and the launch (``tid``, ``api_start``, ``api_end``).  ``names``: ``name_id`` to symbol.
    ``nccl_calls``: see read_nccl_calls, with ``report``.  ``problems``: inputs that gave no rank.  ``notes``: what a
    reader of the numbers should know about the inputs.
    """

    paths: tuple[Path, ...]
    run_dir: Path | None
    manifest: Manifest | None
    reports: tuple[Report, ...]
    ranks: pl.DataFrame
    events: pl.DataFrame
    names: pl.DataFrame
    nccl_calls: pl.DataFrame
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]

    @property
    def directory(self) -> Path | None:
        """The directory that the whole run was read from, None when files or exports were named one by one."""
        only = self.paths[0] if len(self.paths) == 1 else None
        return only if only and only.is_dir() and not is_export_dir(only) else None


@dataclass(frozen=True)
class _Loaded:
    report: Report
    gpu: GpuEvents
    calls: pl.DataFrame
    places: list[Rank]
    launching_pids: frozenset[int]


def load(
    paths: str | Path | Sequence[str | Path],
    *,
    nsys: str | Path | None = None,
    ranks: str | Path | None = None,
    progress: Progress | None = None,
) -> Run:
    """Load one run.

    ``paths``: a run directory, a directory of reports or exports, or files.  ``.nsys-rep`` files are exported by the
    user's ``nsys`` (``nsys``, else $NSYSK3_NSYS, else PATH).  ``ranks``: a TOML map that overrides identity.  An input
    that cannot be used becomes a problem and the others go on; InputError is raised when none is left.
    """
    chosen = [Path(paths)] if isinstance(paths, str | Path) else [Path(path) for path in paths]
    inputs = find_inputs(chosen)
    manifest = read_manifest(inputs.run_dir) if inputs.run_dir else None
    problems = list(inputs.problems)
    loaded: list[_Loaded] = []
    tool = _Tool(nsys)
    for number, each in enumerate(inputs.traces):
        if progress:
            progress(f"reading {each.name} ({number + 1}/{len(inputs.traces)})")
        try:
            loaded.append(_load_report(each, tool, len(loaded), progress))
        except NsysK3Error as error:
            if len(inputs.traces) == 1 and not inputs.problems:
                raise
            problems.append(Problem(str(each.path), str(error)))
    if not loaded:
        raise InputError("; ".join(str(problem) for problem in problems))
    return _assemble(tuple(chosen), inputs.run_dir, manifest, loaded, problems, Path(ranks) if ranks else None)


class _Tool:
    """Finds nsys once, and only when a report needs it."""

    def __init__(self, explicit: str | Path | None) -> None:
        self._explicit = explicit
        self._found: Nsys | None = None

    def get(self) -> Nsys:
        if self._found is None:
            self._found = find_nsys(self._explicit)
        return self._found


def _load_report(each: TraceInput, tool: _Tool, index: int, progress: Progress | None) -> _Loaded:
    path = each.path
    if path.name.lower().endswith(REPORT_SUFFIX):
        # A good export of this very report needs no nsys at all.
        path = cached_export(path) or export_report(path, tool.get(), progress=progress)
    report = open_report(path, each.name, each.host, shown_as=each.path)
    gpu = read_gpu_events(report)
    places = _places(report, gpu, index)
    if not places:
        raise InputError(_why_empty(report, gpu.dropped))
    launches = read_launches(report)
    pids = frozenset(launches["pid"].unique().to_list())
    gpu = replace(gpu, frame=with_launches(gpu.frame, launches))
    return _Loaded(report, gpu, read_nccl_calls(report), places, pids)


def _places(report: Report, gpu: GpuEvents, index: int) -> list[Rank]:
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
        Rank(index, report.name, report.host, pid, device, uuid, name)
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


def _assemble(
    paths: tuple[Path, ...],
    run_dir: Path | None,
    manifest: Manifest | None,
    loaded: list[_Loaded],
    problems: list[Problem],
    user_map: Path | None,
) -> Run:
    reports = [each.report for each in loaded]
    calls = pl.concat(
        each.calls.with_columns(pl.lit(index, pl.Int64).alias("report")) for index, each in enumerate(loaded)
    )
    inits = calls.filter(pl.col("op").str.starts_with("ncclCommInitRank")).with_columns(
        pid_of(pl.col("tid")).alias("pid")
    )
    places = [place for each in loaded for place in each.places]
    labelled = identify(reports, places, manifest=manifest, user_map=user_map, nccl_inits=inits)
    ranks = _rank_frame(labelled, loaded)
    events, names = _events(loaded, ranks)
    notes = [*_shared_gpus(labelled), *[note for each in loaded for note in _notes(each)]]
    return Run(paths, run_dir, manifest, tuple(reports), ranks, events, names, calls, tuple(problems), tuple(notes))


def _shared_gpus(ranks: list[Rank]) -> list[str]:
    """GPUs that several reports show: a run uses a GPU once, so these are probably several runs."""
    seen: dict[str, set[str]] = {}
    for rank in ranks:
        if rank.gpu_uuid:
            seen.setdefault(rank.gpu_uuid, set()).add(rank.report_name)
    twice = sorted({name for names in seen.values() if len(names) > 1 for name in names})
    if not twice:
        return []
    return [
        f"the same GPUs are in several reports ({', '.join(twice)}): if these are different runs, analyse each alone"
    ]


def _rank_frame(labelled: list[Rank], loaded: list[_Loaded]) -> pl.DataFrame:
    integer = ("report", "pid", "device_id", "world_rank", "pp_rank", "tp_rank", "ep_rank")
    text = ("report_name", "host", "gpu_uuid", "gpu_name")
    columns = {name: [getattr(rank, name) for rank in labelled] for name in (*integer, *text)}
    schema = {**dict.fromkeys(integer, pl.Int64), **dict.fromkeys(text, pl.String)}
    return pl.DataFrame(columns, schema=schema).with_columns(
        pl.Series("rank_source", [rank.source for rank in labelled], pl.String),
        pl.Series("dropped_rows", [loaded[rank.report].gpu.dropped for rank in labelled], pl.Int64),
    ).with_row_index("rank").with_columns(pl.col("rank").cast(pl.Int32))  # fmt: skip


def _events(loaded: list[_Loaded], ranks: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """All reports' events with run-wide rank and name numbers."""
    every_name = pl.concat(each.gpu.names.select("short_name", "name") for each in loaded).unique(maintain_order=True)
    names = every_name.with_row_index("name_id")
    parts: list[tuple[int, pl.DataFrame]] = []
    for index, each in enumerate(loaded):
        renumber = each.gpu.names.join(names, on=["short_name", "name"], how="left").sort("name_id")
        mine = ranks.filter(pl.col("report") == index).select("rank", "pid", "device_id")
        place = {(-1 if pid is None else pid, device): rank for rank, pid, device in mine.iter_rows()}
        frame = each.gpu.frame.with_columns(
            renumber["name_id_right"].gather(each.gpu.frame["name_id"]).alias("name_id")
        ).drop("pid", "device_id")
        # A report's events are in order already, rank by rank: slices, to be put in the order of the ranks.
        pid, device = (each.gpu.frame[name].fill_null(-1).to_numpy() for name in ("pid", "device_id"))
        bounds = [0, *(np.flatnonzero(np.diff(pid) | np.diff(device)) + 1).tolist(), frame.height]
        for low, high in pairwise(bounds):
            rank = place.get((pid[low], device[low]))
            if rank is not None:
                whose = (pl.lit(rank, pl.Int32).alias("rank"), pl.lit(index, pl.Int64).alias("report"))
                parts.append((rank, frame.slice(low, high - low).with_columns(whose)))
    return pl.concat((part for _, part in sorted(parts, key=itemgetter(0))), rechunk=True), names


def _notes(each: _Loaded) -> list[str]:
    report, found = each.report, []
    if report.clock == "none":
        found.append(f"{report.name}: the export has no session start time, so it cannot be placed on UTC")
    if each.gpu.dropped:
        found.append(f"{report.name}: {each.gpu.dropped} GPU rows dropped (no time or GPU, or a time that cannot be)")
    if not payloads_exported(report):
        found.append(
            f"{report.name}: NCCL payloads were not exported (communicators and bytes unknown); "
            "export with `nsys export --include-blobs=true`"
        )
    found += [
        f"{report.name}: {beside.name} lies beside the file, left by a writer that did not finish; it was not merged, "
        "so rows may be missing or half changed: export the report again"
        for beside in (report.path.with_name(report.path.name + kind) for kind in ("-wal", "-journal"))
        if beside.is_file() and beside.stat().st_size
    ]
    if each.gpu.frame["api_end"].null_count() == each.gpu.frame.height:
        found.append(f"{report.name}: no CUDA API calls in the export, so idle time is not told apart by late launches")
    found += _missing_workers(each)
    said = [" ".join(diagnostic.text.split()) for diagnostic in report.diagnostics if diagnostic.matters]
    found += [f"{report.name}: Nsight said {text!r}" for text in said[:_DIAGNOSTICS_SHOWN]]
    if (each.gpu.frame["kind"] == "graph").any():
        found.append(
            f"{report.name}: CUDA graphs were traced as a whole, so their kernels are unknown; "
            "capture with `--cuda-graph-trace=node`"
        )
    return found


def _missing_workers(each: _Loaded) -> list[str]:
    """Processes that plainly used CUDA or NCCL, and GPUs that were opened, without one kernel in the trace."""
    report = each.report
    worked = set(each.gpu.frame["pid"].drop_nulls().unique().to_list())
    pids = set(each.launching_pids)
    pids |= set(each.calls.select(pid_of(pl.col("tid")))["tid"].drop_nulls().unique().to_list())
    found = []
    if pids - worked:
        shown = ", ".join(str(pid) for pid in sorted(pids - worked))
        found.append(
            f"{report.name}: processes {shown} launched GPU or NCCL work but have no kernels in the trace; "
            "capture with `--trace-fork-before-exec=true` and let every worker end before the capture is closed"
        )
    opened = report.devices.filter(pl.col("pid").is_not_null())
    used = set(each.gpu.frame["device_id"].unique().to_list())
    idle = sorted(set(opened["device_id"].drop_nulls().to_list()) - used)
    lost = sorted(set(opened["pid"].to_list()) - worked - pids)
    if idle and lost:
        found.append(
            f"{report.name}: GPUs {', '.join(map(str, idle))} were opened by processes without kernels "
            f"({', '.join(map(str, lost))}); if those are workers, capture with `--trace-fork-before-exec=true`"
        )
    return found
