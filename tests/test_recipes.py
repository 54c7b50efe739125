"""What nsysk3 writes for `nsys recipe`, and nsysk3 as a recipe under the real one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from datetime import datetime
from functools import cache
from pathlib import Path

import pandas as pd
import polars as pl
import pytest
from command import run
from conftest import FIXTURES
from fixture_results import result_of
from polars.testing import assert_frame_equal
from typer.testing import CliRunner

import nsysk3
from nsysk3.cli.recipes import recipes_app
from nsysk3.errors import InputError
from nsysk3.recipes import SHIMS, find_recipe, recipes
from nsysk3.recipes.tables import recipe_tables
from nsysk3.recipes.write import write_recipe
from nsysk3.result import Result

NAMES = [each.name for each in recipes()]
NSYSK3 = Path(sys.executable).with_name("nsysk3")
NOW = datetime.now()


@pytest.fixture(scope="module")
def pp2() -> Result:
    return result_of("sglang-h200/pp2-lw")


@pytest.fixture(scope="module")
def tp2() -> Result:
    return result_of("sglang-h200/tp2-lw")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of two reports.  Whoever needs their exports first makes them; the others find them there."""
    folder = tmp_path_factory.mktemp("reports")
    for name in ("tp2-small-2024.2.nsys-rep", "pp2-small-2024.2.nsys-rep"):
        shutil.copy(FIXTURES / "h200" / name, folder)
    return folder


@cache
def of_both(reports: Path) -> Result:
    """The analysis of their exports, once those are there."""
    return nsysk3.analyze(sorted(reports.glob("*.nsysk3.sqlite")))


def total(table: pl.DataFrame, name: str, rank: int) -> int | None:
    found: int | None = table.filter(pl.col("Name") == name, pl.col("Rank") == rank)["Total Time"].item()
    return found


# --- the tables


def test_overlap_is_the_rank_metrics(pp2: Result) -> None:
    tables = recipe_tables(pp2, "nsysk3_overlap")
    for rank in pp2.document.ranks:
        for name in tables.rank_stats["Name"].unique():
            assert total(tables.rank_stats, name, rank.world_rank) == getattr(rank, f"{name}_ns")
    share = tables.rank_stats.filter(pl.col("Name") == "overlap", pl.col("Rank") == 0)["Time"].item()
    assert share == pytest.approx(100 * pp2.document.ranks[0].overlap_ns / pp2.document.ranks[0].window_ns)  # type: ignore[operator]


def test_stage_wait_is_its_parts(pp2: Result) -> None:
    stats = recipe_tables(pp2, "nsysk3_stage_wait").rank_stats
    for rank, waited, bubble in pp2.pipeline.select("rank", "stage_wait_ns", "bubble_ns").iter_rows():
        parts = [total(stats, n, rank) for n in ("exposed_wait_upstream", "exposed_wait_downstream", "stage_idle")]
        assert sum(parts) == total(stats, "stage_wait", rank) == waited > 0  # type: ignore[arg-type]
        assert total(stats, "bubble", rank) == bubble


def test_without_a_pipeline_stage_wait_is_zero_and_what_only_a_pipeline_has_is_null_with_a_reason(tp2: Result) -> None:
    tables = recipe_tables(tp2, "nsysk3_stage_wait")
    assert total(tables.rank_stats, "stage_wait", 0) == 0
    assert total(tables.rank_stats, "busy", 0) is None
    nulls = set(tables.rank_stats.filter(pl.col("Total Time").is_null())["Name"])
    assert nulls == set(tables.missing) > {"busy"}


def test_whole_graphs_hide_what_waited_which_is_not_zero() -> None:
    result = nsysk3.analyze(FIXTURES / "h200" / "graphwhole.sqlite")
    tables = recipe_tables(result, "nsysk3_stage_wait")
    assert total(tables.rank_stats, "stage_wait", 0) is None
    assert "graphs" in tables.missing["stage_wait"]


