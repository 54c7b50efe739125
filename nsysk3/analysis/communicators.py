"""Which ranks share a communicator, where no payload says so."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import polars as pl
from numpy.typing import NDArray

from nsysk3.analysis.comm_events import SYNCHRONISING
from nsysk3.analysis.sequences import estimate_shift, nearest

Ints = NDArray[np.int64]

# Two ranks share a communicator when this share of the shorter one's collectives ends with one of the other's.
_TOGETHER = 0.6
# Ends of one instance lie this close together, and much closer than one instance to the next.
_ENDS_WITHIN_NS = (5_000, 200_000)
_OF_SPACING = 0.1


def infer_groups(comm: pl.DataFrame, ranks: pl.DataFrame) -> pl.DataFrame:
    """``comm_table`` with ``group`` filled in for collectives that no payload names, and ``group_source``.

    Ranks whose collectives of one role end together belong together (``group_source`` = ``inferred``, else
    ``payload``); across reports the clocks may differ by any constant.  A rank whose collectives end with nobody's
    keeps a null group: it never finds a partner.  Ranks of different stages (``pp_rank`` of ``ranks``) are never put
    together: stages work to one beat, and over two clocks that looks like ending together.
    """
    source = pl.when(pl.col("group").is_not_null()).then(pl.lit("payload"))
    comm = comm.with_columns(source.alias("group_source"))
    unnamed = comm.filter(pl.col("group").is_null() & pl.col("role").is_in(SYNCHRONISING))
    if unnamed.is_empty():
        return comm
    stage = dict(ranks.select("rank", "pp_rank").iter_rows())
    labels = []
    for (role,), part in unnamed.group_by("role", maintain_order=True):
        sequences = _sequences(part)
        named = comm.filter(pl.col("group").is_not_null() & (pl.col("role") == role))
        joined_to = _payload_groups(sequences, named, stage)
        labels += [(str(role), place[0], group) for place, group in joined_to.items()]
        alone = {place: ends for place, ends in sequences.items() if place not in joined_to}
        for rank, leader in _clusters(alone, stage).items():
            labels.append((str(role), rank, f"{role} group of rank {leader}"))
    found = pl.DataFrame(labels, schema={"role": pl.String, "rank": pl.Int32, "inferred": pl.String}, orient="row")
    joined = comm.join(found, on=["role", "rank"], how="left", maintain_order="left")
    missing = pl.col("group").is_null() & pl.col("inferred").is_not_null()
    return joined.with_columns(
        pl.when(missing).then("inferred").otherwise("group").alias("group"),
        pl.when(missing).then(pl.lit("inferred")).otherwise("group_source").alias("group_source"),
    ).drop("inferred")


def _sequences(part: pl.DataFrame) -> dict[tuple[int, int], Ints]:
    """(rank, report) to the sorted ends of its kernels."""
    found: dict[tuple[int, int], Ints] = {}
    for (rank, report), rows in part.sort("end").group_by("rank", "report", maintain_order=True):
        found[(int(str(rank)), int(str(report)))] = rows["end"].to_numpy()
    return found


def _payload_groups(
    sequences: Mapping[tuple[int, int], Ints], named: pl.DataFrame, stage: Mapping[int, int | None]
) -> dict[tuple[int, int], str]:
    """Ranks without payloads (a process that had no NVTX) in the communicator that other ranks' payloads name."""
    speakers = [(str(group), _sequences(part)) for (group,), part in named.group_by("group", maintain_order=True)]
    found = {}
    for place, ends in sequences.items():
        for group, members in speakers:
            speaker = next((member for member in members if member[1] == place[1]), next(iter(members)))
            other = place[0] not in {rank for rank, _ in members} and not _apart(place, speaker, stage)
            if other and _together(members[speaker], ends, speaker[1] == place[1]):
                found[place] = group
                break
    return found


def _clusters(sequences: Mapping[tuple[int, int], Ints], stage: Mapping[int, int | None]) -> dict[int, int]:
    """Rank to the lowest rank it runs its collectives with; ranks that run with nobody are left out."""
    groups: list[list[tuple[int, int]]] = []
    for place in sorted(sequences):
        for group in groups:
            # One member speaks for its group, the first of the same report if there is one: same clock, no guess.
            speaker = next((member for member in group if member[1] == place[1]), group[0])
            if not _apart(place, speaker, stage) and _together(
                sequences[speaker], sequences[place], speaker[1] == place[1]
            ):
                group.append(place)
                break
        else:
            groups.append([place])
    return {place[0]: group[0][0] for group in groups if len(group) > 1 for place in group}


def _apart(a: tuple[int, int], b: tuple[int, int], stage: Mapping[int, int | None]) -> bool:
    one, other = stage.get(a[0]), stage.get(b[0])
    return one is not None and other is not None and one != other


def _together(a: Ints, b: Ints, one_clock: bool) -> bool:
    delta = 0
    if not one_clock:
        shift = estimate_shift(a, b)
        if shift is None:
            return False
        delta = shift.delta_ns
    spacing = float(np.median(np.diff(a))) if len(a) > 1 else np.inf
    met = int((nearest(a + delta, b, int(np.clip(spacing * _OF_SPACING, *_ENDS_WITHIN_NS))) >= 0).sum())
    return met >= _TOGETHER * min(len(a), len(b))
