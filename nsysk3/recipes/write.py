"""Write the directory that ``nsys recipe`` would: tables, a notebook and the one file that Nsight Systems opens."""

from __future__ import annotations

import json
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

import polars as pl

from nsysk3.errors import InputError, MissingToolError
from nsysk3.recipes import Recipe
from nsysk3.recipes.notebook import NOTEBOOK_NAME, notebook
from nsysk3.recipes.tables import recipe_tables
from nsysk3.result.store import Result
from nsysk3.run.files import replacing, write_text

ANALYSIS_SUFFIX = ".nsys-analysis"
# What recipes of Nsight Systems 2024 say of themselves; its window reads only Outputs.
_JSON_VERSION, _RUNTIME_VERSION = "1.2.0", "2.0.0"


def write_recipe(result: Result, recipe: Recipe, out: Path | None, started: datetime) -> Path:
    """Write one recipe's output and return its directory.

    ``out``: the directory, made when it is not there; None takes the first free ``<recipe>-N`` here, as ``nsys recipe``
    does.  files.parquet, rank_stats.parquet and all_stats.parquet carry the index that pandas restores; notes.parquet
    says what a reader must know and why a number is missing.  The ``.nsys-analysis`` comes last.

    Raises InputError when the run has nothing for this recipe or ``out`` holds another one's output.
    """
    tables = recipe_tables(result, recipe.name)
    folder = out or next(Path(f"{recipe.name}-{n}") for n in count(1) if not Path(f"{recipe.name}-{n}").exists())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        analysis = folder / f"{folder.resolve().name}{ANALYSIS_SUFFIX}"
        if others := [path.name for path in folder.glob(f"*{ANALYSIS_SUFFIX}") if path.name != analysis.name]:
            raise InputError(f"{folder}: holds {others[0]}, the output of another recipe; give another --out")
        _write_table(tables.files, "Rank", folder / "files.parquet")
        _write_table(tables.rank_stats, "Name", folder / "rank_stats.parquet")
        _write_table(tables.all_stats, "Name", folder / "all_stats.parquet")
        _write_table(_notes(result, tables.missing), None, folder / "notes.parquet")
        write_text(folder / NOTEBOOK_NAME, json.dumps(notebook(recipe), indent=1) + "\n")
        write_text(analysis, json.dumps(_analysis(result, recipe, started), indent=4) + "\n")
    except OSError as error:
        raise MissingToolError(f"{folder}: cannot be written ({error.strerror or error})") from error
    return folder


def _write_table(table: pl.DataFrame, index: str | None, path: Path) -> None:
    """As pandas writes it: recipes rely on its note of which column is the index."""
    frame = table.to_pandas()
    # A newer pandas would note its own string type, which the one that recipes need does not know.
    frame = frame.astype({name: object for name, kind in table.schema.items() if kind == pl.String})
    with replacing(path) as beside:
        (frame.set_index(index) if index else frame).to_parquet(beside, index=index is not None)


def _notes(result: Result, missing: dict[str, str]) -> pl.DataFrame:
    about = result.document
    window = about.window.used + (f" ({about.window.reason})" if about.window.reason else "")
    rows = [("window", window)]
    rows += [("not measured", f"{name}: {reason}") for name, reason in {**missing, **about.not_measured}.items()]
    rows += [("note", text) for text in about.notes]
    rows += [("problem", problem.message) for problem in about.problems]
    return pl.DataFrame(rows, schema={"About": pl.String, "Text": pl.String}, orient="row")


def _analysis(result: Result, recipe: Recipe, started: datetime) -> dict[str, Any]:
    return {
        "RecipeJsonVersion": _JSON_VERSION,
        "RecipeRuntimeVersion": _RUNTIME_VERSION,
        "RecipeName": recipe.name,
        "DisplayName": recipe.display_name,
        "Mode": "none",
        "StartTime": str(started),
        "EndTime": str(datetime.now()),
        "InputFiles": [report.path for report in result.document.reports],
        "Outputs": {NOTEBOOK_NAME: "Notebook"},
    }
