"""How many members a communicator really has, though the reports of some may be missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import polars as pl

from nsysk3.analysis.comm_events import SYNCHRONISING
from nsysk3.run.manifest import RankEntry
from nsysk3.trace.load import Roster

_SHOWN = 3


@dataclass(frozen=True)
class Membership:
    """What is known of communicators besides who was seen in them.

    ``listed``: the manifest's entry of each rank of the run; ``all_listed``: every entry, seen or not;
    ``sizes``: ``comm``, ``nranks``, from NCCL payloads; ``stages``: how many, 0 where nobody says.
    """

    listed: Mapping[int, RankEntry] = field(default_factory=dict)
    all_listed: Sequence[RankEntry] = ()
    sizes: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema={"comm": pl.Int64, "nranks": pl.Int64}))
    stages: int = 0

    @classmethod
    def of(cls, run: Roster) -> Membership:
        """What the manifest and the payloads of a run say; a guessed rank is not one of the manifest."""
        entries = {entry.world_rank: entry for entry in run.manifest.ranks} if run.manifest else {}
        named = run.ranks.filter(pl.col("rank_source") != "inferred").select("rank", "world_rank")
        listed = {rank: entries[world] for rank, world in named.iter_rows() if world in entries}
        stages = len({entry.pp for entry in entries.values()}) if len(listed) == run.ranks.height else 0
        return cls(listed, tuple(entries.values()), run.sizes, stages)


def member_counts(comm: pl.DataFrame, known: Membership) -> pl.DataFrame:
    """``group`` and ``members`` of the communicators that are known to have so many.

    A payload says it of its communicator.  The manifest tells of one that takes in every rank seen of a stage, of the
    ranks with one place in all stages, or of the run, that it takes in those that were not seen too.
    """
    together = comm.filter(pl.col("group").is_not_null() & pl.col("role").is_in(SYNCHRONISING))
    stated = together.select("group", "comm").drop_nulls().unique().join(known.sizes, on="comm").select(
        "group", pl.col("nranks").alias("members")
    )  # fmt: skip
    said = set(stated["group"])
    seen = {group: set(ranks) for group, ranks in together.group_by("group").agg(pl.col("rank").unique()).iter_rows()}
    active = set().union(*seen.values())
    found = [
        (group, size)
        for group, ranks in seen.items()
        if group not in said and (size := _of_manifest(ranks, active, known)) is not None
    ]
    inferred = pl.DataFrame(found, schema={"group": pl.String, "members": pl.Int64}, orient="row")
    return pl.concat([stated, inferred]).group_by("group").agg(pl.col("members").max())


def _of_manifest(members: set[int], active: set[int], known: Membership) -> int | None:
    if not members <= known.listed.keys():
        return None
    for place in (_stage, _column, _run):
        places = {place(known.listed[rank]) for rank in members}
        if len(places) == 1:
            peers = {rank for rank in active if rank in known.listed and place(known.listed[rank]) in places}
            if peers == members:
                return sum(place(entry) in places for entry in known.all_listed)
    return None


def _stage(entry: RankEntry) -> object:
    return entry.pp


def _column(entry: RankEntry) -> object:
    return entry.tp


def _run(_: RankEntry) -> object:
    return None


def incomplete_notes(collectives: pl.DataFrame) -> list[str]:
    """One note on communicators of which members were never seen, however many there are."""
    few = (
        collectives.group_by("communicator", maintain_order=True)
        .agg(pl.col("rank").n_unique().alias("seen"), pl.col("ranks").max())
        .filter(pl.col("seen") < pl.col("ranks"))
        .sort("communicator")
    )
    if few.is_empty():
        return []
    each = [f"{seen} of {ranks} members of {name}" for name, seen, ranks in few.head(_SHOWN).iter_rows()]
    more = f" and not all of {few.height - _SHOWN} more communicators" if few.height > _SHOWN else ""
    return [
        f"{', '.join(each)}{more} were seen: who arrived last there is not known, nor how much of their collectives "
        "was waiting"
    ]
