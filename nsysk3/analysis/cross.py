"""Everything that needs more than one rank: clocks, instances, pairs, and each communication kernel's wait."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from nsysk3.analysis.bandwidth import with_busbw
from nsysk3.analysis.budget import WAIT_STATES
from nsysk3.analysis.clocks import END_SPREAD_NS, Clocks, align, shifted
from nsysk3.analysis.collectives import match_collectives, observe_collectives
from nsysk3.analysis.comm_events import comm_table
from nsysk3.analysis.communicators import infer_groups
from nsysk3.analysis.intervals import covered, union
from nsysk3.analysis.p2p import match_p2p, observe_p2p, sides, unmatched, waits_of
from nsysk3.analysis.rows import by_rank, laid_over


@dataclass(frozen=True)
class CrossRank:
    """What the ranks of a run say about each other.

    ``events``: on the common clock, with ``wait_ns`` and ``wait_state`` (``wait_collective``, ``wait_upstream``,
    ``wait_downstream``, or ``unresolved``: a wait below the clock uncertainty, or, with a null ``wait_ns``, a kernel
    whose partner was not found, so that its duration is only an upper bound of transfer).  ``collectives``: a row a
    kernel; ``pairs``: a row a P2P message; ``lonely``: P2P kernels without partner, counted, with the reason.
    """

    events: pl.DataFrame
    clocks: Clocks
    collectives: pl.DataFrame
    pairs: pl.DataFrame
    lonely: pl.DataFrame


def cross_rank(events: pl.DataFrame, ranks: pl.DataFrame, reports: int) -> CrossRank:
    """Align the clocks of ``reports`` reports and split the communication of ``events`` into waiting and transfer."""
    comm = infer_groups(comm_table(events))
    halves = sides(comm, ranks)
    observed = observe_collectives(comm)
    for pair, seen in observe_p2p(halves).items():
        observed.setdefault(pair, []).extend(seen)
    middle = (int(events["start"].min()) + int(events["end"].max())) // 2  # type: ignore[arg-type]
    clocks = align(reports, observed, middle)
    collectives = with_busbw(match_collectives(comm, clocks))
    pairs = match_p2p(halves, clocks)
    waits = pl.concat([_collective_waits(collectives), waits_of(pairs)]).cast({"wait_state": WAIT_STATES})
    joined = events.hstack(laid_over(waits.drop("event"), waits["event"], events.height))
    # Drift makes an aligned duration differ by a few ns; the GPU's own is the one that counts.
    spent = pl.col("end") - pl.col("start")
    own = pl.when(pl.col("wait_ns") > spent).then(spent).otherwise("wait_ns")
    split = joined.with_columns(own.alias("wait_ns"))
    hidden = _hidden_waits(split)
    for half in ("send", "recv"):
        mine = hidden.rename({"event": f"{half}_event", "hidden": f"{half}_wait_hidden_ns"})
        pairs = pairs.join(mine, on=f"{half}_event", how="left", maintain_order="left")
    return CrossRank(shifted(split, clocks), clocks, collectives, pairs, unmatched(halves, pairs))


def _hidden_waits(events: pl.DataFrame) -> pl.DataFrame:
    """Per P2P kernel, how much of its wait ran beside compute or fused kernels: ``event``, ``hidden`` (ns)."""
    parts = [pl.DataFrame(schema={"event": pl.Int64, "hidden": pl.Int64})]
    events = events.select(
        pl.int_range(pl.len(), dtype=pl.Int64).alias("event"), "rank", "start", "end", "role", "wait_ns"
    )
    waiting = events.filter((pl.col("role") == "p2p") & pl.col("wait_ns").is_not_null())
    if waiting.is_empty():
        return parts[0]
    ours = by_rank(events.filter(pl.col("role").is_in(["compute", "fused"])))
    for (rank,), waits in waiting.group_by("rank"):
        work = ours.get(int(str(rank)), events.clear())
        busy = union(work["start"].to_numpy(), work["end"].to_numpy())
        start = waits["start"].to_numpy()
        hidden = covered(busy, start + waits["wait_ns"].to_numpy()) - covered(busy, start)
        parts.append(pl.DataFrame({"event": waits["event"], "hidden": hidden}))
    return pl.concat(parts)


def _collective_waits(collectives: pl.DataFrame) -> pl.DataFrame:
    state = pl.when(pl.col("state") == "resolved").then(pl.lit("wait_collective")).otherwise(pl.lit("unresolved"))
    return collectives.select(pl.col("event").cast(pl.Int64), "wait_ns", state.alias("wait_state"))


def matched_counts(found: CrossRank) -> pl.DataFrame:
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


def findings(found: CrossRank) -> list[str]:
    """Where the two estimators of transfer disagree by more than clocks and one host's scatter can explain."""
    members = found.collectives.filter((pl.col("state") != "unmatched") & (pl.col("role") != "all_to_all"))
    odd = members.filter(pl.col("end_spread_ns") > pl.col("uncertainty_ns") + 2 * END_SPREAD_NS)
    notes = []
    for communicator, role, part in ((key[0], key[1], rows) for key, rows in odd.group_by("communicator", "role")):
        instances = part["seq"].n_unique()
        worst = int(part["end_spread_ns"].max() or 0)  # type: ignore[arg-type]
        every = members.filter((pl.col("communicator") == communicator) & (pl.col("role") == role))["seq"].n_unique()
        notes.append(
            f"{instances} of {every} {role} instances of {communicator} do not end together (up to "
            f"{worst / 1e3:,.0f} us apart): their wait and transfer are less certain than stated"
        )
    return sorted(notes)
