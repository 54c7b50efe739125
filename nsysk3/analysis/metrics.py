"""Per-rank numbers over one window: METRICS section 4."""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

from nsysk3.analysis.budget import WAITS, Budget, time_budget
from nsysk3.analysis.intervals import Intervals
from nsysk3.analysis.partnerless import where_split
from nsysk3.analysis.rows import by_rank
from nsysk3.analysis.windows import within
from nsysk3.classify import COMM_ROLES

UNCLASSIFIED = "UNCLASSIFIED"
NEEDS_KERNELS = (
    "compute_ns", "comm_ns", "fused_ns", "overlap_ns", "exposed_comm_ns", "allreduce_count", "allreduce_total_ns",
    "p2p_count", "p2p_total_ns",
)  # fmt: skip
WAIT_SUMS = (*(f"{state}_ns" for state in WAITS), "transfer_ns", "unresolved_ns")
SPLITS = ("exposed_wait_ns", "exposed_transfer_ns", "exposed_unresolved_ns", "overlap_wait_ns", "overlap_transfer_ns")


def in_window(events: pl.DataFrame, windows: pl.DataFrame) -> pl.DataFrame:
    """Events that start inside their rank's window: what counts, sums and percentiles are taken over."""
    # Half of the columns: every table below filters and groups these rows again.
    read = (
        "rank", "stream", "start", "end", "kind", "role", "category", "name_id", "wait_ns", "wait_state", "layer",
        "module", "forward", "layer_source", "reason", "collective_kind", "api_start",
    )  # fmt: skip
    return within(events.select(name for name in read if name in events.columns), windows, "rank", "start")


def budgets(
    events: pl.DataFrame, windows: pl.DataFrame, stage_gaps: dict[int, Intervals] | None = None
) -> dict[int, Budget]:
    """The time budget of every rank; ``events`` are all events, also those that cross a window's edge."""
    read = ("rank", "start", "end", "role", "api_end", "wait_ns", "wait_state")
    events = events.select(name for name in read if name in events.columns)
    own, empty = by_rank(events), events.clear()
    return {
        rank: time_budget(own.get(rank, empty), low, high, stage_gaps=(stage_gaps or {}).get(rank))
        for rank, low, high in windows.select("rank", "start", "end").iter_rows()
    }


def _duration() -> pl.Expr:
    return pl.col("end") - pl.col("start")


def role_table(counted: pl.DataFrame) -> pl.DataFrame:
    """Per rank and role: ``count``, ``total_ns`` and the percentiles of duration, waiting included."""
    return _statistics(counted, ["rank", "role"])


def category_table(counted: pl.DataFrame) -> pl.DataFrame:
    """Per rank, role and category: the same."""
    return _statistics(counted, ["rank", "role", "category"])


def kernel_statistics(counted: pl.DataFrame) -> pl.DataFrame:
    """Per rank and kernel (``name_id``): the same."""
    return _statistics(counted.filter(pl.col("kind") == "kernel"), ["rank", "name_id", "role", "category"])


def kernel_table(table: pl.DataFrame, names: pl.DataFrame) -> pl.DataFrame:
    """kernel_statistics with ``name``, the demangled symbol, and ``short_name``; most time first on each rank."""
    named = table.join(names.select("name_id", "short_name", "name"), on="name_id", how="left").drop("name_id")
    front = ["rank", "name", "short_name", "role", "category"]
    return named.select(*front, pl.exclude(*front)).sort("rank", "total_ns", "name", descending=[False, True, False])


def _statistics(events: pl.DataFrame, keys: list[str]) -> pl.DataFrame:
    spent = _duration()
    percentiles = [spent.quantile(q / 100, "linear").alias(f"p{q}_ns") for q in (50, 95, 99)]
    return (
        events.group_by(keys)
        .agg(
            pl.len().cast(pl.Int64).alias("count"),
            spent.sum().alias("total_ns"),
            *percentiles,
            spent.max().alias("max_ns"),
        )
        # After the grouping: a handful of rows, where before there were millions.
        .with_columns(pl.col(pl.Categorical).cast(pl.String))
        .sort(keys)
    )