def test_layers_are_the_layer_summary(tp2: Result) -> None:
    stats = recipe_tables(tp2, "nsysk3_layers").rank_stats
    ours = stats.select(
        "Rank", "Name", pl.col("Count").alias("forwards"), pl.col("Median").alias("p50_ns"),
        pl.col("AllReduce Wait").alias("allreduce_wait_ns"),
    )  # fmt: skip
    expected = tp2.layer_summary.select(
        pl.col("rank").cast(pl.Int64).alias("Rank"), pl.format("layer {}", "layer").alias("Name"),
        "forwards", "p50_ns", "allreduce_wait_ns",
    )  # fmt: skip
    assert_frame_equal(ours, expected, check_row_order=False)
    assert ours.height == 16


def test_allreduce_loses_no_kernel_and_no_time(tp2: Result) -> None:
    tables = recipe_tables(tp2, "nsysk3_allreduce")
    stats = tables.rank_stats
    for rank in tp2.document.ranks:
        mine = stats.filter(pl.col("Rank") == rank.world_rank)
        assert (mine["Count"].sum(), mine["Sum"].sum()) == (rank.allreduce_count, rank.allreduce_total_ns)
    assert (stats["Wait"] + stats["Transfer"] == stats["Sum"]).all()
    every = tables.all_stats
    assert every["Sum"].sum() == stats["Sum"].sum()
    # Not a median of medians: half of all kernels of both ranks are below it.
    kernels = tp2.collectives.filter(pl.col("op") == "allreduce", pl.col("kind") == "moe")["duration_ns"]
    assert every.filter(pl.col("Name") == "moe")["Median"].item() == kernels.median()


def test_a_run_without_what_a_recipe_counts_is_one_line(pp2: Result) -> None:
    with pytest.raises(InputError, match="no AllReduce"):
        recipe_tables(pp2, "nsysk3_allreduce")


def test_rank_is_the_rank_in_the_run_and_a_file_may_hold_several(tmp_path: Path) -> None:
    mapped = tmp_path / "ranks.toml"
    mapped.write_text("".join(f"[[rank]]\nworld_rank = {8 - device}\ndevice = {device}\n" for device in (0, 1)))
    result = nsysk3.analyze(nsysk3.load(FIXTURES / "h200" / "tp2.sqlite", ranks=mapped))
    tables = recipe_tables(result, "nsysk3_overlap")
    assert tables.files.select("Rank", "File", "Device").rows() == [(7, "tp2", 1), (8, "tp2", 0)]
    second = next(rank for rank in result.document.ranks if rank.device_id == 1)
    assert total(tables.rank_stats, "compute", 7) == second.compute_ns


# --- the directory


@pytest.mark.parametrize("name", NAMES)
def test_pandas_reads_what_recipes_expect(tmp_path: Path, tp2: Result, name: str) -> None:
    out = write_recipe(tp2, find_recipe(name), tmp_path / "made here", NOW)
    tables = recipe_tables(tp2, name)
    files, rank_stats, all_stats = (
        pd.read_parquet(out / f"{table}.parquet") for table in ("files", "rank_stats", "all_stats")
    )
    assert (files.index.name, rank_stats.index.name, all_stats.index.name) == ("Rank", "Name", "Name")
    assert rank_stats["Rank"].tolist() == tables.rank_stats["Rank"].to_list()
    assert not rank_stats.set_index("Rank", append=True).index.has_duplicates  # what `diff` aligns by
    assert rank_stats.select_dtypes("number").columns.size > 1
    about = json.loads((out / "made here.nsys-analysis").read_text())
    assert about["RecipeName"] == name
    assert about["Outputs"] == {"stats.ipynb": "Notebook"}
    assert all((out / path).is_file() for path in about["Outputs"])
    assert not [path for path in out.iterdir() if path.name.startswith(".")]
    notes = pd.read_parquet(out / "notes.parquet")
    assert tables.missing.keys() <= {text.split(":")[0] for text in notes.Text[notes.About == "not measured"]}


def test_only_the_commands_text_is_in_the_notebook(tmp_path: Path, tp2: Result) -> None:
    """A trace's text could be markup, and a notebook runs what it shows."""
    hostile = tp2.document.model_copy(update={"notes": ["<script>alert(1)</script>"]})
    out = write_recipe(Result(hostile, tp2.tables), find_recipe("nsysk3_overlap"), tmp_path, NOW)
    assert "script>" not in (out / "stats.ipynb").read_text()
    assert "<script>" in str(pd.read_parquet(out / "notes.parquet").Text.tolist())


