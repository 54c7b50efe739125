"""The samples of every metric of a run: per rank over the window, per rank and forward, per 1,000 input tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import polars as pl

from nsysk3.compare.calls import GRAPHS, layer_counts, no_layer_counts, other_cells, placed, with_kernels
from nsysk3.compare.catalog import BY_NAME
from nsysk3.compare.derived import FROM_PIPELINE, not_measured, whole_sum, with_derived
from nsysk3.compare.layout import layout_of, stage_of
from nsysk3.compare.model import Layout, Scope
from nsysk3.compare.spoken import CUT_FORWARDS, left_out, no_wall_time, of_the_run, without_stable
from nsysk3.compare.statistics import Samples
from nsysk3.compare.windowed import touching, unbroken, whole_forwards
from nsysk3.result import Result

NO_FORWARDS = "no whole forward was found in the window"
NO_TOKENS = "the trace does not tell how many tokens a forward had"
# What the samples were taken from.
WINDOW = "one number a rank: its window"
PER_FORWARD = "one number a rank: its window divided by its forwards"
WHOLE = "one number a rank: its longest unbroken row of whole forwards, first start to last end, divided by them"
OVER_FORWARDS = "one number a rank: over its forwards"
COLLECTIVES = "ranks x forwards: AllReduce kernels that start in the forward"
OTHERS = "ranks x forwards: ReduceScatter and AllGather kernels that start in the forward"
FORWARDS = "ranks x forwards"
LAYERS = "ranks x forwards: kernels that belong to a layer"

_KEY = ["rank", "forward"]
# Forwards with less of the window's AllReduce calls are not its work, whatever was taken for them.
_LITTLE = 0.25
# Windows that whole forwards bound.
_OF_FORWARDS = ("prefill", "steady")
_FROM_LAYERS = ("compute_ns", "fused_ns", "exposed_comm_ns")


@dataclass(frozen=True)
class RunSamples:
    """Samples of one run.

    ``rank`` columns of a result's tables are row numbers of ``document.ranks``; only stable ranks are used.
    """

    result: Result
    layout: Layout = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layout", layout_of(self.result))

    def find(self, metric: str, scope: Scope) -> dict[str, Samples]:
        """By what they were taken from, best first; empty where there are none (then see ``reason``)."""
        if scope != "window" and self.without_stable:
            return {}  # of the forwards' work only a part would be told
        found = self._found(metric, scope)
        return {source: each for source, each in found.items() if each.n and of_the_run(each, self._stable)}

    def _found(self, metric: str, scope: Scope) -> dict[str, Samples]:
        """The same, of however few ranks."""
        column, found = self._window(metric), {}
        if metric == "window_ns" and self.no_wall_time:
            column = None  # whole forwards may still tell it
        if scope == "window":
            return {WINDOW: self._per_rank(column)} if column is not None else {}
        if self.held is not None and self.held < _LITTLE:
            return {}
        for source, cells in self._cells.items():
            if metric == "exposed_comm_ns" and (self.layout.pp or 1) > 1:
                continue  # a pipeline's Send/Recv belongs to no layer: a sum over layers would leave it out
            if metric in cells.columns:
                found[source] = self._per_cell(cells, metric, scope)
        if column is not None and "1k_tokens" in BY_NAME[metric].scopes:  # else nothing to divide
            found[PER_FORWARD] = self._per_rank(column / self._count(scope))
        if metric == "window_ns" and self._forwards.height and len(self._cut_ranks) < self._stable.height:
            # Nothing else of a cut window is told by its forwards; where every one is cut, the window is the wrong one.
            found[WHOLE] = self._per_rank(self._wall(scope))
        if metric == "forward_p95_ns" and column is not None:
            found[OVER_FORWARDS] = self._per_rank(column)
        return found

    def parted(self, metric: str, scope: Scope) -> bool:
        """Whether forwards cut by the window, or ranks that lack it, are why ``find`` has nothing."""
        if self._cut_ranks and scope != "window" and "1k_tokens" in BY_NAME[metric].scopes:
            return self._window(metric) is not None and bool(self._forwards.height)
        return any(samples.n for samples in self._found(metric, scope).values())

    def left_out(self, samples: Samples) -> str | None:
        """Stable ranks that have no part in ``samples``, and why; None where all have."""
        return left_out(samples, self._stable, self._cut_ranks)

    def reason(self, metric: str, scope: Scope) -> str:
        """Why ``find`` has nothing."""
        if not self._stable.height:
            return "no rank is stable"
        if scope != "window" and not self._forwards.height:
            return NO_FORWARDS
        if scope != "window" and self.held is not None and self.held < _LITTLE:
            return f"what was taken for forwards holds only {self.held:.0%} of the window's AllReduce calls"
        if scope == "1k_tokens" and not self._forwards["tokens"].count():
            return NO_TOKENS
        if metric == "kernel_count" and self._window(metric) is None:
            return GRAPHS
        if metric == "layer_kernel_count" and not self._found(metric, scope):
            return no_layer_counts(self._layers)
        if metric in FROM_PIPELINE and self._window(metric) is None:
            return "the stages of the ranks are not known"
        if metric == "window_ns" and self.no_wall_time and (scope == "window" or not self._cut_ranks):
            return self.no_wall_time
        for samples in self._found(metric, scope).values():
            whole = scope == "window" or self.without_stable is None
            if samples.n and (why := self.left_out(samples) if whole else self.without_stable):
                return why
        if scope != "window" and self._cut_ranks and self._window(metric) is not None:
            return CUT_FORWARDS
        return not_measured(self.result, metric)

    @cached_property
    def without_stable(self) -> str | None:
        """Which stages have no stable rank, in words; None where all have one."""
        return without_stable(stage_of(self.result).values(), self._stable, self.layout)

    @cached_property
    def no_wall_time(self) -> str | None:
        """Why the windows do not tell how long the run took; None where they do."""
        cut_to_forwards = self.result.document.window.used in _OF_FORWARDS
        if cut_to_forwards and self._count("forward").n_unique() == 1:
            return None  # the same work on every stage, without the time in which the pipeline fills
        return no_wall_time(self._stable, helped=not cut_to_forwards and bool(self._forwards.height))

    @property
    def world_ranks(self) -> tuple[int, ...]:
        """Of the stable ranks."""
        return tuple(self._stable["world_rank"].to_list())

    def share_of(self, part: str, whole: str) -> float | None:
        """Two numbers of the window, each summed over stable ranks, as a ratio; null where nothing is to be shared."""
        one, two = self._window(part), self._window(whole)
        return float(one.sum()) / float(two.sum()) if one is not None and two is not None and two.sum() else None

    def totals(self) -> tuple[float | None, float | None]:
        """Whole forwards in the window and their tokens, medians over stable ranks."""
        whole = pl.col("tokens").null_count() == 0
        per_rank = self._forwards.group_by("rank").agg(pl.len(), pl.when(whole).then(pl.col("tokens").sum()))
        return _median(per_rank["len"]), _median(per_rank["tokens"])

    # --- one number a rank

    @cached_property
    def _stable(self) -> pl.DataFrame:
        """``rank``, ``world_rank``, ``stage`` and all metrics of stable ranks, by rank."""
        table = self.result.tables["rank_metrics"].with_row_index("rank").with_columns(pl.col("rank").cast(pl.Int32))
        stages = stage_of(self.result)
        named = [-1 if stages.get(rank) is None else stages[rank] for rank in table["rank"].to_list()]
        table = table.with_columns(pl.Series("stage", named, pl.Int64))
        return with_derived(self.result, self.layout, table.filter(pl.col("stable")))

    def _window(self, metric: str) -> pl.Series | None:
        if metric not in self._stable.columns or self._stable[metric].null_count() == self._stable.height:
            return None
        return self._stable[metric].cast(pl.Float64)

    def _count(self, scope: Scope) -> pl.Series:
        """What a window number is divided by, NaN where it is not known."""
        return self._counts[scope]

    @cached_property
    def _counts(self) -> dict[str, pl.Series]:
        counted = self._forwards.group_by("rank").agg(
            pl.len().cast(pl.Float64).alias("forward"),
            pl.when(pl.col("tokens").null_count() == 0).then(pl.col("tokens").sum() / 1000).alias("1k_tokens"),
        )
        # What a cut forward did is in the window's numbers, but it is no forward to divide by.
        counted = counted.filter(~pl.col("rank").is_in(self._cut_ranks))
        joined = self._stable.select("rank").join(counted, on="rank", how="left", maintain_order="left").drop("rank")
        return {
            name: pl.select(pl.when(each > 0).then(each).otherwise(float("nan"))).to_series().fill_null(float("nan"))
            for name, each in joined.to_dict().items()
        }

    def _wall(self, scope: Scope) -> pl.Series:
        """Of a rank's unbroken row of whole forwards, null where it has none."""
        spans = unbroken(touching(self.result, self._stable), self._forwards)
        per = {"forward": pl.col("forwards"), "1k_tokens": pl.col("tokens") / 1000}[scope]
        spans = spans.with_columns((pl.col("ns") / pl.when(per > 0).then(per)).alias("wall"))
        return self._stable.select("rank").join(spans, on="rank", how="left", maintain_order="left")["wall"]

    def _per_rank(self, column: pl.Series) -> Samples:
        values = column.fill_null(float("nan")).to_numpy()
        return Samples.of(values, self._stable["rank"].to_list(), self._stable["stage"].to_list(), per_forward=False)

    # --- one number a rank and forward

    @cached_property
    def _forwards(self) -> pl.DataFrame:
        """``rank``, ``forward``, ``start_utc_ns``, ``end_utc_ns``, ``tokens`` of whole forwards in the window."""
        return whole_forwards(self.result, self._stable)

    @cached_property
    def _cut_ranks(self) -> list[int]:
        """Ranks whose window holds work of forwards that are not whole, or do not lie in it as a whole."""
        cut = touching(self.result, self._stable).join(self._forwards, on=_KEY, how="anti")
        return sorted(cut["rank"].unique().to_list())

    @property
    def held(self) -> float | None:
        """The part of the window's AllReduce calls that whole forwards hold."""
        cells, every = self._cells.get(COLLECTIVES), self._window("allreduce_count")
        if cells is None or every is None or not every.sum():
            return None
        return float(cells["allreduce_count"].sum()) / float(every.sum())

    @cached_property
    def _cells(self) -> dict[str, pl.DataFrame]:
        forwards = self._forwards
        if forwards.is_empty():
            return {}
        spent = pl.col("end_utc_ns") - pl.col("start_utc_ns")
        timed = forwards.with_columns(spent.alias("forward_p50_ns"))
        found = {FORWARDS: with_kernels(self.result, timed, self._stable), LAYERS: self._layer_cells(forwards)}
        if self._stable["allreduce_count"].null_count() == 0:
            found[COLLECTIVES] = self._allreduce_cells(forwards)
            found[OTHERS] = other_cells(self.result.tables.get("collectives"), forwards)
        return {source: table for source, table in found.items() if table.width}

    def _allreduce_cells(self, forwards: pl.DataFrame) -> pl.DataFrame:
        calls = self.result.tables.get("collectives")
        if calls is None:
            return pl.DataFrame()
        cells = (
            placed(calls, forwards, "allreduce")
            .group_by(_KEY)
            .agg(
                pl.len().cast(pl.Int64).alias("allreduce_count"),
                pl.col("duration_ns").sum().alias("allreduce_total_ns"),
                pl.col("duration_ns").median().alias("allreduce_p50_ns"),
                whole_sum("wait_ns", "allreduce"),
                whole_sum("transfer_ns", "allreduce"),
            )
        )
        table = forwards.select(*_KEY, "tokens").join(cells, on=_KEY, how="left")
        zero = ("allreduce_count", "allreduce_total_ns")
        table = table.with_columns(pl.col(name).fill_null(0) for name in zero)
        none = pl.col("allreduce_count") == 0
        parts = ("allreduce_wait_ns", "allreduce_transfer_ns")
        return table.with_columns(pl.when(none).then(0).otherwise(name).alias(name) for name in parts)

    @property
    def _layers(self) -> pl.DataFrame | None:
        layers = self.result.tables.get("layers")
        return None if layers is None or layers.is_empty() else layers

    def _layer_cells(self, forwards: pl.DataFrame) -> pl.DataFrame:
        layers = self._layers
        if layers is None:
            return pl.DataFrame()
        names = [name for name in _FROM_LAYERS if name in layers.columns]
        sums = layers.drop_nulls("forward").group_by(_KEY).agg(pl.col(name).sum() for name in names)
        if "kernel_count" in layers.columns:
            sums = sums.join(layer_counts(layers), on=_KEY, how="left")
        return forwards.select(*_KEY, "tokens").join(sums, on=_KEY, how="inner")

    def _per_cell(self, cells: pl.DataFrame, metric: str, scope: Scope) -> Samples:
        value = pl.col(metric).cast(pl.Float64)
        if scope == "1k_tokens":
            value = pl.when(pl.col("tokens") > 0).then(value / pl.col("tokens") * 1000)
        wide = cells.select(*_KEY, value.alias("value")).pivot(on="forward", index="rank", values="value")
        wide = self._stable.select("rank", "stage").join(wide, on="rank", how="left", maintain_order="left")
        numbers = sorted((name for name in wide.columns if name not in ("rank", "stage")), key=int)
        values = wide.select(pl.col(numbers).fill_null(float("nan"))).to_numpy() if numbers else np.empty((0, 0))
        return Samples.of(values, wide["rank"].to_list(), wide["stage"].to_list())


def _median(values: pl.Series) -> float | None:
    middle = values.median()
    return float(middle) if isinstance(middle, (int, float)) else None
