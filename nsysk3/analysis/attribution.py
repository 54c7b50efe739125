"""Which layer and forward launched each GPU event, by the ranges that were open on the host when it was launched."""

from __future__ import annotations

import polars as pl

from nsysk3.analysis.marked_ranges import at_or_before, by_thread
from nsysk3.analysis.nesting import Ints, innermost
from nsysk3.trace.report import pid_of

GRAPH_REPLAY = "graph replay"
BOUNDARY = "pipeline boundary"
NO_NVTX = "no NVTX"
LAUNCH_UNKNOWN = "launch unknown"
OTHER_THREAD = "launched from a thread without ranges"
BETWEEN = "between layers (embedding, norm, logits)"
OUTSIDE = "outside every layer range"
NO_PERIOD = "no NVTX, and no period found"
OUTSIDE_PERIOD = "no NVTX, and outside the layers of the period"
REASONS = pl.Enum(
    [GRAPH_REPLAY, BOUNDARY, NO_NVTX, LAUNCH_UNKNOWN, OTHER_THREAD, BETWEEN, OUTSIDE, NO_PERIOD, OUTSIDE_PERIOD]
)
LAYER_SOURCES = pl.Enum(["nvtx", "graph order", "period"])
_FOUND_SCHEMA = pl.Schema(
    {"row": pl.UInt32(), "layer": pl.Int32(), "module": pl.Categorical(), "host_forward": pl.UInt32()}
)


def attribute_by_ranges(
    events: pl.DataFrame, ranks: pl.DataFrame, marked: pl.DataFrame, host_forwards: pl.DataFrame
) -> pl.DataFrame:
    """Events, in their order, with ``layer``, ``module``, ``forward``, ``host_forward``, ``layer_source``, ``reason``.

    ``events`` need rank, report, tid, api_start, graph_node, kind and role; ``marked`` is of one stack (main_stack)
    and ``host_forwards`` are its forward_ranges.

    * ``layer`` (Int32): the innermost layer range that held the launch, on the launching thread.  Ranges run ahead of
      the GPU, so those open while a kernel ran say nothing.
    * ``module`` (Categorical): the path inside the layer, or the model's module outside one.
    * ``host_forward``: row of ``host_forwards``; ``forward`` (Int32): its number, see _numbers.
    * ``reason``: why ``layer`` is null, never null there.  The kernels of a CUDA graph replay share one launch, which
      says nothing about their layers.
    """
    numbered = events.with_row_index("row")
    launched = numbered.filter(pl.col("api_start").is_not_null() & pl.col("tid").is_not_null())
    found = _found(launched.select("row", "report", "tid", "api_start"), marked, host_forwards)
    joined = numbered.join(found, on="row", how="left", maintain_order="left").drop("row")
    replayed = pl.col("graph_node").is_not_null() | (pl.col("kind") == "graph")
    joined = joined.with_columns(pl.when(~replayed).then(name).alias(name) for name in ("layer", "module"))
    joined = joined.join(
        _numbers(joined, host_forwards), on=["rank", "host_forward"], how="left", maintain_order="left"
    )
    return joined.with_columns(
        pl.when(pl.col("layer").is_not_null()).then(pl.lit("nvtx", LAYER_SOURCES)).alias("layer_source"),
        _reason(replayed, ranks, marked),
    )


def _found(points: pl.DataFrame, marked: pl.DataFrame, host_forwards: pl.DataFrame) -> pl.DataFrame:
    """_FOUND_SCHEMA of the launches on threads that have ranges."""
    ranges, forwards = by_thread(marked), by_thread(host_forwards.with_row_index("host_forward"))
    no_ranges, no_forwards = marked.clear(), host_forwards.with_row_index("host_forward").clear()
    rows = [
        _found_on_thread(part, ranges.get(key, no_ranges), forwards.get(key, no_forwards))
        for key, part in by_thread(points).items()
        if key in ranges or key in forwards
    ]
    return pl.concat([pl.DataFrame(schema=_FOUND_SCHEMA), *rows])


