"""Where each thread ran a forward, from the ranges on the host."""

from __future__ import annotations

import numpy as np
import polars as pl

from nsysk3.analysis.layer_names import KINDS
from nsysk3.analysis.marked_ranges import at_or_before, by_thread
from nsysk3.analysis.nesting import parents

# Modules that run before the first layer and after the last.
_BEFORE = r"^embed"
_AFTER = r"^(?:norm|lm_head|logits_processor)$"
SOURCES = pl.Enum(["marker", "model range", "layer order", "period"])
HOST_FORWARD_SCHEMA = pl.Schema(
    {
        "report": pl.Int64(),
        "tid": pl.Int64(),
        "start": pl.Int64(),
        "end": pl.Int64(),
        "number": pl.Int64(),
        "tokens": pl.Int64(),
        "truncated": pl.Boolean(),
        "source": SOURCES,
    }
)


def forward_ranges(marked: pl.DataFrame) -> pl.DataFrame:
    """Forwards as the host ran them: HOST_FORWARD_SCHEMA, sorted by (report, tid, start), disjoint on a thread.

    ``start`` and ``end`` are host times (UTC ns) and run ahead of the GPU.  In order of preference: nsysk3's own
    forward markers; the outermost model ranges that hold layers; and layers outside both (the capture began inside the
    forward, or only layers are marked), where a new forward begins when the layer number falls back.  ``number`` is
    the marker's.  ``tokens`` is what the first range inside that states its input says, null when none does.
    """
    useful = marked.filter(pl.col("kind").is_in(["forward", "model", "layer"]))
    parts = [_thread_forwards(part) for part in by_thread(useful).values()]
    if not parts:
        return pl.DataFrame(schema=HOST_FORWARD_SCHEMA)
    found = pl.concat(parts).sort("report", "tid", "start")
    return _with_tokens(found, useful).select(list(HOST_FORWARD_SCHEMA))


def _thread_forwards(ranges: pl.DataFrame) -> pl.DataFrame:
    markers = _outermost(ranges.filter(pl.col("kind") == "forward"))
    starts, ends = markers["start"].to_numpy(), markers["end"].to_numpy()
    begin, finish = ranges["start"].to_numpy(), ranges["end"].to_numpy()
    at = at_or_before(starts, begin)
    in_marker = (at >= 0) & (begin <= ends[at]) if len(starts) else np.zeros(len(begin), bool)
    # A model range around markers is a loop over forwards, not one of them.
    holds_marker = at_or_before(starts, finish) > at
    rest = ranges.filter(pl.Series(~in_marker & ~holds_marker) & (pl.col("kind") != "forward"))
    roots = _outermost(rest)
    layers = rest.filter(pl.col("kind") == "layer")
    held = np.zeros(roots.height, bool)
    held[np.unique(at_or_before(roots["start"].to_numpy(), layers["start"].to_numpy()))] = True
    whole = _with_ends(roots.filter(pl.Series(held)), roots.filter(pl.Series(~held)))
    return pl.concat([_as_forward(markers, "marker"), _from_roots(whole, markers)])


def _with_ends(roots: pl.DataFrame, others: pl.DataFrame) -> pl.DataFrame:
    """Model ranges with layers, stretched over the embedding before and the logits after them.

    SGLang embeds outside the language model's own range when the model is multimodal.
    """
    start, end = roots["start"].to_numpy().copy(), roots["end"].to_numpy().copy()
    module = pl.col("module").cast(pl.String)
    before = others.filter(module.str.contains(_BEFORE).fill_null(False))
    after = others.filter(module.str.contains(_AFTER).fill_null(False))
    following = np.searchsorted(start, before["start"].to_numpy(), side="right")
    preceding = at_or_before(start, after["start"].to_numpy())
    first, last = following < len(start), preceding >= 0
    np.minimum.at(start, following[first], before["start"].to_numpy()[first])
    np.maximum.at(end, preceding[last], after["end"].to_numpy()[last])
    model = pl.col("kind") == "model"
    return roots.with_columns(
        pl.when(model).then(pl.Series(start)).otherwise("start").alias("start"),
        pl.when(model).then(pl.Series(end)).otherwise("end").alias("end"),
    )


def _outermost(ranges: pl.DataFrame) -> pl.DataFrame:
    above = parents(ranges["start"].to_numpy(), ranges["end"].to_numpy())
    return ranges.filter(pl.Series(above < 0, dtype=pl.Boolean))


def _as_forward(ranges: pl.DataFrame, source: str) -> pl.DataFrame:
    return ranges.select(
        *("report", "tid", "start", "end", "number"), "truncated", pl.lit(source, SOURCES).alias("source")
    )


def _from_roots(roots: pl.DataFrame, markers: pl.DataFrame) -> pl.DataFrame:
    """Model ranges as they are; layers without one joined up to where their number falls back.

    Layers on both sides of another forward are not joined.
    """
    models = roots.filter(pl.col("kind") == "model")
    fences = pl.concat([models, markers]).with_columns(pl.lit("model", KINDS).alias("kind"))
    lonely = pl.concat([roots.filter(pl.col("kind") == "layer"), fences]).sort("start", maintain_order=True)
    fence = pl.col("kind") == "model"
    falls_back = (pl.col("layer") < pl.col("layer").shift(1)).fill_null(True)
    # The same layer twice in a row: two forwards of one layer, unless the ranges are its own modules.
    again = (pl.col("layer") == pl.col("layer").shift(1)) & pl.col("module").is_null()
    joined = (
        lonely.with_columns((falls_back | again.fill_null(False)).cum_sum().alias("forward"))
        .filter(~fence)
        .group_by("forward", maintain_order=True)
        .agg(
            pl.first("report"),
            pl.first("tid"),
            pl.min("start"),
            pl.max("end"),
            pl.lit(None, pl.Int64).alias("number"),
            pl.any("truncated"),
            pl.lit("layer order", SOURCES).alias("source"),
        )
        .drop("forward")
    )
    return pl.concat([_as_forward(models, "model range").with_columns(pl.lit(None, pl.Int64).alias("number")), joined])


def _with_tokens(forwards: pl.DataFrame, ranges: pl.DataFrame) -> pl.DataFrame:
    said = ranges.filter(pl.col("tokens").is_not_null()).select(
        "report", "tid", pl.col("start").alias("said"), "tokens"
    )
    return (
        forwards.join_asof(
            said.sort("report", "tid", "said"),
            left_on="start",
            right_on="said",
            by=["report", "tid"],
            strategy="forward",
            check_sortedness=False,
        )
        .with_columns(pl.when(pl.col("said") <= pl.col("end")).then("tokens").alias("tokens"))
        .sort("report", "tid", "start")
    )