def count_sums(counted: pl.DataFrame) -> pl.DataFrame:
    """One row a rank with work in its window: counts, sums and percentiles over its kernels, for rank_table."""
    spent = _duration()
    reduced = counted.filter(pl.col("role") == "allreduce")
    allreduce = reduced.group_by("rank").agg(
        pl.len().cast(pl.Int64).alias("allreduce_count"),
        spent.sum().alias("allreduce_total_ns"),
        *[spent.quantile(q / 100, "linear").alias(f"allreduce_p{q}_ns") for q in (50, 95, 99)],
    )
    p2p = counted.filter(pl.col("role") == "p2p").group_by("rank").agg(
        pl.len().cast(pl.Int64).alias("p2p_count"), spent.sum().alias("p2p_total_ns")
    )  # fmt: skip
    is_unknown = pl.col("category") == UNCLASSIFIED
    kernels = counted.filter(pl.col("kind") == "kernel").group_by("rank").agg(
        pl.len().cast(pl.Int64).alias("kernel_count"),
        spent.sum().alias("kernel_total_ns"),
        spent.filter(is_unknown).sum().alias("_unknown_ns"),
    )  # fmt: skip
    table = counted.select("rank").unique()
    for part in (allreduce, p2p, kernels, wait_sums(counted)):
        table = table.join(part, on="rank", how="left")
    return table.sort("rank")


def rank_table(
    ranks: pl.DataFrame,
    windows: pl.DataFrame,
    sums: pl.DataFrame,
    by_rank: Mapping[int, Budget],
    stability: pl.DataFrame,
    unsplit: pl.DataFrame,
) -> pl.DataFrame:
    """One row a rank, the columns of RankMetrics.

    ``sums``: count_sums; ``stability``: ``rank``, ``stable``, ``reason``, ``coverage``; ``unsplit``: see partnerless.
    """
    numbers = (
        "window_ns", "compute_ns", "comm_ns", "fused_ns", "copy_ns", "graph_ns", "overlap_ns", "exposed_comm_ns",
        "idle_ns", "stage_idle_ns", *SPLITS,
    )  # fmt: skip
    spans = pl.DataFrame(
        {"rank": list(by_rank), **{n: [getattr(b, n) for b in by_rank.values()] for n in numbers}},
        schema={"rank": pl.Int32, **dict.fromkeys(numbers, pl.Int64)},
    )
    table = ranks
    for part in (spans, stability, sums, unsplit):
        table = table.join(part, on="rank", how="left")
    counts = ("allreduce_count", "allreduce_total_ns", "p2p_count", "p2p_total_ns", "kernel_count", "kernel_total_ns")
    starts = windows.select("rank", pl.col("start").alias("window_start_utc_ns"))
    return (
        table.join(starts, on="rank", how="left")
        .with_columns(
            # A count of none is a measured zero, a percentile of none is not a number.
            *[pl.col(name).fill_null(0) for name in counts],
            share("_unknown_ns", "kernel_total_ns").alias("unclassified_share"),
            pl.col("report_name").alias("report"),
        )
        .with_columns(
            # A rank without communication has waited for nobody; one whose partners are unknown may have.
            *[pl.when(pl.col("_any").is_null()).then(0).otherwise(name).alias(name) for name in WAIT_SUMS],
            *[pl.when(pl.col("_any").fill_null(True)).then(pl.col(name)).alias(name) for name in SPLITS],
        )
        .with_columns(where_split(f"{state}_ns", state) for state in WAITS)
        .with_columns(
            pl.when(~_opaque()).then(pl.col(name)).alias(name) for name in (*NEEDS_KERNELS, *WAIT_SUMS, *SPLITS)
        )
        .with_columns(
            share("overlap_ns", "comm_ns").alias("overlap_ratio"),
            share("exposed_comm_ns", "window_ns").alias("exposed_comm_share"),
        )
        .sort("rank")
    )


def _opaque() -> pl.Expr:
    """Ranks that show nothing but whole-graph replays: what ran inside is unknown, which is not zero."""
    return (pl.col("kernel_count") == 0) & (pl.col("graph_ns") > 0)


def wait_sums(counted: pl.DataFrame) -> pl.DataFrame:
    """Per rank, what its communication kernels spent: ``rank`` and the columns of WAIT_SUMS.

    ``transfer_ns`` is over kernels whose partners were found; ``unresolved_ns`` is the rest, so that the five add up to
    the summed duration of the rank's communication kernels.  All null on a rank whose communication found no partner.
    """
    spent, wait = _duration(), pl.col("wait_ns")
    known = wait.is_not_null()
    comm = counted.filter(pl.col("role").is_in(COMM_ROLES))
    table = comm.group_by("rank").agg(
        known.any().alias("_any"),
        *[wait.filter(pl.col("wait_state") == state).sum().alias(f"{state}_ns") for state in WAITS],
        (spent - wait).filter(known).sum().alias("transfer_ns"),
        (spent.filter(~known).sum() + wait.filter(pl.col("wait_state") == "unresolved").sum()).alias("unresolved_ns"),
    )
    return table.select("rank", *[pl.when("_any").then(pl.col(name)).alias(name) for name in WAIT_SUMS], "_any")


def share(part: str, whole: str) -> pl.Expr:
    """``part / whole``, null where the whole is empty."""
    return pl.when(pl.col(whole) > 0).then(pl.col(part) / pl.col(whole))
