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

    ``listed``: the manifest's or the user's map's entry of each rank of the run; ``all_listed``: every entry, seen or
    not; ``sizes``: ``comm``, ``nranks``, from NCCL payloads; ``stages``: how many, 0 where nobody says; ``whole``: no
    rank of the run is missing, as far as anybody knows.
    """

    listed: Mapping[int, RankEntry] = field(default_factory=dict)
    all_listed: Sequence[RankEntry] = ()
    sizes: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema={"comm": pl.Int64, "nranks": pl.Int64}))
    stages: int = 0
    whole: bool = True

    @classmethod
    def of(cls, run: Roster) -> Membership:
        """What the manifest, the map and the payloads of a run say; a guessed rank is not one of theirs."""
        if run.unplaced:
            # The layout may still be told, and each rank's stage by itself.
            topology = run.manifest.topology if run.manifest else None
            staged = run.ranks["pp_rank"].null_count() == 0
            return cls(sizes=run.sizes, stages=topology.pp if topology and staged else 0, whole=False)
        entries = {entry.world_rank: entry for entry in run.listed}
        named = run.ranks.filter(pl.col("rank_source") != "inferred").select("rank", "world_rank")
        listed = {rank: entries[world] for rank, world in named.iter_rows() if world in entries}
        every = len(listed) == run.ranks.height
        stages = len({entry.pp for entry in entries.values()}) if every else 0
        return cls(listed, tuple(entries.values()), run.sizes, stages, not every or len(entries) == len(listed))


def member_counts(comm: pl.DataFrame, known: Membership) -> pl.DataFrame:
    """``group`` and ``members``: how many a communicator has, null where ranks that are missing may be among them.

    Those of which nobody says it have no row, as long as no rank is missing.
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
    sizes = [(group, _of_manifest(ranks, active, known)) for group, ranks in seen.items() if group not in said]
    found = [(group, size) for group, size in sizes if size is not None or not known.whole]
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
    """One note on communicators of which members were never seen, and one on those that may have more."""
    each = (
        collectives.group_by("communicator")
        .agg(
            pl.col("rank").n_unique().alias("seen"), pl.col("ranks").max(),
            ((pl.col("state") == "incomplete") & (pl.col("ranks_seen") == pl.col("ranks"))).any().alias("open"),
        )
        .sort("communicator")
    )  # fmt: skip
    few, unsure = each.filter(pl.col("seen") < pl.col("ranks")), each.filter("open")
    unknown = "who arrived last there is not known, nor how much of their collectives was waiting"
    notes = []
    if few.height:
        named = [f"{seen} of {ranks} members of {name}" for name, seen, ranks, _ in few.head(_SHOWN).iter_rows()]
        more = f" and not all of {few.height - _SHOWN} more communicators" if few.height > _SHOWN else ""
        notes.append(f"{', '.join(named)}{more} were seen: {unknown}")
    if unsure.height:
        more = f" and {unsure.height - _SHOWN} more communicators" if unsure.height > _SHOWN else ""
        named = unsure["communicator"].head(_SHOWN).to_list()
        notes.append(f"ranks are missing and may be members of {', '.join(named)}{more}: {unknown}")
    return notes
