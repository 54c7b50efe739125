"""Everything that needs more than one rank: clocks, instances, pairs, and each communication kernel's wait."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from nsysk3.analysis.bandwidth import with_busbw
from nsysk3.analysis.budget import WAIT_STATES
from nsysk3.analysis.clocks import END_SPREAD_NS, Clocks, align, shifted
from nsysk3.analysis.collectives import match_collectives, observe_collectives
from nsysk3.analysis.comm_events import comm_rows, comm_table
from nsysk3.analysis.communicators import infer_groups
from nsysk3.analysis.intervals import covered, union
from nsysk3.analysis.members import Membership, incomplete_notes, member_counts
from nsysk3.analysis.p2p import match_p2p, observe_p2p, sides, unmatched, waits_of
from nsysk3.analysis.partnerless import partnerless
from nsysk3.analysis.rows import by_rank, laid_over

_MESSAGES = pl.Enum(["activation", "result", "other"])


@dataclass(frozen=True)
class Matched:
    """What the ranks of a run say about each other, of nothing but communication.

    ``collectives``: a row a kernel; ``pairs``: a row a P2P message; both name kernels by the number of their row in
    what was matched.  ``waits``: for each of those rows ``wait_ns``, ``wait_state`` (``wait_collective``,
    ``wait_upstream``, ``wait_downstream``, or ``unresolved``: a wait below the clock uncertainty, or, with a null
    ``wait_ns``, a kernel whose partner was not found, so that its duration is only an upper bound of transfer) and
    ``receive``, the kind of message that it received, null where that is not known.  ``lonely``: P2P kernels without
    partner, counted, with the reason.  ``unsplit``: see partnerless.  ``stages``: how many there are, seen or not, 0
    where nobody says.
    """

    clocks: Clocks
    collectives: pl.DataFrame
    pairs: pl.DataFrame
    lonely: pl.DataFrame
    unsplit: pl.DataFrame
    waits: pl.DataFrame
    stages: int


@dataclass(frozen=True)
class CrossRank:
    """A run whose communication is matched.

    ``events``: on the common clock, with ``wait_ns`` and ``wait_state``; ``collectives``, ``pairs`` and ``lonely`` as
    in Matched, but for the number of a kernel, which is that of its row in ``events``.
    """

    events: pl.DataFrame
    clocks: Clocks
    collectives: pl.DataFrame
    pairs: pl.DataFrame
    lonely: pl.DataFrame


def match(
    rows: pl.DataFrame, ranks: pl.DataFrame, reports: int, middle: int, known: Membership | None = None
) -> Matched:
    """Align the clocks of ``reports`` reports and split communication (comm_rows) into waiting and transfer.

    ``middle``: a time in the middle of the run, at which clock offsets are stated.  ``known``: of the communicators,
    besides who was seen.
    """
    known = known or Membership()
    comm = infer_groups(comm_table(rows), ranks)
    halves = sides(comm, ranks, known.stages, whole=known.whole)
    observed = observe_collectives(comm)
    for pair, seen in observe_p2p(halves).items():
        observed.setdefault(pair, []).extend(seen)
    clocks = align(reports, observed, middle)
    collectives = with_busbw(match_collectives(comm, clocks, member_counts(comm, known)))
    pairs = match_p2p(halves, clocks)
    waits = pl.concat([_collective_waits(collectives), waits_of(pairs)]).cast({"wait_state": WAIT_STATES})
    received = pairs.select(pl.col("recv_event").alias("event"), pl.col("kind").cast(_MESSAGES).alias("receive"))
    received = received.unique("event", keep="first", maintain_order=True)
    laid = laid_over(waits.drop("event"), waits["event"], rows.height)
    laid = laid.hstack(laid_over(received.drop("event"), received["event"], rows.height))
    unsplit = partnerless(ranks, collectives, halves, pairs)
    return Matched(clocks, collectives, pairs, unmatched(halves, pairs), unsplit, laid, known.stages)


def with_waits(events: pl.DataFrame, rows: pl.Series, waits: pl.DataFrame) -> pl.DataFrame:
    """``events`` with ``waits`` (Matched.waits) at the given ``rows``."""
    joined = events.hstack(laid_over(waits, rows, events.height))
    # Drift makes an aligned duration differ by a few ns; the GPU's own is the one that counts.
    spent = pl.col("end") - pl.col("start")
    return joined.with_columns(pl.when(pl.col("wait_ns") > spent).then(spent).otherwise("wait_ns").alias("wait_ns"))


def hidden_waits(events: pl.DataFrame, rows: pl.Series) -> pl.Series:
    """Per event at ``rows``: how much of a P2P kernel's wait ran beside compute or fused kernels (ns), else null."""
    read = ("rank", "start", "end", "role", "wait_ns")
    waiting = events.select(read)[rows].with_row_index("at")
    waiting = waiting.filter((pl.col("role") == "p2p") & pl.col("wait_ns").is_not_null())
    hidden = np.zeros(waiting.height, np.int64)
    if waiting.height:
        ours = by_rank(events.select(read).filter(pl.col("role").is_in(["compute", "fused"])))
        whose = waiting["rank"].to_numpy()
        start, wait = waiting["start"].to_numpy(), waiting["wait_ns"].to_numpy()
        for rank in np.unique(whose).tolist():
            work = ours.get(rank, events.clear())
            busy = union(work["start"].to_numpy(), work["end"].to_numpy())
            mine = whose == rank
            hidden[mine] = covered(busy, start[mine] + wait[mine]) - covered(busy, start[mine])
    return laid_over(pl.DataFrame({"hidden": hidden}), waiting["at"], rows.len())["hidden"]


