"""NVIDIA's own tools on the same traces: their numbers are ours, and where they are not, docs/recipes.md says why."""

from __future__ import annotations

import io
import re
import shutil
import sqlite3
import subprocess
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import FIXTURES
from fixture_results import result_of, run_of

import nsysk3
from nsysk3.analysis.intervals import covered, union
from nsysk3.analysis.roles import assign_roles
from nsysk3.classify import COMM_ROLES, RuleSet
from nsysk3.trace.load import Run

pytestmark = pytest.mark.nsys
SMALL = FIXTURES / "h200" / "tp2-small-2024.2.nsys-rep"


def as_report(trace: Path, folder: Path) -> Path:
    """A report whose Parquet export, which recipes read instead, holds the tables of an SQLite export."""
    report = Path(shutil.copy(SMALL, folder / f"{trace.stem}.nsys-rep"))
    tables = folder / f"{trace.stem}_pqtdir"
    tables.mkdir()
    time.sleep(0.05)  # a recipe takes an export only if it is younger than its report
    with closing(sqlite3.connect(f"file:{trace}?mode=ro&immutable=1", uri=True)) as connection:
        for table in ("StringIds", "CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_KERNEL", "NVTX_EVENTS"):
            cursor = connection.execute(f"SELECT * FROM {table}")
            names = [column[0] for column in cursor.description]
            columns = list(zip(*cursor.fetchall(), strict=True))
            arrays = {
                name: pa.array(values, pa.uint64() if name.startswith("global") else None)
                for name, values in zip(names, columns, strict=True)
            }
            pq.write_table(pa.table(arrays), tables / f"{table}.parquet")
    return report


def nvidia_overlap(recipe: Path, report: Path, out: Path) -> pl.DataFrame:
    command = [recipe, "nccl_gpu_overlap_trace", "--input", report, "--output", out, "--csv"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert (out / "rank_trace.csv").exists(), done.stdout + done.stderr
    return pl.read_csv(out / "rank_trace.csv").rename(str.lower)


def overlap_of_kernels(run: Run) -> pl.DataFrame:
    """Each kernel of ours, its class, and the percentage of it that ran beside the other class on its GPU."""
    events = assign_roles(run.events, run.names, run.nccl_calls, RuleSet.load())
    to_utc = pl.Series([report.to_utc_ns for report in run.reports])
    events = events.with_columns(shift=to_utc.gather(events["report"])).filter(pl.col("kind") == "kernel")
    parts = []
    for (_,), mine in events.group_by("rank", maintain_order=True):
        start, end = mine["start"].to_numpy(), mine["end"].to_numpy()
        comm = mine["role"].is_in(COMM_ROLES).to_numpy()
        beside = np.empty(len(start), np.int64)
        for kind in (True, False):
            others = union(start[comm != kind], end[comm != kind])
            chosen = comm == kind
            beside[chosen] = covered(others, end[chosen]) - covered(others, start[chosen])
        parts.append(mine.with_columns(comm=comm, percent=100 * beside / (end - start)))
    found = pl.concat(parts).join(run.ranks.select("rank", "pid", deviceid="device_id"), on="rank")
    return found.with_columns(start=pl.col("start") - pl.col("shift"), end=pl.col("end") - pl.col("shift"))


@pytest.mark.parametrize("trace", ["sglang-h200/pp2-lw", "sglang-h200/tp2-lw", "tp2-small"])
def test_overlap_of_each_kernel_is_nvidias(recipe: Path, tmp_path: Path, trace: str) -> None:
    if trace == "tp2-small":
        report = Path(shutil.copy(SMALL, tmp_path / "r.nsys-rep"))
        run = nsysk3.load(report)
    else:
        path = FIXTURES / f"{trace}.sqlite"
        report, run = as_report(path, tmp_path), run_of(trace)
    theirs = nvidia_overlap(recipe, report, tmp_path / "out")
    ours = overlap_of_kernels(run)
    assert theirs.height == ours.height > 700
    both = theirs.join(ours, on=["start", "end", "pid", "deviceid"])
    assert both.height == ours.height
    # NVIDIA's knows an NCCL kernel by the NCCL range around its launch; what it finds is what we find.
    nccl = both["name"].str.starts_with("nccl")
    assert (both["comm"] == nccl).all()
    their_percent = pl.when("comm").then("compute overlap").otherwise("communication overlap")
    worst = both.select((their_percent - pl.col("percent")).abs().max()).item()
    assert worst <= 0.05 + 1e-9  # printed with one decimal
    if trace == "sglang-h200/pp2-lw":  # a trace that has something to say
        assert both.filter(pl.col("percent").is_between(1, 99)).height > 20


def nvidia_stats(nsys: Path, report: str, export: Path) -> pl.DataFrame:
    """One report of `nsys stats`; columns in lower case, without units, with underscores."""
    command = [nsys, "stats", "-r", report, "--format", "csv", "-q", export]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=True)
    # What it says while it works comes before the table, which starts with a line of titles.
    lines = done.stdout.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith(("Time (%),", "Name,")))
    table = pl.read_csv(io.StringIO("\n".join(lines[start:])))
    return table.rename({name: re.sub(r" \(.*\)", "", name).lower().replace(" ", "_") for name in table.columns})


