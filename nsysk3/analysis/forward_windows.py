"""Windows that hold whole forwards only."""

from __future__ import annotations

import polars as pl

from nsysk3.trace.report import pid_of

_WHOLE_CAPTURE = "no whole forward was found, so this is the whole capture"


def prefill_windows(
    forwards: pl.DataFrame, captures: pl.DataFrame, ranks: pl.DataFrame, marked: pl.DataFrame
) -> pl.DataFrame:
    """Per rank ``rank``, ``start``, ``end`` (UTC ns), ``reason``: first to last whole forward of the marked range.

    ``captures`` are capture_windows, ``forwards`` forward_table's rows.  The marked range is nsysk3.prefill_window of
    the rank's process; without one it is the capture.  A forward belongs to it when the host began it inside.
    ``reason`` is null, or says why the window is the whole capture instead.
    """
    windows = marked.filter(pl.col("kind") == "window").select(
        "report", pid_of(pl.col("tid")).alias("pid"), pl.col("start").alias("opened"), pl.col("end").alias("closed")
    )
    of_rank = ranks.select("rank", "report", "pid").join(windows, on=["report", "pid"], nulls_equal=True)
    of_rank = of_rank.group_by("rank").agg(pl.min("opened"), pl.max("closed"))
    whole = forwards.filter("whole").join(of_rank, on="rank", how="left")
    inside = pl.col("launched_utc_ns").is_between("opened", "closed").fill_null(True)
    return _spanned(whole.filter(inside), captures)


def steady_windows(forwards: pl.DataFrame, captures: pl.DataFrame) -> pl.DataFrame:
    """Per rank ``rank``, ``start``, ``end``, ``reason``: forwards without the filling and draining of the pipeline.

    On each rank the first forward seen is dropped, and everything from the first incomplete one after it on.  Where
    forwards carry the markers' own numbers, only those that are left on every rank count.
    """
    ordered = forwards.sort("rank", "start_utc_ns", "forward")
    place = pl.int_range(pl.len()).over("rank")
    broken = (~pl.col("whole") & (place > 0)).cast(pl.Int32).cum_sum().over("rank")
    kept = ordered.filter((place > 0) & (broken == 0))
    if (forwards["source"] == "marker").all():
        everywhere = kept.group_by("forward").agg(pl.col("rank").n_unique().alias("on"))
        everywhere = everywhere.filter(pl.col("on") == captures["rank"].n_unique())
        shared = kept.join(everywhere, on="forward", how="semi")
        kept = shared if shared.height else kept
    return _spanned(kept, captures)


def _spanned(forwards: pl.DataFrame, captures: pl.DataFrame) -> pl.DataFrame:
    spans = forwards.group_by("rank").agg(pl.min("start_utc_ns"), pl.max("end_utc_ns"))
    joined = captures.join(spans, on="rank", how="left").sort("rank")
    return joined.select(
        "rank",
        pl.coalesce("start_utc_ns", "start").alias("start"),
        pl.coalesce("end_utc_ns", "end").alias("end"),
        pl.when(pl.col("start_utc_ns").is_null()).then(pl.lit(_WHOLE_CAPTURE)).alias("reason"),
    )