def with_hidden(pairs: pl.DataFrame, hidden: pl.Series) -> pl.DataFrame:
    """P2P messages with ``send_wait_hidden_ns`` and ``recv_wait_hidden_ns``; ``hidden``: by the number of a kernel."""
    return pairs.with_columns(
        hidden.gather(pairs[f"{half}_event"]).alias(f"{half}_wait_hidden_ns") for half in ("send", "recv")
    )


def middle_of(first: int, last: int) -> int:
    """The time that clock offsets of a run are stated at."""
    return (first + last) // 2


def cross_rank(events: pl.DataFrame, ranks: pl.DataFrame, reports: int, known: Membership | None = None) -> CrossRank:
    """Match the communication of ``events`` of ``reports`` reports, and put them on one clock."""
    rows = comm_rows(events)
    middle = middle_of(int(events["start"].min()), int(events["end"].max()))  # type: ignore[arg-type]
    found = match(rows, ranks, reports, middle, known)
    split = with_waits(events, rows["row"], found.waits.drop("receive"))
    pairs = with_hidden(found.pairs, hidden_waits(split, rows["row"]))
    at = {name: rows["row"].gather(pairs[name]).cast(pl.Int64).alias(name) for name in ("send_event", "recv_event")}
    collectives = found.collectives.with_columns(rows["row"].gather(found.collectives["event"]).alias("event"))
    return CrossRank(
        shifted(split, found.clocks), found.clocks, collectives, pairs.with_columns(*at.values()), found.lonely
    )


def _collective_waits(collectives: pl.DataFrame) -> pl.DataFrame:
    state = pl.when(pl.col("state") == "resolved").then(pl.lit("wait_collective")).otherwise(pl.lit("unresolved"))
    return collectives.select(pl.col("event").cast(pl.Int64), "wait_ns", state.alias("wait_state"))


def matched_counts(found: Matched) -> pl.DataFrame:
    """How much of the communication found its partners: ``role``, ``matched``, ``unmatched`` kernels."""
    lone = pl.col("state") == "unmatched"
    collective = found.collectives.group_by("role").agg(
        (~lone).sum().cast(pl.Int64).alias("matched"), lone.sum().cast(pl.Int64).alias("unmatched")
    )
    p2p = pl.DataFrame(
        {"role": ["p2p"], "matched": [2 * found.pairs.height], "unmatched": [int(found.lonely["count"].sum())]},
        schema={"role": pl.String, "matched": pl.Int64, "unmatched": pl.Int64},
    )
    return pl.concat([collective, p2p.filter(pl.col("matched") + pl.col("unmatched") > 0)]).sort("role")


def findings(found: Matched) -> list[str]:
    """Members that were not seen, and estimators of transfer that disagree by more than clocks and scatter explain."""
    members = found.collectives.filter(pl.col("uncertainty_ns").is_not_null() & (pl.col("role") != "all_to_all"))
    odd = members.filter(pl.col("end_spread_ns") > pl.col("uncertainty_ns") + 2 * END_SPREAD_NS)
    notes = incomplete_notes(found.collectives)
    for communicator, role, part in ((key[0], key[1], rows) for key, rows in odd.group_by("communicator", "role")):
        instances = part["seq"].n_unique()
        worst = int(part["end_spread_ns"].max() or 0)  # type: ignore[arg-type]
        every = members.filter((pl.col("communicator") == communicator) & (pl.col("role") == role))["seq"].n_unique()
        notes.append(
            f"{instances} of {every} {role} instances of {communicator} do not end together (up to "
            f"{worst / 1e3:,.0f} us apart): their wait and transfer are less certain than stated"
        )
    return sorted(notes)