def nvidia_kernels(nsys: Path, export: Path) -> dict[str, tuple[int, int, float, int]]:
    table = nvidia_stats(nsys, "cuda_gpu_kern_sum", export)
    return {name: tuple(rest) for name, *rest in table.select("name", "instances", "total_time", "med", "max").rows()}


def altered(trace: str, folder: Path, *statements: str) -> Path:
    """A copy of a fixture after some SQL."""
    copy = folder / Path(f"{trace}.sqlite").name
    copy.write_bytes((FIXTURES / f"{trace}.sqlite").read_bytes())
    with closing(sqlite3.connect(copy)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()
    return copy


@pytest.mark.parametrize("trace", ["tp2-small", "h200/pp2", "h200/graph", "sglang-h200/pp2-lw"])
def test_kernel_counts_totals_and_medians_are_nvidias(nsys: Path, tmp_path: Path, trace: str) -> None:
    if trace == "tp2-small":
        export = tmp_path / "r.sqlite"
        command = [nsys, "export", "--type=sqlite", f"--output={export}", SMALL]
        subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, check=True)
        result = nsysk3.analyze(export)
    else:
        export, result = altered(trace, tmp_path), result_of(trace)
    everything = nvidia_kernels(nsys, export)
    summed = result.kernels.group_by("name").agg(pl.col("count").sum(), pl.col("total_ns").sum())
    assert {name: found[:2] for name, found in everything.items()} == {n: (c, t) for n, c, t in summed.iter_rows()}
    # medians are of one GPU: ask for it alone
    for index, rank in enumerate(result.document.ranks):
        alone = Path(shutil.copy(export, tmp_path / f"device{rank.device_id}.sqlite"))
        with closing(sqlite3.connect(alone)) as connection:
            connection.execute("DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL WHERE deviceId <> ?", [rank.device_id])
            connection.commit()
        mine = result.kernels.filter(pl.col("rank") == index).select("name", "count", "total_ns", "p50_ns", "max_ns")
        assert nvidia_kernels(nsys, alone) == {name: tuple(rest) for name, *rest in mine.iter_rows()}


@pytest.mark.parametrize("trace", ["sglang-h200/tp2-lw", "sglang-h200/pp2-markers", "h200/pp2"])
def test_copies_are_nvidias_but_those_before_the_first_kernel(nsys: Path, tmp_path: Path, trace: str) -> None:
    export = altered(trace, tmp_path)
    theirs = nvidia_stats(nsys, "cuda_gpu_mem_time_sum", export).select(pl.col("count", "total_time").sum()).row(0)
    run = run_of(trace)
    copies = run.events.filter(pl.col("kind") == "copy")
    assert theirs == (copies.height, (copies["end"] - copies["start"]).sum())
    kernels = run.events.filter(pl.col("kind") == "kernel").group_by("rank").agg(pl.col("start").min().alias("first"))
    counted = copies.join(kernels, on="rank").filter(pl.col("start") >= pl.col("first"))
    ours = result_of(trace).roles.filter(pl.col("role") == "copy").select(pl.col("count", "total_ns").sum()).row(0)
    assert ours == (counted.height, (counted["end"] - counted["start"]).sum())


# --- NVTX ranges on the GPU

NO_COPIES = [f"DROP TABLE IF EXISTS CUPTI_ACTIVITY_KIND_{kind}" for kind in ("MEMCPY", "MEMSET")]
NO_SENDS = (
    "DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL WHERE shortName IN (SELECT id FROM StringIds WHERE value LIKE '%SendRecv%')"
)
# SGLang's layerwise markers, plain module paths and nsysk3's own: of a whole layer.
LAYER = r"^(?:nsysk3\.layer (\d+) .*|(?:\{'Module': '[\w.]*\b)?model\.layers\.(\d+)(?:'\})?)$"


def on_the_gpu(table: pl.DataFrame, run: Run) -> pl.DataFrame:
    """Our intervals as NVIDIA's report has them: ``pid``, ``projected_start``, ``projected_duration``."""
    start = pl.col("start_utc_ns") - run.reports[0].to_utc_ns
    return table.join(run.ranks.select("rank", "pid"), on="rank").with_columns(
        start.alias("projected_start"), (pl.col("end_utc_ns") - pl.col("start_utc_ns")).alias("projected_duration")
    )


