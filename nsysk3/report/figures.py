"""Plotly figures of a result, for notebooks: ``result.figures.time_budget()``.  Drawing only; every number is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import polars as pl

from nsysk3.errors import InputError, MissingToolError
from nsysk3.report.catalogue import Catalogue, catalogue
from nsysk3.report.view import View

if TYPE_CHECKING:
    from nsysk3.result import Result

# The page's light colours; waiting has a pattern as well.
_COLOURS = {
    "overlap": "#3a7d4c", "compute": "#2f6398", "fused": "#1d7676", "exposed_allreduce": "#b8560a",
    "exposed_p2p": "#8f6a00", "exposed_all_gather": "#a8702a", "exposed_reduce_scatter": "#96471f",
    "exposed_all_to_all": "#7a3f10", "exposed_unresolved": "#8a5a2a", "exposed_wait_collective": "#b02a48",
    "exposed_wait_upstream": "#86338f", "exposed_wait_downstream": "#a8458f", "idle_stage_idle": "#86338f",
    "graph": "#5c6a74", "copy": "#76838c", "idle_launch_gap": "#cfd6da", "idle_other": "#e3e8ea",
}  # fmt: skip
_PATTERNS = {
    "exposed_wait_collective": "-", "exposed_wait_upstream": "/", "exposed_wait_downstream": "\\",
    "idle_stage_idle": "/", "exposed_unresolved": ".", "graph": "x",
}  # fmt: skip


@dataclass(frozen=True)
class Figures:
    """Figures of one result; each method gives a ``plotly.graph_objects.Figure``.

    Raises InputError where the result has nothing to draw, MissingToolError where plotly is not installed.
    """

    result: Result
    lang: str = "en"

    @property
    def _view(self) -> View:
        return View(self.result, self._texts)

    @property
    def _texts(self) -> Catalogue:
        return catalogue(self.lang)

    def time_budget(self) -> Any:
        """Where each rank's window went: stacked bars in milliseconds, waiting hatched."""
        view, texts = self._view, self._texts
        table = self._table("budget")
        figure = _figure(texts("fig.budget.title"), "ms")
        for bucket in texts.texts["bucket"]:
            mine = table.filter((pl.col("bucket") == bucket) & (pl.col("ns") > 0))
            if mine.height:
                figure.add_bar(
                    x=(mine["ns"] / 1e6).to_list(), y=[view.rank_name(rank) for rank in mine["rank"]], orientation="h",
                    name=texts(f"bucket.{bucket}"), marker=_marker(bucket),
                )  # fmt: skip
        return figure.update_layout(barmode="stack", yaxis={"autorange": "reversed"})

    def bubble(self) -> Any:
        """Exposed Stage wait and idle time of each rank as shares of its window, the ideal bubble beside them."""
        view, texts = self._view, self._texts
        stages = self._table("pipeline")
        budget = self._table("budget").filter(pl.col("rank").is_in(stages["rank"].to_list()))
        figure = _figure(texts("fig.bubble.title"), "%")
        for bucket in (
            "exposed_wait_upstream",
            "exposed_wait_downstream",
            "idle_stage_idle",
            "idle_launch_gap",
            "idle_other",
        ):
            mine = budget.filter(pl.col("bucket") == bucket)
            figure.add_bar(
                x=(mine["share"] * 100).to_list(), y=[view.rank_name(rank) for rank in mine["rank"]], orientation="h",
                name=texts(f"bucket.{bucket}"), marker=_marker(bucket),
            )  # fmt: skip
        ideal = stages.filter(pl.col("ideal_bubble_share").is_not_null())
        if ideal.height:
            figure.add_scatter(
                x=(ideal["ideal_bubble_share"] * 100).to_list(), y=[view.rank_name(rank) for rank in ideal["rank"]],
                mode="markers", name=texts("col.ideal_bubble_share"),
                marker={"symbol": "line-ns-open", "size": 18, "color": "black"},
            )  # fmt: skip
        return figure.update_layout(barmode="stack", yaxis={"autorange": "reversed"})

    def pipeline(self) -> Any:
        """Micro-batches of every rank with forwards over time, in milliseconds after the first."""
        view, texts = self._view, self._texts
        forwards = self._table("forwards")
        first = forwards["start_utc_ns"].min()
        figure = _figure(texts("fig.gantt.title"), "ms")
        for (number,), mine in forwards.sort("forward").group_by("forward", maintain_order=True):
            figure.add_bar(
                base=((mine["start_utc_ns"] - first) / 1e6).to_list(),
                x=((mine["end_utc_ns"] - mine["start_utc_ns"]) / 1e6).to_list(),
                y=[view.rank_name(rank) for rank in mine["rank"]], orientation="h",
                name=f"{texts('col.forward')} {number}", text=str(number),
            )  # fmt: skip
        return figure.update_layout(barmode="overlay", yaxis={"autorange": "reversed"})

    def collectives(self, op: str = "allreduce") -> Any:
        """Cumulative distribution of durations of one operation, by communicator."""
        texts = self._texts
        table = self._table("collectives").filter(pl.col("op") == op)
        if table.is_empty():
            raise InputError(f"no {op} in this result")
        figure = _figure(texts("fig.ecdf.title", op=texts.get(f"role.{op}", op)), "ms")
        for (name,), mine in table.group_by("communicator", maintain_order=True):
            for column, dash in (("duration_ns", "solid"), ("transfer_ns", "dash")):
                values = (mine[column].drop_nulls().sort() / 1e6).to_list()
                figure.add_scatter(
                    x=values, y=_steps(values), line={"shape": "hv", "dash": dash},
                    name=f"{name} · {texts(f'col.{column}')}",
                )  # fmt: skip
        return figure.update_layout(xaxis={"type": "log"}, yaxis={"ticksuffix": " %"})

    def layers(self) -> Any:
        """Median time of each layer by class, in milliseconds."""
        texts = self._texts
        table = self._table("layer_rows")
        columns = [f"{name}_ns" for name in ("compute", "fused", "allreduce_transfer", "allreduce_wait")]
        figure = _figure(texts("fig.layers.title"), "")
        figure.add_heatmap(
            z=[[None if value is None else value / 1e6 for value in row] for row in table.select(columns).rows()],
            x=[texts(f"col.layer_{name}") for name in columns], y=[str(layer) for layer in table["layer"]],
            colorscale="Blues", colorbar={"title": "ms"},
        )  # fmt: skip
        return figure.update_layout(yaxis={"autorange": "reversed"})

    def _table(self, name: str) -> pl.DataFrame:
        table = self._view.table(name)
        if table.is_empty():
            raise InputError(f"this result has no {name} to draw")
        return table


def _figure(title: str, unit: str) -> Any:
    try:
        from plotly.graph_objects import Figure
    except ImportError as error:
        raise MissingToolError("figures for notebooks need plotly: pip install plotly") from error
    layout = {"title": title, "template": "plotly_white", "legend": {"orientation": "h", "y": -0.2}}
    return Figure(layout=layout).update_xaxes(title=unit)


def _marker(bucket: str) -> dict[str, Any]:
    pattern = {"shape": _PATTERNS[bucket], "fgcolor": "white"} if bucket in _PATTERNS else {}
    return {"color": _COLOURS.get(bucket, "#8a6b4a"), "pattern": pattern}


def _steps(values: Sequence[float]) -> list[float]:
    return [100 * (place + 1) / len(values) for place in range(len(values))]
