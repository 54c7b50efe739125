"""The events of one moment of the run, few enough to draw."""

from __future__ import annotations

import polars as pl

from nsysk3.analysis.rows import laid_over
from nsysk3.analysis.windows import within
from nsysk3.run.words import counted

MAX_ROWS = 100_000
_WITHOUT_FORWARDS = 2_000
_DRAWN = (
    "rank", "stream", "start", "end", "name_id", "role", "category", "layer", "forward", "wait_ns", "wait_state",
)  # fmt: skip


def forward_spans(forwards: pl.DataFrame, windows: pl.DataFrame) -> tuple[pl.DataFrame | None, str]:
    """What to draw, ``rank``, ``low``, ``high``, and a sentence that says it.

    The middle whole forward of every rank (the same micro-batch on all of them), its boundary waits included; None
    without forwards, when it is the middle of each window.
    """
    whole = forwards.filter("whole").join(windows.select("rank", "start", "end"), on="rank")
    whole = whole.filter((pl.col("start_utc_ns") >= pl.col("start")) & (pl.col("end_utc_ns") <= pl.col("end")))
    if whole.is_empty():
        return None, f"no forwards were found: the middle {_WITHOUT_FORWARDS:,} events of each rank"
    shared = whole.group_by("forward").agg(pl.col("rank").n_unique().alias("on")).sort("forward")
    everywhere = shared.filter(pl.col("on") == shared["on"].max())["forward"].to_list()
    chosen = everywhere[len(everywhere) // 2]
    mine = whole.filter(pl.col("forward") == chosen).select(
        "rank", pl.col("start_utc_ns").alias("low"), pl.col("end_utc_ns").alias("high")
    )
    return mine, f"forward {chosen} on {counted(mine.height, 'rank')}"


def draw(
    events: pl.DataFrame, comm: pl.Series, spans: pl.DataFrame | None, windows: pl.DataFrame, most: int
) -> tuple[pl.DataFrame, int]:
    """The events to draw, of some ranks, and how many there are; the ``most`` longest of a rank that has more.

    ``comm``: rows of the communication events; its numbers come back as ``event``.
    """
    spans = _middles(events, windows) if spans is None else spans
    times = events.select("rank", "start", "end").join(spans, on="rank", how="left", maintain_order="left")
    chosen = times.select((pl.col("end") > pl.col("low")) & (pl.col("start") < pl.col("high"))).to_series()
    event = laid_over(
        pl.DataFrame({"event": pl.int_range(comm.len(), dtype=pl.UInt32, eager=True)}), comm, events.height
    )
    drawn = events.select(_DRAWN).hstack(event).filter(chosen)
    place = (pl.col("end") - pl.col("start")).rank("ordinal", descending=True).over("rank")
    kept = drawn.filter(place <= most) if drawn.height > most else drawn
    return kept.with_columns(pl.col("role", "category", "wait_state").cast(pl.String)), drawn.height


def timeline_table(
    drawn: pl.DataFrame, found: int, names: pl.DataFrame, collectives: pl.DataFrame, said: str
) -> tuple[pl.DataFrame, str]:
    """What is drawn and the sentence that says which.

    ``drawn``: of all ranks, with the run's numbers of ``event``; ``found``: how many there were.  Columns: ``rank``,
    ``stream``, ``start_ns``, ``end_ns`` (after the first event drawn), ``start_utc_ns``, ``name``, ``role``,
    ``category``, ``layer``, ``forward``, ``wait_ns``, ``wait_state``, ``communicator``, ``seq``.
    """
    if drawn.height < found:
        said += f"; of {found:,} events the {drawn.height:,} longest of their ranks are drawn"
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
            "role", "category", "layer", "forward", "wait_ns", "wait_state", "communicator", "seq",
        )
        .sort("rank", "stream", "start_ns", "end_ns", "name")
    )  # fmt: skip
    return table, said


def _middles(events: pl.DataFrame, windows: pl.DataFrame) -> pl.DataFrame:
    middle = within(events.select("rank", "start"), windows, "rank", "start")
    place = (pl.int_range(pl.len()) - pl.len() // 2).abs().over("rank")
    near = middle.filter(place <= _WITHOUT_FORWARDS // 2)
    return near.group_by("rank").agg(pl.col("start").min().alias("low"), pl.col("start").max().alias("high"))