@pytest.mark.parametrize(
    ("trace", "ranges"),
    [("sglang-h200/pp2-lw", 128), ("sglang-h200/tp2-lw", 272), ("sglang-h200/pp2-markers", 128), ("h200/pp2", 124),
     ("h200/tp2", 256)],
)  # fmt: skip
def test_layers_are_nvidias_projection_of_their_ranges_without_copies(
    nsys: Path, tmp_path: Path, trace: str, ranges: int
) -> None:
    run = run_of(trace)
    keys = ["pid", "layer", "projected_start", "projected_duration"]
    ours = on_the_gpu(result_of(trace).layers, run).select(keys).sort(keys)
    theirs = nvidia_stats(nsys, "nvtx_gpu_proj_trace", altered(trace, tmp_path, *NO_COPIES))
    number = pl.coalesce(pl.col("name").str.extract(LAYER, group) for group in (1, 2)).cast(pl.Int32)
    found = theirs.with_columns(number.alias("layer")).drop_nulls("layer").select(keys).sort(keys)
    assert found.height == ranges
    assert found.equals(ours)


@pytest.mark.parametrize("trace", ["sglang-h200/pp2-markers", "h200/pp2", "h200/tp2"])
def test_forwards_are_nvidias_projection_without_copies_and_sends(nsys: Path, tmp_path: Path, trace: str) -> None:
    run = run_of(trace)
    keys = ["pid", "forward", "projected_start", "projected_duration"]
    ours = on_the_gpu(result_of(trace).forwards, run).select(keys).sort(keys)
    theirs = nvidia_stats(nsys, "nvtx_gpu_proj_trace", altered(trace, tmp_path, *NO_COPIES, NO_SENDS))
    number = pl.col("name").str.extract(r"^nsysk3\.forward (\d+)").cast(pl.Int32)
    found = theirs.with_columns(number.alias("forward")).drop_nulls("forward").select(keys).sort(keys)
    assert found.equals(ours)
    assert found.height >= 16


# --- where NVIDIA's recipes and nsysk3 differ, and nsysk3 is right


def test_ranks_are_not_the_alphabet(recipe: Path, tmp_path: Path) -> None:
    """Of rank2 and rank10, NVIDIA's recipes call rank10 the first; what each file holds, both agree on."""
    for number, device in ((2, 0), (10, 1)):
        gone = [f"DELETE FROM CUPTI_ACTIVITY_KIND_{kind} WHERE deviceId <> {device}" for kind in ("KERNEL", "MEMSET")]
        gone += ["DELETE FROM NVTX_EVENTS WHERE text LIKE 'nsysk3.rank %'"]  # so that only the file's name tells
        shutil.copy(SMALL, tmp_path / f"rank{number}.nsys-rep")
        time.sleep(0.05)  # a recipe takes an export only if it is younger than its report
        altered("h200/tp2", tmp_path, *gone).rename(tmp_path / f"rank{number}.sqlite")
    command = [recipe, "cuda_gpu_kern_sum", "--input", *tmp_path.glob("*.nsys-rep"), "--output", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 0, done.stdout
    files = pl.read_parquet(tmp_path / "out" / "files.parquet")
    assert files["File"].to_list() == ["rank10", "rank2"]  # ranks 0 and 1
    theirs = pl.read_parquet(tmp_path / "out" / "rank_stats.parquet").select("Rank", "Name", "Instances", "Total Time")
    for number, place in ((2, 1), (10, 0)):
        result = nsysk3.analyze(tmp_path / f"rank{number}.sqlite")
        assert [rank.world_rank for rank in result.document.ranks] == [number]
        mine = result.kernels.select("name", "count", "total_ns").rows()
        assert sorted(mine) == sorted(row[1:] for row in theirs.rows() if row[0] == place)


CUSTOM = [
    "UPDATE StringIds SET value = 'cross_device_reduce_2stage' WHERE value LIKE 'ncclDevKernel_AllReduce%'",
    # the library's ranges go with it
    "DELETE FROM NVTX_EVENTS WHERE domainId = (SELECT max(domainId) FROM NVTX_EVENTS WHERE text = 'NCCL')",
]


@pytest.mark.parametrize(("trace", "statements"), [("h200/graph", []), ("h200/tp2", CUSTOM)], ids=["graph", "custom"])
def test_communication_that_nvidias_recipe_does_not_see(
    recipe: Path, tmp_path: Path, trace: str, statements: list[str]
) -> None:
    """It wants an NCCL range around the launch: a graph's replay has none, nor has a collective that is not NCCL's."""
    changed = altered(trace, tmp_path, *statements)
    command = [recipe, "nccl_gpu_overlap_trace", "--input", as_report(changed, tmp_path), "--output", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert "No output generated" in done.stdout
    original, ours = result_of(trace), nsysk3.analyze(changed)
    facts = ("world_rank", "allreduce_count", "allreduce_total_ns", "comm_ns", "overlap_ns", "exposed_comm_ns")
    assert ours.rank_metrics.select(facts).equals(original.rank_metrics.select(facts))
    assert ours.rank_metrics["allreduce_count"].to_list() == [len(ours.collectives) // 2] * 2
    assert ours.rank_metrics["allreduce_count"].min() > 0
