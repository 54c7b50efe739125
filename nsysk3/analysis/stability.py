"""Which ranks may enter a median: those whose capture is whole and whose work looks like their peers'."""

from __future__ import annotations

import polars as pl

MIN_COVERAGE = 0.9


def work_counts(counted: pl.DataFrame, whole: pl.DataFrame) -> pl.DataFrame:
    """Per rank with work: ``work`` (all but copies), ``messages`` (pipeline P2P), ``reductions``, ``whole_reductions``.

    The latter two are AllReduce counts, of the window and of its whole forwards.

    ``counted``: the events of the window; ``whole``: ``rank``, ``forward`` of the whole forwards.
    """
    working = counted.filter(pl.col("kind") != "copy").group_by("rank")
    work = working.agg(pl.len().alias("work"), (pl.col("role") == "p2p").sum().alias("messages"))
    reductions = counted.select("rank", "forward").filter(counted["role"] == "allreduce")
    parts = {"reductions": reductions, "whole_reductions": reductions.join(whole, on=["rank", "forward"], how="semi")}
    for name, rows in parts.items():
        counts = rows.group_by("rank").agg(pl.len().cast(pl.Float64).alias(name))
        work = work.join(counts, on="rank", how="left")
    return work


def stability(
    ranks: pl.DataFrame,
    captures: pl.DataFrame,
    recordings: pl.DataFrame,
    counts: pl.DataFrame,
    forwards: pl.DataFrame,
    unsplit: pl.DataFrame,
) -> pl.DataFrame:
    """Per rank: ``rank``, ``stable``, ``reason`` (null when stable), ``coverage``.

    A rank is stable when it has work in its window, its report recorded at least 90 % of the run's working time, and it
    has as many AllReduce as most ranks of its stage (in a pipeline, where that is known): per whole forward where
    forwards are known (``forwards``: rank, forward, whole), else in the window; and it found partners wherever others
    of its stage did.  ``counts``: work_counts.  ``recordings``: see ``coverage``.  ``unsplit``: see partnerless.
    """
    table = ranks.select("rank", "pp_rank").join(coverage(ranks, captures, recordings), on="rank", how="left")
    if forwards["whole"].any():
        number = forwards.filter("whole").group_by("rank").agg(pl.len().alias("whole_forwards"))
        counts = counts.select("rank", "work", "messages", pl.col("whole_reductions").alias("reductions"))
    else:
        number = ranks.select("rank", pl.lit(1).alias("whole_forwards"))
    for part in (counts, number, unsplit):
        table = table.join(part, on="rank", how="left")
    rate = pl.when(pl.col("whole_forwards") > 0).then(pl.col("reductions").fill_null(0) / pl.col("whole_forwards"))
    table = table.with_columns(pl.col("work").fill_null(0), rate.alias("rate"))
    table = table.with_columns(pl.col("rate").drop_nulls().mode().sort().first().over("pp_rank").alias("usual"))
    # A stage that lost all partners has no better ranks: only where others know more is a rank left out of medians.
    alone = pl.any_horizontal(
        pl.col(name) & ~pl.col(name).all().over("pp_rank") for name in unsplit.columns if name != "rank"
    )
    staged = pl.col("pp_rank").is_not_null()
    # In a pipeline, ranks of unknown stages may do different work.
    alike = staged | (pl.col("messages").sum() == 0)
    no_forward = pl.col("whole_forwards").fill_null(0) == 0
    reason = (
        pl.when(pl.col("work") == 0).then(pl.lit("no GPU work in the window"))
        .when(pl.col("coverage") < MIN_COVERAGE)
        .then(pl.format("recorded {} % of the run", (pl.col("coverage") * 100).round(1)))
        .when(no_forward).then(pl.lit("no whole forward in the window"))
        .when((pl.col("rate") != pl.col("usual")) & alike)
        .then(pl.format("{} AllReduce where its stage has {}", pl.col("rate").round(2), pl.col("usual").round(2)))
        .when(alone & staged).then(pl.lit("partners of its communication are not in this run"))
    )  # fmt: skip
    return table.with_columns(reason.alias("reason")).select(
        "rank", pl.col("reason").is_null().alias("stable"), "reason", "coverage"
    )


def coverage(ranks: pl.DataFrame, captures: pl.DataFrame, recordings: pl.DataFrame) -> pl.DataFrame:
    """``rank``, ``coverage``: share of the run's working time that the rank's report was recording.

    Working time runs from the first to the last kernel of any rank.  Recording, not activity, is what counts: the last
    stage of a deep pipeline starts late without missing anything.  ``recordings``: ``report``, ``start``, ``end`` (UTC
    ns; null where the report does not say, then it counts from its first to its last kernel), ``clocked``.  Null when
    some report of several has no clock.
    """
    own = ranks.select("rank", "report").join(captures, on="rank")
    extent = own.group_by("report").agg(pl.col("start").min().alias("_first"), pl.col("end").max().alias("_last"))
    # Kernels can end a little after the stated end of a capture.
    spans = recordings.join(extent, on="report").select(
        "report", pl.min_horizontal("start", "_first").alias("low"), pl.max_horizontal("end", "_last").alias("high")
    )
    first, last = captures["start"].min(), captures["end"].max()
    working = pl.lit(last) - pl.lit(first)
    seen = pl.min_horizontal("high", pl.lit(last)) - pl.max_horizontal("low", pl.lit(first))
    clocked = recordings["clocked"].all()
    ratio = pl.when(pl.lit(clocked) & (working > 0)).then((seen / working).clip(0, 1))
    return ranks.select("rank", "report").join(spans, on="report").select("rank", ratio.alias("coverage"))
