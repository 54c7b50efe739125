"""The few NVTX ranges of a report that say where in the model the host was, made to nest."""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from nsysk3.analysis.layer_names import KINDS, NAME_SCHEMA, parse_names
from nsysk3.analysis.nesting import parents
from nsysk3.analysis.rows import split
from nsysk3.trace.nvtx import START_END

MARKED_SCHEMA = pl.Schema(
    {
        "report": pl.Int64(),
        "tid": pl.Int64(),
        "start": pl.Int64(),
        "end": pl.Int64(),
        "truncated": pl.Boolean(),
        **NAME_SCHEMA,
        "stack": pl.Categorical(),
        "module": pl.Categorical(),
    }
)


def mark_ranges(ranges: pl.DataFrame, report: int = 0, layer_regex: str | None = None) -> tuple[pl.DataFrame, int]:
    """Keep the ranges of one report (see read_nvtx) that parse_names understands, with what their names say.

    Returns (frame of MARKED_SCHEMA sorted by (report, tid, start, end descending), number of start/end ranges left
    out).  The ranges of a thread nest: start/end ranges, which need not, are used only where they begin and end on one
    thread and the thread's ranges nest with all of them.  Most ranges of a large trace go here, before anything is
    sorted or nested.
    """
    parsed = parse_names(ranges["name"].unique(), layer_regex).with_columns(
        pl.col("stack").cast(pl.Categorical), pl.col("module").cast(pl.Categorical)
    )
    kept = ranges.join(parsed, on="name", how="inner", maintain_order="left")
    kept = kept.with_columns(pl.lit(report, pl.Int64).alias("report"))
    # Nothing is looked up in a window, so it may cross other ranges and threads.
    loose = (pl.col("event_type") == START_END) & (pl.col("kind") != "window")
    one_thread = (pl.col("tid") == pl.col("end_tid")).fill_null(False)
    usable = kept.filter(~loose | one_thread).pipe(_sorted)
    parts = [_without_crossing(part, loose) for part in usable.partition_by("tid", maintain_order=True)]
    marked = pl.concat(parts) if parts else usable
    return _close_truncated(marked.select(list(MARKED_SCHEMA))), kept.height - marked.height


def stack_counts(marked: pl.DataFrame) -> pl.DataFrame:
    """``stack`` (String), ``len``: how often each stack of layers was entered."""
    named = marked.filter(pl.col("stack").is_not_null()).select(pl.col("stack").cast(pl.String))
    return named.group_by("stack").len()


def main_stack(marked: pl.DataFrame, counts: pl.DataFrame | None = None) -> pl.DataFrame:
    """Ranges with only one stack of layers left: the one entered most often.

    The layers of another stack (a vision tower, a draft model) become ranges of the model outside any layer, since
    their numbers would be mixed up with the main stack's.  Of stacks entered equally often, the first by name is the
    main one.  ``counts``: stack_counts of all reports of the run together, where ``marked`` is of one of them.
    """
    counts = stack_counts(marked) if counts is None else counts.group_by("stack").agg(pl.col("len").sum())
    if counts.height < 2:
        return marked
    main = counts.sort("len", "stack", descending=[True, False])["stack"][0]
    other = (pl.col("stack").cast(pl.String) != main).fill_null(False)
    return marked.with_columns(
        pl.when(other).then(pl.lit("model", KINDS)).otherwise("kind").alias("kind"),
        pl.when(~other).then("layer").alias("layer"),
    )


def _sorted(ranges: pl.DataFrame) -> pl.DataFrame:
    descending = [False, False, False, True]
    return ranges.sort("report", "tid", "start", "end", descending=descending, maintain_order=True)


def _without_crossing(part: pl.DataFrame, loose: pl.Expr) -> pl.DataFrame:
    """One thread's ranges, without its start/end ranges where the whole does not nest."""
    if not part.select(loose.any()).item():
        return part
    nested = part.filter(pl.col("kind") != "window")
    end = nested["end"].to_numpy()
    above = parents(nested["start"].to_numpy(), end)
    inside = above >= 0
    return part if (end[inside] <= end[above[inside]]).all() else part.filter(~loose)


def _close_truncated(marked: pl.DataFrame) -> pl.DataFrame:
    """End ranges whose pop was never seen where the thread plainly left them.

    A worker that dies loses its last pops, and Nsight then ends those ranges with the capture.  A layer is left when
    the thread enters the next one or a module outside layers, anything else when it enters a range of the same kind
    and module again.
    """
    if not marked["truncated"].any():
        return marked
    inside_layer = ((pl.col("kind") == "layer") & pl.col("module").is_not_null()) | (pl.col("kind") == "window")
    same = ["report", "tid", "kind", "module"]
    next_entry = pl.when(~inside_layer).then("start").shift(-1).backward_fill().over("report", "tid")
    next_same = pl.col("start").shift(-1).over(same)
    left = pl.when(pl.col("kind") == "layer").then(next_entry).otherwise(next_same)
    end = pl.when(pl.col("truncated")).then(pl.min_horizontal("end", left)).otherwise("end")
    return marked.with_columns(end.alias("end")).pipe(_sorted)


def by_thread(frame: pl.DataFrame) -> dict[tuple[int, int], pl.DataFrame]:
    """Rows of each (report, tid)."""
    return {(report, tid): part for (report, tid), part in split(frame, "report", "tid").items()}


def at_or_before(starts: NDArray[np.int64], points: NDArray[np.int64]) -> NDArray[np.int64]:
    """Index of the last start not after each point, -1 for none; ``starts`` must be sorted."""
    return np.searchsorted(starts, points, side="right").astype(np.int64) - 1