def _found_on_thread(points: pl.DataFrame, ranges: pl.DataFrame, forwards: pl.DataFrame) -> pl.DataFrame:
    at = points["api_start"].to_numpy()
    layers = _innermost_rows(ranges.filter(pl.col("kind") == "layer"), at)
    others = _innermost_rows(ranges.filter(pl.col("kind").is_in(["model", "boundary"])), at)
    last_begun = pl.Series(at_or_before(forwards["start"].to_numpy(), at))
    return points.select(
        "row",
        layers["layer"],
        pl.when(layers["layer"].is_null()).then(others["module"]).otherwise(layers["module"]).alias("module"),
        pl.when(_rows(forwards, last_begun)["end"] >= pl.col("api_start"))
        .then(_rows(forwards, last_begun)["host_forward"])
        .alias("host_forward"),
    )


def _innermost_rows(ranges: pl.DataFrame, at: Ints) -> pl.DataFrame:
    return _rows(ranges, pl.Series(innermost(ranges["start"].to_numpy(), ranges["end"].to_numpy(), at)))


def _rows(frame: pl.DataFrame, index: pl.Series) -> pl.DataFrame:
    """Rows by position, null for -1."""
    return frame.select(pl.all().gather(index.replace(-1, None)))


def _numbers(joined: pl.DataFrame, host_forwards: pl.DataFrame) -> pl.DataFrame:
    """``rank``, ``host_forward``, ``forward``: the number of each forward that a rank launched work in.

    The markers' own numbers, which mean the same micro-batch on every rank, when no thread repeats one; a forward
    whose marker the capture missed counts on from its neighbours.  Otherwise each rank counts its forwards from 0.
    """
    index = pl.int_range(pl.len()).over("report", "tid")
    shift = (pl.col("number") - index).backward_fill().forward_fill().over("report", "tid")
    told = host_forwards.with_row_index("host_forward").with_columns((shift + index).alias("told"))
    seen = joined.select("rank", "host_forward").drop_nulls().unique()
    seen = seen.join(told, on="host_forward").sort("rank", "start", "host_forward")
    # A marker that was closed and opened again is one forward.
    again = (pl.col("told") == pl.col("told").shift(1)).over("report", "tid").fill_null(False)
    clear = told["told"].null_count() == 0 and told.filter(~again).select("report", "tid", "told").is_unique().all()
    number = pl.col("told") if clear else pl.int_range(pl.len()).over("rank")
    return seen.select("rank", "host_forward", number.cast(pl.Int32).alias("forward"))


def _reason(replayed: pl.Expr, ranks: pl.DataFrame, marked: pl.DataFrame) -> pl.Expr:
    layers = marked.filter(pl.col("kind") == "layer")
    processes = layers.select("report", pid_of(pl.col("tid")).alias("pid")).unique()
    with_layers = ranks.join(processes, on=["report", "pid"], how="semi", nulls_equal=True)["rank"]
    threads = marked.filter(pl.col("kind").is_in(["layer", "forward", "model"])).select("report", "tid").unique()
    on_thread = pl.struct("report", "tid").is_in(threads.select(pl.struct("report", "tid")).to_series().implode())
    reason = (
        pl.when(replayed).then(pl.lit(GRAPH_REPLAY))
        .when(pl.col("role") == "p2p").then(pl.lit(BOUNDARY))
        .when(~pl.col("rank").is_in(with_layers.implode())).then(pl.lit(NO_NVTX))
        .when(pl.col("api_start").is_null() | pl.col("tid").is_null()).then(pl.lit(LAUNCH_UNKNOWN))
        .when(~on_thread).then(pl.lit(OTHER_THREAD))
        .when(pl.col("host_forward").is_not_null()).then(pl.lit(BETWEEN))
        .otherwise(pl.lit(OUTSIDE))
    )  # fmt: skip
    return pl.when(pl.col("layer").is_null()).then(reason).cast(REASONS).alias("reason")
