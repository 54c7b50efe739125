"""Instances of collectives over ranks, and how much of each kernel was waiting: METRICS section 6."""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from nsysk3.analysis.clocks import END_SPREAD_NS, Clocks, Observations
from nsysk3.analysis.comm_events import SYNCHRONISING
from nsysk3.analysis.sequences import Shift, estimate_shift, nearest

Ints = NDArray[np.int64]

# Ends of one instance may scatter this much even on one host.
_SCATTER_NS = 100_000
# Whole instances of one size that it takes to know how fast one can be.
_TO_COMPARE = 20
# An instance ends before the next one of its communicator can: half a duration tells two apart.
_APART = 0.5


def observe_collectives(comm: pl.DataFrame) -> dict[tuple[int, int], list[Observations]]:
    """Clock differences between reports from collectives that both took part in, per pair of reports.

    One rank of each report (the one with most instances) stands for it: ranks of a report share a clock.
    """
    found: dict[tuple[int, int], list[Observations]] = {}
    together = comm.filter(pl.col("group").is_not_null() & pl.col("role").is_in(SYNCHRONISING))
    for _, part in together.group_by("group", "role", maintain_order=True):
        counts = part.group_by("report", "rank").len().sort("len", "rank", descending=[True, False])
        speakers = counts.unique("report", keep="first", maintain_order=True).sort("report")
        ends = {
            report: part.filter(pl.col("rank") == rank)["end"].sort().to_numpy()
            for report, rank in speakers.select("report", "rank").iter_rows()
        }
        reports = sorted(ends)
        for i, a in enumerate(reports):
            for b in reports[i + 1 :]:
                if (seen := observe_ends(ends[a], ends[b])) is not None:
                    found.setdefault((a, b), []).append(seen)
    return found


def observe_ends(a: Ints, b: Ints) -> Observations | None:
    """Matched differences of two sequences of ends, None when nothing ties them together."""
    shift = estimate_shift(a, b)
    return None if shift is None else matched_ends(a, b, shift)


