"""The events of one moment of the run, few enough to draw."""

from __future__ import annotations

import polars as pl

from nsysk3.analysis.windows import within

MAX_ROWS = 100_000
_WITHOUT_FORWARDS = 2_000


def timeline_table(
    events: pl.DataFrame,
    names: pl.DataFrame,
    forwards: pl.DataFrame,
    collectives: pl.DataFrame,
    windows: pl.DataFrame,
) -> tuple[pl.DataFrame, str]:
    """Events to draw and a sentence that says which.

    The middle whole forward of every rank (the same micro-batch on all of them), its boundary waits included; without
    forwards the middle of the window.  Columns: ``rank``, ``stream``, ``start_ns``, ``end_ns`` (after the first event
    drawn), ``start_utc_ns``, ``name``, ``role``, ``category``, ``layer``, ``forward``, ``wait_ns``, ``wait_state``,
    ``communicator``, ``seq``.  Of more than MAX_ROWS events the longest are kept.
    """
    spans, said = _spans(events, forwards, windows)
    times = events.select("rank", "start", "end").join(spans, on="rank", how="left", maintain_order="left")
    chosen = times.select((pl.col("end") > pl.col("low")) & (pl.col("start") < pl.col("high"))).to_series()
    drawn = events.with_row_index("event").filter(chosen)
    if drawn.height > MAX_ROWS:
        said += f"; of {drawn.height:,} events the {MAX_ROWS:,} longest are drawn"
        drawn = drawn.sort(pl.col("end") - pl.col("start"), descending=True).head(MAX_ROWS)
    instances = collectives.select("event", "communicator", "seq")
    origin = drawn["start"].min()
    table = (
        drawn.join(names.select("name_id", "short_name"), on="name_id", how="left")
        .join(instances, on="event", how="left")
        .select(
            "rank", "stream",
            (pl.col("start") - origin).alias("start_ns"),
            (pl.col("end") - origin).alias("end_ns"),
            pl.col("start").alias("start_utc_ns"),
            pl.col("short_name").str.slice(0, 200).alias("name"),
            pl.col("role").cast(pl.String),
            pl.col("category").cast(pl.String),
            "layer", "forward", "wait_ns", pl.col("wait_state").cast(pl.String), "communicator", "seq",
        )
        .sort("rank", "stream", "start_ns")
    )  # fmt: skip
    return table, said


def _spans(events: pl.DataFrame, forwards: pl.DataFrame, windows: pl.DataFrame) -> tuple[pl.DataFrame, str]:
    """``rank``, ``low``, ``high``: what to draw of each rank."""
    whole = forwards.filter("whole").join(windows.select("rank", "start", "end"), on="rank")
    whole = whole.filter((pl.col("start_utc_ns") >= pl.col("start")) & (pl.col("end_utc_ns") <= pl.col("end")))
    if whole.height:
        shared = whole.group_by("forward").agg(pl.col("rank").n_unique().alias("on")).sort("forward")
        everywhere = shared.filter(pl.col("on") == shared["on"].max())["forward"].to_list()
        chosen = everywhere[len(everywhere) // 2]
        mine = whole.filter(pl.col("forward") == chosen).select(
            "rank", pl.col("start_utc_ns").alias("low"), pl.col("end_utc_ns").alias("high")
        )
        return mine, f"forward {chosen} on {mine.height} ranks"
    middle = within(events.select("rank", "start"), windows, "rank", "start")
    place = (pl.int_range(pl.len()) - pl.len() // 2).abs().over("rank")
    near = middle.filter(place <= _WITHOUT_FORWARDS // 2)
    spans = near.group_by("rank").agg(pl.col("start").min().alias("low"), pl.col("start").max().alias("high"))
    return spans, f"no forwards were found: the middle {_WITHOUT_FORWARDS:,} events of each rank"
