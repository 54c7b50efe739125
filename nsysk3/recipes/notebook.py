"""The notebook beside a recipe's tables: it needs pandas, plotly and IPython, all of which recipes need anyway."""

from __future__ import annotations

from typing import Any

from nsysk3.recipes import Recipe

NOTEBOOK_NAME = "stats.ipynb"

_READ = """\
import pandas as pd
import plotly.express as px
from IPython.display import display

pd.set_option("display.max_colwidth", None)
pd.set_option("display.max_rows", None)

files = pd.read_parquet("files.parquet")
rank_stats = pd.read_parquet("rank_stats.parquet")
all_stats = pd.read_parquet("all_stats.parquet")
value = "Total Time" if "Total Time" in rank_stats else "Median"
shown = rank_stats.reset_index()
shown["ms"] = shown[value] / 1e6
shown["Rank"] = shown["Rank"].astype(str)"""

_BARS = """\
px.bar(
    shown, x="Name", y="ms", color="Rank", barmode="group", labels={"ms": f"{value} (ms)"},
    height=500, template="plotly_white",
)"""

_RANKS = """\
rank_stats.reset_index().pivot(index="Name", columns="Rank", values=value).reindex(all_stats.index) / 1e6"""


def notebook(recipe: Recipe) -> dict[str, Any]:
    """The notebook of one recipe, as JSON.  Text from a trace is never in it: tables show that, escaped."""
    cells = [
        _text(f"# {recipe.display_name}\n\n{recipe.description}\n\nTimes are in nanoseconds unless a title says ms; "
              "an empty cell is a number that the trace does not hold (see Notes)."),
        _code(_READ),
        _text("## All ranks\n\nOver the stable ranks (Files says which are not, and why)."),
        _code("all_stats"),
        _text("## Each rank"),
        _code(_BARS),
        _code(_RANKS),
        _code("display(rank_stats)"),
        _text("## Files\n\n`Rank` is the rank in the run. A report of a whole node holds several."),
        _code("files"),
        _text("## Notes"),
        _code('pd.read_parquet("notes.parquet")'),
    ]  # fmt: skip
    return {
        "cells": cells,
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 2,
    }


def _text(source: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "metadata": {}, "source": source.splitlines(keepends=True)}


def _code(source: str) -> dict[str, Any]:
    return {
        "cell_type": "code",
        "execution_count": None,
        "metadata": {},
        "outputs": [],
        "source": source.splitlines(keepends=True),
    }
