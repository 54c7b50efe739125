"""NVIDIA's own tools on the same traces: their numbers are ours."""

from __future__ import annotations

import csv
import io
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

import nsysk3
from nsysk3.analysis.intervals import covered, union
from nsysk3.analysis.roles import assign_roles
from nsysk3.classify import COMM_ROLES, RuleSet
from nsysk3.trace.load import Run

pytestmark = pytest.mark.nsys
SMALL = FIXTURES / "h200" / "tp2-small-2024.2.nsys-rep"


@pytest.fixture
def recipe(nsys: Path) -> Path:
    """The wrapper that runs NVIDIA's recipes."""
    found = nsys.parent.parent / "nsys-recipe"
    if not found.exists():
        pytest.skip(f"{found} is not there: `get-nsys --recipes` makes it")
    return found


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
        report, run = as_report(path, tmp_path), nsysk3.load(path)
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


def nvidia_kernels(nsys: Path, export: Path) -> dict[str, tuple[int, int, float, int]]:
    command = [nsys, "stats", "-r", "cuda_gpu_kern_sum", "--format", "csv", "-q", export]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=True)
    text = done.stdout[done.stdout.index("Time (%)") :]
    return {
        row["Name"]: (int(row["Instances"]), int(row["Total Time (ns)"]), float(row["Med (ns)"]), int(row["Max (ns)"]))
        for row in csv.DictReader(io.StringIO(text))
    }


@pytest.mark.parametrize("trace", ["tp2-small", "h200/pp2", "sglang-h200/pp2-lw"])
def test_kernel_counts_totals_and_medians_are_nvidias(nsys: Path, tmp_path: Path, trace: str) -> None:
    export = tmp_path / "r.sqlite"
    if trace == "tp2-small":
        command = [nsys, "export", "--type=sqlite", f"--output={export}", SMALL]
        subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, check=True)
    else:
        shutil.copy(FIXTURES / f"{trace}.sqlite", export)
    result = nsysk3.analyze(export)
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
