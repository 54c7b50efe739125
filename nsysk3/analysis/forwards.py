"""The forwards of each rank on the GPU: one forward = one micro-batch through the rank's layers."""

from __future__ import annotations

import polars as pl

from nsysk3.analysis.forward_ranges import SOURCES
from nsysk3.analysis.rows import runs

FORWARD_SCHEMA = pl.Schema(
    {
        "rank": pl.Int32(),
        "stage": pl.Int64(),
        "forward": pl.Int32(),
        "start_utc_ns": pl.Int64(),
        "end_utc_ns": pl.Int64(),
        "kernels": pl.Int64(),
        "tokens": pl.Int64(),
        "whole": pl.Boolean(),
        "reason": pl.String(),
        "source": SOURCES,
        "launched_utc_ns": pl.Int64(),
    }
)
_KEY = ["rank", "forward"]
# A pass of fewer tokens than this part of the usual is of another kind.
_SAME_TOKENS = 0.5
# On SGLang's Kimi-K3 a decode step shares 55 % of a prefill pass's kernels by name, two prefill chunks 96 % or more.
_SAME_KERNELS = 0.7


def forward_table(events: pl.DataFrame, ranks: pl.DataFrame, host_forwards: pl.DataFrame) -> pl.DataFrame:
    """One row a (rank, forward), FORWARD_SCHEMA, sorted so.

    ``start_utc_ns``/``end_utc_ns``: first start to last end of the kernels launched in the forward, whatever stream
    they ran on; pipeline sends and receives are left out, for they wait on other stages.  ``launched_utc_ns``: when
    the host began it, null when found by period.  ``tokens``: what its module ranges say, null where they do not.
    ``whole`` is true when it can be compared with the others, else ``reason`` says why not; see _judged.
    """
    read = [*_KEY, "layer", "host_forward", "name_id", "role", "start", "end"]
    mine = events.select(pl.col("forward").is_not_null() & (pl.col("kind") != "copy")).to_series()
    work = events.select(read).filter(mine)
    own = pl.col("role") != "p2p"
    rows = work.group_by(_KEY).agg(
        pl.col("start").filter(own).min().alias("start_utc_ns"),
        pl.col("end").filter(own).max().alias("end_utc_ns"),
        pl.len().cast(pl.Int64).alias("kernels"),
    )
    launched = runs(work.select(*_KEY, "host_forward"))[0].unique().sort(*_KEY, "host_forward")
    said = host_forwards.with_row_index("host_forward").select("host_forward", "tokens", "truncated", "source", "start")
    told = launched.join(said, on="host_forward", how="left", maintain_order="left").group_by(_KEY).agg(
        pl.col("tokens").drop_nulls().first(),
        pl.col("truncated").any(),
        pl.col("source").drop_nulls().first().fill_null(pl.lit("period", SOURCES)),
        pl.col("start").min().alias("launched_utc_ns"),
    )  # fmt: skip
    stages = ranks.select("rank", pl.col("pp_rank").alias("stage"))
    table = rows.join(told, on=_KEY).join(stages, on="rank", how="left").filter(pl.col("start_utc_ns").is_not_null())
    return _judged(table, work).select([pl.col(name).cast(kind) for name, kind in FORWARD_SCHEMA.items()]).sort(_KEY)


def _judged(table: pl.DataFrame, work: pl.DataFrame) -> pl.DataFrame:
    """Add ``whole`` and ``reason``, from what most forwards of the rank look like.

    Not whole: a forward whose range the capture cut; one without all layers that most have; one of another kind (a
    decode step among prefill passes), told by its tokens or, where those are unknown, by how many kernels it has in
    common with the usual; and a first or last forward with fewer kernels than any other whole one.
    """
    seen, _ = runs(work.select(*_KEY, "layer"))
    layers = seen.group_by(_KEY).agg(pl.col("layer").drop_nulls().unique().sort().alias("layers"))
    table = table.join(layers, on=_KEY).join(_likeness(table, work), on=_KEY, how="left")
    sets = table.group_by("rank", "layers").agg(pl.len().alias("count"))
    usual = sets.sort("count", pl.col("layers").list.len(), pl.col("layers").list.first(), descending=True)
    usual = usual.group_by("rank", maintain_order=True).agg(pl.first("layers").alias("usual_layers"))
    tokens = pl.col("tokens").mode(maintain_order=False).max().over("rank")
    table = table.join(usual, on="rank").with_columns(tokens.alias("usual_tokens"))
    few = pl.col("tokens") < _SAME_TOKENS * pl.col("usual_tokens")
    unlike = pl.col("tokens").is_null() & (pl.col("alike") < _SAME_KERNELS)
    missing = pl.col("usual_layers").list.set_difference("layers").list.len()
    reason = (
        pl.when("truncated").then(pl.lit("its range was cut by the capture"))
        .when(missing > 0).then(pl.format("{} of {} layers missing", missing, pl.col("usual_layers").list.len()))
        .when(few).then(pl.format("another kind of pass: {} tokens, usually {}", "tokens", "usual_tokens"))
        .when(unlike).then(pl.lit("another kind of pass: other kernels than usual"))
    )  # fmt: skip
    table = table.sort("rank", "start_utc_ns", "forward").with_columns(reason.alias("reason"))
    fewest = pl.when(pl.col("reason").is_null()).then("kernels")
    edge = (pl.int_range(pl.len()) == 0) | (pl.int_range(pl.len()) == pl.len() - 1)
    others = fewest.filter(~edge).min()
    cut = pl.col("reason").is_null() & (edge & (pl.col("kernels") < others)).over("rank").fill_null(False)
    said = pl.lit("fewer kernels than any other: cut by the capture, or another kind of pass")
    table = table.with_columns(pl.when(cut).then(said).otherwise("reason").alias("reason"))
    return table.with_columns(pl.col("reason").is_null().alias("whole"))


def _likeness(table: pl.DataFrame, work: pl.DataFrame) -> pl.DataFrame:
    """``alike``: the share of kernels, by name, that each forward has in common with the rank's median forward."""
    middle = table.sort("kernels", "forward").group_by("rank", maintain_order=True).agg(
        pl.col("forward").get(pl.len() // 2).alias("middle"), pl.col("kernels").get(pl.len() // 2).alias("size")
    )  # fmt: skip
    counts = work.group_by(*_KEY, "name_id").agg(pl.len().cast(pl.Int64).alias("count"))
    model = counts.join(middle, left_on=_KEY, right_on=["rank", "middle"]).select(
        "rank", "name_id", pl.col("count").alias("usual")
    )
    shared = counts.join(model, on=["rank", "name_id"]).group_by(_KEY).agg(
        pl.min_horizontal("count", "usual").sum().alias("shared")
    )  # fmt: skip
    sized = table.select(*_KEY, "kernels").join(shared, on=_KEY, how="left").join(middle, on="rank")
    return sized.select(*_KEY, (pl.col("shared").fill_null(0) / pl.max_horizontal("kernels", "size")).alias("alike"))