def test_analyze_writes_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trace = FIXTURES / "h200" / "pp2.sqlite"
    for _ in range(2):
        done = run("analyze", trace, "--format", "recipe", "--quiet")
        assert (done.code, done.out) == (0, ""), done.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["nsysk3_overlap-1", "nsysk3_overlap-2"]
    done = run("analyze", trace, "--format", "recipe", "--recipe", "nsysk3_layers", "-q", "--out", "nsysk3_overlap-1")
    assert done.code == 0  # the same place again
    (tmp_path / "nsysk3_overlap-1").rename(tmp_path / "renamed")
    done = run("analyze", trace, "--format", "recipe", "-q", "--out", "renamed")
    assert done.code == 2
    assert "holds nsysk3_overlap-1.nsys-analysis" in done.err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--format", "recipe", "--recipe", "nccl_sum"], "there are nsysk3_allreduce, nsysk3_layers"),
        (["--recipe", "nsysk3_layers"], "pass both"),
        (["--format", "recipe", "--recipe", "nsysk3_allreduce"], "no AllReduce kernel starts in this run's window"),
    ],
)
def test_what_cannot_be_written_is_one_line(tmp_path: Path, options: list[str], says: str) -> None:
    done = run("analyze", FIXTURES / "h200" / "pp2.sqlite", "-q", "--out", tmp_path / "out", *options)
    assert done.code == 2
    assert says in done.err
    assert done.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_path_and_list() -> None:
    path = CliRunner().invoke(recipes_app, ["path"])
    assert Path(path.stdout.strip()) == SHIMS
    assert set(NAMES) == {folder.name for folder in SHIMS.iterdir() if (folder / f"{folder.name}.py").is_file()}
    listed = CliRunner().invoke(recipes_app, ["list"]).stdout
    assert [line for line in listed.splitlines() if line[0] != " "] == NAMES
    assert len(NAMES) == 4


@pytest.mark.parametrize("shim", sorted(SHIMS.glob("**/*.py")), ids=lambda path: path.name)
def test_a_shim_is_thin(shim: Path) -> None:
    text = shim.read_text()
    assert text.count("\n") < 100
    assert "import nsysk3\n" not in text
    assert "from nsysk3" not in text


# --- under the real `nsys recipe`


def nsys_recipe(recipe: Path, folder: Path, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run it in ``folder`` with nsysk3's recipes on its path.  nsys gives all it says on stdout."""
    known = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [recipe, *map(str, arguments)],
        cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False,
        env={**known, "NSYS_RECIPE_PATH": str(SHIMS), "NSYSK3": str(NSYSK3), **environment},
    )  # fmt: skip


@pytest.mark.nsys
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("nsysk3_stage_wait", "none"),
        ("nsysk3_overlap", "concurrent"),
        ("nsysk3_layers", "dask-futures"),
        ("nsysk3_allreduce", "concurrent"),
    ],
)
def test_it_runs_as_a_recipe(
    recipe: Path, reports: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, mode: str
) -> None:
    monkeypatch.delenv("NSYSK3_NSYS")  # the nsys that runs the recipe is the one that exports
    done = nsys_recipe(recipe, tmp_path, name, "--input", reports, "--mode", mode, "--csv")
    assert done.returncode == 0, done.stdout
    out = tmp_path / f"{name}-1"
    assert done.stdout.split() == ["Generated:", out.name]
    expected = recipe_tables(of_both(reports), name)
    for table in ("files", "rank_stats", "all_stats"):
        wanted: pl.DataFrame = getattr(expected, table)
        found = pl.read_parquet(out / f"{table}.parquet")
        assert_frame_equal(found, wanted, check_column_order=False, check_dtypes=False)  # pandas: a null is a float
        assert len(pd.read_csv(out / f"{table}.csv")) == wanted.height
    (analysis,) = out.glob("*.nsys-analysis")
    about = json.loads(analysis.read_text())
    assert (about["RecipeName"], about["Mode"], about["Outputs"]) == (name, mode, {"stats.ipynb": "Notebook"})
    assert len(about["InputFiles"]) == 2


