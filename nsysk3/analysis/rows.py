"""Rows of a long table by number and by rank, without the copies of every column that joins and partitions make."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def or_null(index: Ints) -> pl.Series:
    """Row numbers, null for -1."""
    return pl.DataFrame({"at": index}).select(pl.when(pl.col("at") >= 0).then("at")).to_series()


def laid_over(values: pl.DataFrame, rows: pl.Series, height: int) -> pl.DataFrame:
    """``values`` at the given rows of a table of ``height`` rows, null on the others."""
    at = np.full(height, -1)
    at[rows.to_numpy()] = np.arange(values.height)
    return values.select(pl.all().gather(or_null(at)))


def runs(keys: pl.DataFrame) -> tuple[pl.DataFrame, pl.Series]:
    """Neighbouring equal rows taken together: the rows of which each begins a run, and the run of every row.

    Events lie in time order, so that layers and forwards change rarely: what is looked up, grouped or made unique is
    then a few thousand rows and no longer millions.
    """
    new = keys.select(pl.any_horizontal(pl.all().ne_missing(pl.all().shift())) | (pl.int_range(pl.len()) == 0))
    begins = new.to_series()
    return keys.filter(begins), begins.cast(pl.UInt32).cum_sum() - 1


def split(frame: pl.DataFrame, *keys: str) -> dict[tuple[Any, ...], pl.DataFrame]:
    """The rows of each key, in their order: slices where they lie together, else copies."""
    heads, run = runs(frame.select(keys))
    if heads.is_unique().all():
        first = np.flatnonzero(np.diff(run.to_numpy(), prepend=-1)).tolist() if run.len() else []
        return {
            key: frame.slice(low, high - low)
            for key, (low, high) in zip(heads.iter_rows(), pairwise([*first, frame.height]), strict=True)
        }
    return frame.partition_by(keys, as_dict=True, maintain_order=True)


def by_rank(events: pl.DataFrame) -> dict[int, pl.DataFrame]:
    """The rows of each rank."""
    return {rank: rows for (rank,), rows in split(events, "rank").items()}