def matched_ends(a: Ints, b: Ints, shift: Shift) -> Observations | None:
    """Differences of the ends that belong together when b's clock is about ``shift`` ahead, None without any."""
    spacing = int(np.median(np.diff(a))) if len(a) > 1 else _SCATTER_NS
    # Drift moves ends away from the median shift; a quarter of the spacing still tells instances apart.
    at = nearest(a + shift.delta_ns, b, max(8 * shift.spread_ns, _SCATTER_NS, spacing // 4))
    met = at >= 0
    return Observations(a[met], b[at[met]] - a[met]) if met.any() else None


def match_collectives(comm: pl.DataFrame, clocks: Clocks, members: pl.DataFrame) -> pl.DataFrame:
    """One row a collective kernel: its instance and its wait.

    Columns: ``event``, ``communicator``, ``role``, ``seq`` (instance in its communicator, by time), ``rank``,
    ``start_utc_ns``, ``end_utc_ns`` (common clock), ``duration_ns``, ``wait_ns``, ``transfer_ns`` (null when the
    instance was seen on one rank only, or is incomplete), ``min_duration_ns`` (the clock-free bound of transfer),
    ``end_spread_ns`` (how far apart the members ended), ``last_rank``, ``bytes`` (of the whole operation),
    ``ranks_seen``, ``ranks`` (members as ``members`` has them, see member_counts, else those that were seen; where
    that has null there may be more),
    ``uncertainty_ns``, ``state`` (``resolved``, ``unresolved``: the wait is below the clock uncertainty,
    ``incomplete``: members were not seen, and the wait is not known, ``unmatched``), ``confidence``.

    An instance is a set of kernels of one communicator that end together on the common clock, which needs no count of
    calls: ranks whose capture was cut or lost kernels simply miss some instances.
    """
    table = comm.filter(pl.col("role").is_in(SYNCHRONISING))
    report = table["report"].to_numpy()
    table = table.with_columns(
        pl.Series("s", clocks.corrected(table["start"].to_numpy(), report)),
        pl.Series("e", clocks.corrected(table["end"].to_numpy(), report)),
        # A kernel without a communicator is alone in one of its own.
        pl.coalesce("group", pl.format("rank {} (no partner found)", "rank")).alias("communicator"),
    )
    table = _instances(table, clocks)
    observed = pl.col("rank").n_unique().over("communicator", "role").cast(pl.Int64)
    known = members.rename({"group": "communicator"}).with_columns(pl.col("members").is_null().alias("more"))
    table = table.join(known, on="communicator", how="left", maintain_order="left")
    table = table.with_columns(pl.max_horizontal(observed, "members").alias("ranks"), pl.col("more").fill_null(False))
    return _waits(table, clocks)


def _instances(table: pl.DataFrame, clocks: Clocks) -> pl.DataFrame:
    table = table.sort("communicator", "role", "e", "rank")
    same = (pl.col("communicator") == pl.col("communicator").shift()) & (pl.col("role") == pl.col("role").shift())
    gap = pl.col("e") - pl.col("e").shift()
    finite = clocks.between[np.isfinite(clocks.between)]
    doubt = int(finite.max(initial=0.0))
    # Between instances a communicator is quiet for a whole duration, save for how far apart ends can lie.
    limit = pl.max_horizontal((pl.col("dur") * _APART).cast(pl.Int64), pl.lit(min(doubt, _SCATTER_NS) + 20_000))
    new = ~same.fill_null(False) | (gap > limit).fill_null(True)
    table = table.with_columns(new.cum_sum().alias("instance"))
    # A rank can be only once in an instance: where one comes twice, two instances lie closer than their ends scatter,
    # and the order on each rank decides, which is right when none of them lost a kernel.
    doubled = table.group_by("instance", "rank").len().filter(pl.col("len") > 1)["instance"].unique()
    table = table.with_columns(pl.col("instance").is_in(doubled.implode()).alias("mixed"))
    if doubled.is_empty():
        return table
    nth = pl.when("mixed").then(pl.int_range(pl.len()).over("instance", "rank")).otherwise(0)
    return table.with_columns(pl.struct("instance", nth).rank("dense").cast(pl.Int64).alias("instance"))


def _doubt(table: pl.DataFrame, clocks: Clocks) -> pl.Series:
    """Per kernel, the uncertainty of its wait: that of the clock of whoever may have arrived last; -1 for no clock.

    A rank of the kernel's own report can seem last, and so beyond doubt, when one of another came a little later.
    """
    report = table["report"].to_numpy()
    doubt = clocks.between[report, table["last_report"].to_numpy()]
    doubt = np.where(np.isfinite(doubt), doubt, -1)
    if table["report"].n_unique() > 1:
        arrival, instance = table["arrival"].to_numpy(), table["instance"].to_numpy()
        latest = table.group_by("instance", "report").agg(pl.col("s").max().alias("latest")).sort("instance")
        others, came = latest["report"].to_numpy(), latest["latest"].to_numpy()
        begins, ends = (np.searchsorted(latest["instance"].to_numpy(), instance, side) for side in ("left", "right"))
        # The first report of every instance, the second...: most instances have one or two, however many the run has.
        for nth in range(int((ends - begins).max(initial=0))):
            rows = np.flatnonzero((ends - begins > max(nth, 1)) & (doubt >= 0))
            at = begins[rows] + nth
            apart = clocks.between[report[rows], others[at]]
            late = np.isfinite(apart) & (came[at] > arrival[rows] - apart)
            doubt[rows] = np.where(late, np.maximum(doubt[rows], apart), doubt[rows])
    return pl.Series("doubt", doubt).cast(pl.Int64)


def _whole() -> pl.Expr:
    """Every member of the instance was seen."""
    return (pl.col("ranks_seen") == pl.col("ranks")) & ~pl.col("more")


def _late_at_most() -> pl.Expr:
    """How long after the last that was seen a member that was not can have arrived.

    Then even the shortest kernel waited for it, by what it lasted longer than whole instances of that size can; null
    where too few of these were seen to know.
    """
    whole = _whole()
    # The communicator's own show that its links are none faster; of all alike there are more to find the fastest in.
    enough = (pl.col("instance").filter(whole).n_unique() >= _TO_COMPARE).over("communicator", "role", "message")
    fastest = pl.col("min_duration_ns").filter(whole).min().over("role", "ranks", "message")
    late = (pl.col("min_duration_ns") + END_SPREAD_NS - fastest).clip(0)
    return pl.when(whole).then(0).when(enough).then(late)


def _waits(table: pl.DataFrame, clocks: Clocks) -> pl.DataFrame:
    key = "instance"
    last = pl.col("s").max().over(key)
    table = table.with_columns(
        last.alias("arrival"),
        pl.col("rank").sort_by("s", "rank").last().over(key).alias("last_rank"),
        pl.col("report").sort_by("s", "rank").last().over(key).alias("last_report"),
        pl.len().over(key).cast(pl.Int64).alias("ranks_seen"),
        pl.col("dur").min().over(key).alias("min_duration_ns"),
        (pl.col("e").max() - pl.col("e").min()).over(key).alias("end_spread_ns"),
        pl.col("nccl_bytes").max().over(key).alias("message"),
    )
    table = table.with_columns(_doubt(table, clocks), _late_at_most().alias("late"))
    alone = (pl.col("ranks_seen") < 2) | (pl.col("doubt") < 0)
    estimate = (pl.col("arrival") - pl.col("s")).clip(0, pl.col("dur"))
    doubt = pl.col("doubt") + pl.col("late")
    # The rest of the kernel would be called transfer, though more of it may have been waiting for who was not seen.
    open_ended = pl.col("late").is_null() | ((pl.col("late") > 0) & (estimate < doubt))
    told = ~alone & ~open_ended
    wait = pl.when(told).then(estimate)
    state = (
        pl.when(alone).then(pl.lit("unmatched"))
        .when(open_ended).then(pl.lit("incomplete"))
        .when((wait > 0) & (wait < doubt)).then(pl.lit("unresolved"))
        .otherwise(pl.lit("resolved"))
    )  # fmt: skip
    whole = _whole()
    confidence = (
        pl.when(alone).then(pl.lit("none"))
        .when(pl.col("mixed")).then(pl.lit("low"))
        .when(whole & (pl.col("group_source") == "payload")).then(pl.lit("high"))
        .when(whole).then(pl.lit("medium"))
        .otherwise(pl.lit("low"))
    )  # fmt: skip
    first = pl.col(key).min().over("communicator", "role")
    gathers = pl.col("role").is_in(["all_gather", "reduce_scatter"])
    return table.select(
        "event", "communicator", "role",
        (pl.col(key) - first).alias("seq"),
        "rank",
        pl.col("s").alias("start_utc_ns"),
        pl.col("e").alias("end_utc_ns"),
        pl.col("dur").alias("duration_ns"),
        wait.alias("wait_ns"),
        (pl.col("dur") - wait).alias("transfer_ns"),
        "min_duration_ns",
        pl.when(~alone).then("end_spread_ns").alias("end_spread_ns"),
        pl.when(told).then("last_rank").alias("last_rank"),
        # NCCL states the share of one rank for gathers and scatters; bandwidth is of the whole.
        pl.when(gathers).then(pl.col("message") * pl.col("ranks")).otherwise("message").alias("bytes"),
        "ranks_seen", "ranks",
        pl.when(told).then(doubt).alias("uncertainty_ns"),
        state.alias("state"),
        confidence.alias("confidence"),
    ).sort("communicator", "role", "seq", "rank")  # fmt: skip