@pytest.mark.nsys
def test_the_notebook_runs_where_recipes_do(recipe: Path, tmp_path: Path, tp2: Result) -> None:
    out = write_recipe(tp2, find_recipe("nsysk3_stage_wait"), tmp_path / "out", NOW)
    cells = json.loads((out / "stats.ipynb").read_text())["cells"]
    # Each cell is an expression whose value a notebook shows, or statements.
    code = ["from ast import parse, Expr", "names = {}"]
    for cell in (cell for cell in cells if cell["cell_type"] == "code"):
        code += [f"source = {''.join(cell['source'])!r}", "(*body, last) = parse(source).body"]
        code += ["kind = 'eval' if not body and isinstance(last, Expr) else 'exec'"]
        code += ["shown = (eval if kind == 'eval' else exec)(compile(source, 'cell', kind), names)"]
        code += ["print(type(shown).__name__, '' if shown is None else shown._repr_html_()[:0])"]
    # A notebook's kernel stays; a process that ends just after pandas has read is aborted by its threads now and then.
    code += ["import os, sys", "sys.stdout.flush()", "os._exit(0)"]
    python = recipe.parent / "recipe-venv" / "bin" / "python"
    done = subprocess.run([python, "-c", "\n".join(code)], cwd=out, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Figure" in done.stdout
    assert done.stdout.count("DataFrame") >= 4


@pytest.mark.nsys
def test_diff_subtracts_two_of_them(recipe: Path, tmp_path: Path, pp2: Result, tp2: Result) -> None:
    for result, name in ((pp2, "a"), (tp2, "b")):
        write_recipe(result, find_recipe("nsysk3_overlap"), tmp_path / name, NOW)
    done = nsys_recipe(recipe, tmp_path, "diff", "--input", "a", "b", "--mode", "none")
    # NVIDIA's recipe reads with pandas, whose reading threads abort a Python that ends, now and then, all work done.
    assert done.returncode == 0 or "terminate called without an active exception" in done.stderr, done.stderr
    out = tmp_path / "nsysk3_overlap-diff-1"
    first, second, change = (
        pd.read_parquet(path / "rank_stats.parquet") for path in (tmp_path / "a", tmp_path / "b", out)
    )
    expected = first["Total Time"] - second["Total Time"]
    assert change["Total Time"].tolist() == expected.tolist()
    assert len(set(change["Total Time"])) > 10
    assert change["Rank"].tolist() == first["Rank"].tolist()


@pytest.mark.nsys
def test_a_bad_report_is_named_and_left_out(recipe: Path, reports: Path, tmp_path: Path) -> None:
    good, bad = reports / "tp2-small-2024.2.nsys-rep", tmp_path / "cut.nsys-rep"
    bad.write_bytes(good.read_bytes()[:3000])
    arguments = ("nsysk3_overlap", "--input", bad, good, "--mode", "none", "--output", "out")
    done = nsys_recipe(recipe, tmp_path, *arguments)
    assert done.returncode == 0
    line, *rest = done.stdout.splitlines()
    assert line.startswith(f"ERROR: {bad}: truncated or corrupt")
    assert "".join(rest).split() == ["Generated:", "out"]
    assert pd.read_parquet(tmp_path / "out" / "files.parquet").File.unique().tolist() == ["tp2-small-2024.2"]


@pytest.mark.nsys
@pytest.mark.parametrize(
    ("arguments", "environment", "says"),
    [
        ([], {"NSYSK3": "/no/such/program"}, "ERROR: $NSYSK3 /no/such/program: no such program"),
        (
            ["--window", "soon"],
            {},
            "ERROR: --window 'soon': give capture, prefill, steady or START:END such as 0.5s:2s",
        ),
    ],
)
def test_errors_are_one_line_and_leave_nothing(
    recipe: Path, reports: Path, tmp_path: Path, arguments: list[str], environment: dict[str, str], says: str
) -> None:
    report = reports / "tp2-small-2024.2.nsys-rep"
    done = nsys_recipe(
        recipe, tmp_path, "nsysk3_overlap", "--input", report, "--output", "out", "--mode", "none", *arguments,
        **environment,
    )  # fmt: skip
    assert (done.returncode, done.stdout.splitlines()) == (1, [says])
    assert not (tmp_path / "out").exists()


# --- a library that differs as that of 2025 does


STANDIN = {
    "__init__.py": "",
    "nsys_constants.py": "NSYS_EXE_NAME = 'nsys'",
    "log.py": "import logging\nlogger = logging.getLogger('recipe')",
    "lib/__init__.py": "",
    "lib/exceptions.py": "class ValueError(Exception): pass",
    "lib/nsys_path.py": "def find_installed_file(name): return '/opt/' + name",
    "lib/args.py": """
import argparse, enum
class Option(enum.Enum):
    CSV = 9
    INPUT = 10
class ArgumentParser(argparse.ArgumentParser):
    def add_recipe_argument(self, option, **more):
        more = {Option.CSV: {'action': 'store_true'}, Option.INPUT: {'nargs': '+'}}.get(option, {}) | more
        self.add_argument(option if isinstance(option, str) else '--' + option.name.lower(), **more)
""",
    "lib/recipe.py": """
import json, os
from nsys_recipe.lib.args import ArgumentParser
class Recipe:
    def __init__(self, parsed_args):
        self._parsed_args, self._output_files = parsed_args, {}
    def run(self, context):
        self._analysis_dict = {'RecipeVersion': 'of 2025', 'RecipeName': self.get_recipe_name(), 'Options': {}}
    def get_output_dir(self):
        os.makedirs(self._parsed_args.output, exist_ok=True)
        return self._parsed_args.output
    def add_output_file(self, name, kind=None):
        if kind:
            self._output_files[name] = kind
        return os.path.join(self.get_output_dir(), name)
    def create_analysis_file(self):
        with open(self.add_output_file(os.path.basename(self.get_output_dir()) + '.nsys-analysis'), 'w') as file:
            json.dump(self._analysis_dict, file)
    @classmethod
    def get_recipe_name(cls):
        return cls.__module__.split('.')[0]
    @classmethod
    def get_argument_parser(cls):
        parser = ArgumentParser()
        parser.add_argument('--output')
        parser.add_argument('--force-overwrite', action='store_true')
        return parser
""",
}
RUN_STANDIN = """
import importlib, sys
class Context:
    def map(self, function, each, **more): return [function(one, **more) for one in each]
    def wait(self, found): return found
module = importlib.import_module('nsysk3_overlap.nsysk3_overlap')
parser = module.Overlap.get_argument_parser()
module.Overlap(parser.parse_args(sys.argv[1:])).run(Context())
"""


def test_a_newer_library_adds_output_itself_and_writes_its_own_facts(tmp_path: Path) -> None:
    """What recipes of 2025 show: the base class owns --output, and the analysis file names other facts."""
    for name, text in STANDIN.items():
        path = tmp_path / "nsys_recipe" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    report = Path(shutil.copy(FIXTURES / "h200" / "pp2.sqlite", tmp_path / "r.sqlite")).rename(tmp_path / "r.nsys-rep")
    # Exporting needs an nsys: this one's reports are exports already.
    program = tmp_path / "nsysk3"
    program.write_text(
        f'#!/bin/sh\n[ $1 = export ] || exec {NSYSK3} "$@"\n'
        "for report; do :; done; cp $report $report.sqlite; echo $report.sqlite\n"
    )
    program.chmod(0o755)
    environment = {**os.environ, "NSYSK3": str(program), "PYTHONPATH": f"{tmp_path}:{SHIMS}"}
    command = [sys.executable, "-c", RUN_STANDIN, "--input", report, "--output", tmp_path / "out"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    about = json.loads((tmp_path / "out" / "out.nsys-analysis").read_text())
    assert about["RecipeVersion"] == "of 2025"
    assert about["Outputs"] == {"stats.ipynb": "Notebook"}
    expected = recipe_tables(result_of("h200/pp2"), "nsysk3_overlap")
    assert_frame_equal(
        pl.read_parquet(tmp_path / "out" / "rank_stats.parquet"), expected.rank_stats, check_column_order=False
    )
