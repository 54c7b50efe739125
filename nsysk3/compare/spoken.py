"""Which ranks a number stands for: all stable ones, or nearly all of every stage; who is left out is told."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np
import polars as pl

from nsysk3.compare.model import Layout
from nsysk3.compare.statistics import Samples
from nsysk3.run.words import ranks_in_words

# Of every stage's stable ranks; with fewer than ten a stage that is all of them.  A median moves little for the rest.
ENOUGH = 0.9
CUT_FORWARDS = "the window holds forwards that are not whole: analyze with --window prefill"
SOME_STAGES = "only some of the stages tell it"
NO_STABLE = "no stable rank of "
NOT_ALL_STAGES = f"{NO_STABLE}some stages, and which is not known"
NO_WALL_TIME = "no wall time of the run"
_CUT_ONE = "its window holds forwards that are not whole: analyze with --window prefill"
_CUT_SOME = "their windows hold forwards that are not whole: analyze with --window prefill"
# Longest over shortest window of a run's stages: beyond it their median is not how long the run took.
_UNEVEN = 1.1
_LONG_NS = 100_000_000
# Stretches of ranks in a sentence.
SHOWN_RANKS = 3


def of_the_run(samples: Samples, stable: pl.DataFrame) -> bool:
    """Whether enough ranks of every stage have a value: stages do different work, and ranks of one are not alike."""
    told = _told(samples)
    if not set(stable["rank"].to_list()).difference(told):
        return True
    return bool((stable.group_by("stage").agg(pl.col("rank").is_in(told).mean())["rank"] >= ENOUGH).all())


def without_stable(seen: Iterable[int | None], stable: pl.DataFrame, layout: Layout) -> str | None:
    """Which stages, of all ranks of the run (``seen``) and of its layout, no stable rank is of; None: none of them."""
    told = {stage for stage in stable["stage"].to_list() if stage >= 0}
    every = {stage for stage in seen if stage is not None}
    per_stage = layout.tp or 1
    # Fewer ranks than a stage has cannot be a whole one, whatever is known of them.
    if layout.pp and layout.pp * per_stage - stable.height >= per_stage:
        every |= set(range(layout.pp))
    missing = every - told
    if not missing or not stable.height:
        return None
    return NOT_ALL_STAGES if (stable["stage"] < 0).any() else NO_STABLE + ranks_in_words(missing, "stage")


def left_out(samples: Samples, stable: pl.DataFrame, cut: Collection[int]) -> str | None:
    """Who has no value, and why; None where every stable rank has one."""
    told = _told(samples)
    if not set(stable["rank"].to_list()).difference(told):
        return None  # nearly always: no table for it
    missing = stable.filter(~pl.col("rank").is_in(told))
    ranks = set(missing["rank"].to_list())
    if len(ranks) == stable.height and ranks <= set(cut):
        return CUT_FORWARDS
    if not ranks & set(cut) and set(missing["stage"].to_list()) - set(stable.join(missing, "rank", "anti")["stage"]):
        return SOME_STAGES
    one = len(ranks) == 1
    why = (_CUT_ONE if one else _CUT_SOME) if ranks <= set(cut) else "nothing tells it there"
    which = ranks_in_words(missing["world_rank"].to_list(), most=SHOWN_RANKS)
    return f"{len(ranks)} of {stable.height} ranks left out ({which}): {why}"


def no_wall_time(stable: pl.DataFrame, *, helped: bool) -> str | None:
    """Why the windows of ``stable`` ranks are no wall time; None where those of all stages last about as long.

    ``helped``: whether windows cut to whole forwards would be.
    """
    # Where nobody knows the stages, each rank may be of its own.
    stage = pl.when(pl.col("stage") < 0).then(-1 - pl.col("rank")).otherwise("stage")
    medians = stable.group_by(stage).agg(pl.col("window_ns").median())["window_ns"].to_list()
    if len(medians) < 2 or max(medians) <= _UNEVEN * min(medians):
        return None
    windows = sorted(stable["window_ns"].to_list())
    digits = 0 if windows[0] >= _LONG_NS else 3
    low, high = (f"{window / 1e6:,.{digits}f}" for window in (windows[0], windows[-1]))
    way = ": analyze with --window prefill" if helped else ""
    return f"windows of its ranks last {low} to {high} ms, so they give {NO_WALL_TIME}{way}"


def _told(samples: Samples) -> list[int]:
    return [int(rank) for rank in samples.ranks[~np.isnan(samples.values).all(axis=1)]]
