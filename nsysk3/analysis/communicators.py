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


def infer_groups(comm: pl.DataFrame) -> pl.DataFrame:
    """``comm_table`` with ``group`` filled in for collectives that no payload names, and ``group_source``.

    Ranks whose collectives of one role end together belong together (``group_source`` = ``inferred``, else
    ``payload``); across reports the clocks may differ by any constant.  A rank whose collectives end with nobody's
    keeps a null group: it never finds a partner.
    """
    source = pl.when(pl.col("group").is_not_null()).then(pl.lit("payload"))
    comm = comm.with_columns(source.alias("group_source"))
    unnamed = comm.filter(pl.col("group").is_null() & pl.col("role").is_in(SYNCHRONISING))
    if unnamed.is_empty():
        return comm
    labels = []
    for (role,), part in unnamed.group_by("role", maintain_order=True):
        sequences: dict[tuple[int, int], Ints] = {}
        for (rank, report), rows in part.sort("end").group_by("rank", "report", maintain_order=True):
            sequences[(int(str(rank)), int(str(report)))] = rows["end"].to_numpy()
        for rank, leader in _clusters(sequences).items():
            labels.append((str(role), rank, f"{role} group of rank {leader}"))
    named = pl.DataFrame(labels, schema={"role": pl.String, "rank": pl.Int32, "inferred": pl.String}, orient="row")
    joined = comm.join(named, on=["role", "rank"], how="left", maintain_order="left")
    missing = pl.col("group").is_null() & pl.col("inferred").is_not_null()
    return joined.with_columns(
        pl.when(missing).then("inferred").otherwise("group").alias("group"),
        pl.when(missing).then(pl.lit("inferred")).otherwise("group_source").alias("group_source"),
    ).drop("inferred")


def _clusters(sequences: Mapping[tuple[int, int], Ints]) -> dict[int, int]:
    """Rank to the lowest rank it runs its collectives with; ranks that run with nobody are left out."""
    groups: list[list[tuple[int, int]]] = []
    for place in sorted(sequences):
        for group in groups:
            # One member speaks for its group, the first of the same report if there is one: same clock, no guess.
            speaker = next((member for member in group if member[1] == place[1]), group[0])
            if _together(sequences[speaker], sequences[place], speaker[1] == place[1]):
                group.append(place)
                break
        else:
            groups.append([place])
    return {place[0]: group[0][0] for group in groups if len(group) > 1 for place in group}


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
