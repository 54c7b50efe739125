"""GPU work of one report: kernels, copies and whole-graph replays on UTC nanoseconds."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from nsysk3.trace.order import row_order
from nsysk3.trace.report import Report, pid_of

# Nothing on a GPU takes a hundred days.
_LONGEST_NS = 2**53
KINDS = pl.Enum(["kernel", "copy", "graph"])
# CUPTI's numbering of copy directions; Nsight's own enumeration table is optional.
_COPY_KINDS = {
    0: "UNKNOWN", 1: "HTOD", 2: "DTOH", 3: "HTOA", 4: "ATOH", 5: "ATOA", 6: "ATOD", 7: "DTOA", 8: "DTOD", 9: "HTOH",
    10: "PTOP",
}  # fmt: skip
# In the order of the alphabet, which numbers names.
_LABELS = pl.Enum(["CUDA graph replay", *sorted(f"MEMCPY_{kind}" for kind in _COPY_KINDS.values()), "MEMSET"])


@dataclass(frozen=True)
class GpuEvents:
    """The GPU rows of a report.

    ``frame``: one row an event, sorted by (pid, device_id, start, end, stream): ``start``/``end`` UTC ns, ``pid``,
    ``device_id``, ``stream``, ``correlation``, ``graph_node`` (null outside CUDA graphs), ``bytes`` (copies), ``kind``
    and ``name_id``.  ``names``: ``name_id``, ``short_name``, ``name`` (demangled).  ``dropped``: rows left out because
    a time or the GPU was missing (0 or null), the end lay before the start, or the time cannot be.
    """

    frame: pl.DataFrame
    names: pl.DataFrame
    dropped: int


def read_gpu_events(report: Report) -> GpuEvents:
    """Read the GPU rows of a report.

    CUPTI_ACTIVITY_KIND_SYNCHRONIZATION and CUDA_EVENT rows are host or stream bookkeeping, not GPU work: not read.
    A graph that was traced as a whole (``--cuda-graph-trace=graph``) has one row a replay and no kernels; where the
    same process also has node rows, those are the better account of the same time and the whole-graph rows go.
    """
    kernels = _kernels(report)
    frames = [kernels, _copies(report), _sets(report)]
    replays = _graphs(report)
    if kernels["graph_node"].null_count() < kernels.height:
        by_node = kernels.filter(pl.col("graph_node").is_not_null()).select("globalPid", "device_id").unique()
        replays = replays.join(by_node, on=["globalPid", "device_id"], how="anti", nulls_equal=True)
    rows = pl.concat([*frames, replays], how="diagonal_relaxed")
    start, end = pl.col("start"), pl.col("end")
    raw_ok = (start != 0) & (end != 0) & (end >= start) & pl.col("device_id").is_not_null()
    possible = start.is_between(*report.possible_ns) & (end - start <= _LONGEST_NS)
    kept = rows.filter((raw_ok & possible).fill_null(False))
    frame, names = _named(report, kept)
    return GpuEvents(frame, names, rows.height - kept.height)


def _rows(report: Report, table: str, extra: tuple[str, ...]) -> pl.DataFrame:
    common = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid")
    return report.source.read(table, (*common, *extra)).rename(
        {"deviceId": "device_id", "streamId": "stream", "correlationId": "correlation"}
    )


def _kernels(report: Report) -> pl.DataFrame:
    table = "CUPTI_ACTIVITY_KIND_KERNEL"
    columns = report.source.columns(table)
    long = "demangledName" if "demangledName" in columns else "mangledName"
    rows = _rows(report, table, ("graphNodeId", "shortName", long)).rename(
        {"graphNodeId": "graph_node", "shortName": "short_id", long: "long_id"}
    )
    return rows.with_columns(pl.lit("kernel", KINDS).alias("kind"))


def _copies(report: Report) -> pl.DataFrame:
    rows = _rows(report, "CUPTI_ACTIVITY_KIND_MEMCPY", ("graphNodeId", "bytes", "copyKind"))
    labels = {number: f"MEMCPY_{kind}" for number, kind in _COPY_KINDS.items()}
    label = pl.col("copyKind").replace_strict(labels, default="MEMCPY_UNKNOWN", return_dtype=_LABELS)
    return _labelled(rows.with_columns(label.alias("label")).drop("copyKind"))


def _sets(report: Report) -> pl.DataFrame:
    rows = _rows(report, "CUPTI_ACTIVITY_KIND_MEMSET", ("graphNodeId", "bytes"))
    return _labelled(rows.with_columns(pl.lit("MEMSET", _LABELS).alias("label")))


def _labelled(rows: pl.DataFrame) -> pl.DataFrame:
    return rows.rename({"graphNodeId": "graph_node"}).with_columns(pl.lit("copy", KINDS).alias("kind"))


def _graphs(report: Report) -> pl.DataFrame:
    rows = _rows(report, "CUPTI_ACTIVITY_KIND_GRAPH_TRACE", ())
    return rows.with_columns(pl.lit("graph", KINDS).alias("kind"), pl.lit("CUDA graph replay", _LABELS).alias("label"))


def _named(report: Report, rows: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Give each distinct name a number, so that millions of rows carry four bytes instead of a symbol."""
    keys = ["short_id", "long_id", "label"]
    strings = report.strings
    names = rows.select(keys).unique().sort(keys).with_row_index("name_id")
    for key, column in (("short_id", "short_name"), ("long_id", "name")):
        names = names.join(strings.rename({"id": key, "value": column}), on=key, how="left")
    unknown = pl.format("[unknown #{}]", pl.coalesce("long_id", "short_id"))
    said = pl.col("label").cast(pl.String)
    label = pl.coalesce(said, "name", "short_name", unknown, pl.lit("[unknown]"))
    named = names.sort("name_id").select(
        "name_id", pl.coalesce(said, "short_name", label).alias("short_name"), label.alias("name")
    )
    frame = rows.join(names.select("name_id", *keys), on=keys, how="left", nulls_equal=True)
    times = [pl.col(column) + report.to_utc_ns for column in ("start", "end")]
    frame = frame.select(
        *times,
        pid_of(pl.col("globalPid")).alias("pid"),
        *[pl.col(c) for c in ("device_id", "stream", "correlation", "graph_node", "bytes", "kind", "name_id")],
    )
    order = frame.select("pid", "device_id", "start", "end", "stream", "correlation", "name_id")
    return frame[row_order(order, ties=3)], named
