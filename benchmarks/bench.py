#!/usr/bin/env python3
"""Speed and memory of `nsysk3 analyze` beside a bare read of the same rows, and beside other tools.

usage: bench.py [--rounds N] [--sizes 1M,3M] [--nsys PATH] [--recipe COMMAND] [--nsys-ai PATH]

Prints the tables of docs/speed.md and writes them to benchmarks/results/<date>.md and .json.  Traces are made once,
into build/bench.  Seconds depend on the machine: the figures to compare are the ratios, whose two sides run in turn.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shlex
import shutil
import sqlite3
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import polars as pl
from scale import scale

import nsysk3
from nsysk3.errors import NsysK3Error
from nsysk3.trace.nsys import find_nsys

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "bench"
RESULTS = ROOT / "benchmarks" / "results"
SMALL = ROOT / "fixtures" / "h200" / "tp2.sqlite"
SWEEP = Path(__file__).with_name("interval_sweep.py")
# Any report that this nsys can open, to stand before the recipe.
ANY_REPORT = ROOT / "fixtures" / "h200" / "tp2-small-2024.2.nsys-rep"
SIZES = {"1M": 22, "3M": 66}  # copies in time of 2832 kernels, each on 16 times the processes: 32 ranks
PROCESSES = 16
RECIPE_SIZES = {"40k": 14, "320k": 113}  # copies of the same on two processes
EARLIER_NS = 100_000
RECIPE = "nccl_gpu_overlap_trace"

# The rows and columns that an analysis cannot do without, each table once.
SCAN = """
select total(start), total("end"), total(deviceId), total(streamId), total(correlationId), total(globalPid),
       total(graphNodeId), total(shortName), total(demangledName) from CUPTI_ACTIVITY_KIND_KERNEL;
select total(start), total("end"), total(deviceId), total(streamId), total(correlationId), total(globalPid),
       total(graphNodeId), total(bytes) from CUPTI_ACTIVITY_KIND_MEMSET;
select total(start), total("end"), total(globalTid), total(correlationId) from CUPTI_ACTIVITY_KIND_RUNTIME
       where nameId in (select id from StringIds where value glob '*Launch*' or value glob '*Mem[cs]*');
select total(start), total("end"), total(globalTid), total(textId), total(length(binaryData)) from NVTX_EVENTS
       where eventType = 59 and textId in (select id from StringIds where value glob 'nccl[A-Z]*')
"""


class Cost(NamedTuple):
    """What one run took."""

    wall_s: float
    cpu_s: float
    peak_gib: float = 0


@dataclass
class Size:
    """One trace size: medians over the rounds.  CPU seconds say what a busy machine's wall seconds cannot."""

    size: str
    kernels: int
    file_mb: float
    analyze_s: float
    peak_gib: float
    scan_s: float
    ratio: float
    analyze_cpu_s: float
    cpu_ratio: float


@dataclass
class Beside:
    """Another tool on the same rows; ``ratio`` and ``cpu_ratio``: its time over ours."""

    tool: str
    size: str
    kernels: int
    tool_s: float
    analyze_s: float
    ratio: float
    cpu_ratio: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", default=",".join(SIZES), help="of " + ", ".join(SIZES))
    parser.add_argument("--nsys", help="else $NSYSK3_NSYS, else PATH")
    parser.add_argument("--recipe", help="how to run a recipe, where `nsys recipe` alone has no Python packages")
    parser.add_argument("--nsys-ai", help="compare with this nsys-ai too")
    args = parser.parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    here = machine()
    sizes = [measure(name, args.rounds) for name in args.sizes.split(",")]
    others, remark = beside(args.nsys, args.recipe, args.nsys_ai)
    now = datetime.now(UTC)
    text = page(sizes, others, remark, f"Measured {now:%Y-%m-%d} on {here}.")
    print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{now:%Y-%m-%d}.md").write_text(text)
    found = {"machine": here, "rounds": args.rounds, "sizes": [asdict(s) for s in sizes],
             "growth_exponent": growth(sizes), "beside": [asdict(o) for o in others], "remark": remark}  # fmt: skip
    (RESULTS / f"{now:%Y-%m-%d}.json").write_text(json.dumps(found, indent=1) + "\n")


def measure(name: str, rounds: int) -> Size:
    """Analyze and bare scan in turn."""
    trace = scaled(SMALL, name, SIZES[name], PROCESSES)
    scan(trace)  # so that every round finds the file in memory
    rounds_of = [(scan(trace), run(analyze(trace))) for _ in range(rounds)]
    median = statistics.median
    return Size(
        name,
        kernels_of(trace),
        trace.stat().st_size / 1e6,
        analyze_s=median(ours.wall_s for _, ours in rounds_of),
        peak_gib=max(ours.peak_gib for _, ours in rounds_of),
        scan_s=median(bare.wall_s for bare, _ in rounds_of),
        ratio=median(ours.wall_s / bare.wall_s for bare, ours in rounds_of),
        analyze_cpu_s=median(ours.cpu_s for _, ours in rounds_of),
        cpu_ratio=median(ours.cpu_s / bare.cpu_s for bare, ours in rounds_of),
    )


def scaled(small: Path, name: str, times: int, processes: int) -> Path:
    """The trace of that size, made unless it is there and newer than what it is made of."""
    big = BUILD / f"{name}.sqlite"
    newest = max(path.stat().st_mtime for path in (small, Path(__file__).with_name("scale.py")))
    if not big.exists() or big.stat().st_mtime < newest:
        print(f"making {big.relative_to(ROOT)}", file=sys.stderr)
        scale(small, big, times, processes)
    return big


def scan(trace: Path) -> Cost:
    """What SQLite, in one thread, needs to visit the cells and add them up."""
    with sqlite3.connect(f"{trace.as_uri()}?mode=ro&immutable=1", uri=True) as db:
        wall, cpu = time.perf_counter(), time.process_time()
        for query in SCAN.split(";"):
            db.execute(query).fetchall()
        return Cost(time.perf_counter() - wall, time.process_time() - cpu)


def kernels_of(trace: Path) -> int:
    with sqlite3.connect(f"{trace.as_uri()}?mode=ro&immutable=1", uri=True) as db:
        count: int = db.execute("select count(*) from CUPTI_ACTIVITY_KIND_KERNEL").fetchone()[0]
    return count


def analyze(trace: Path) -> list[str]:
    command = "from nsysk3.cli import main; main()"
    return [sys.executable, "-c", command, "analyze", str(trace), "--out", str(BUILD / "out" / trace.stem)]


def run(command: list[str]) -> Cost:
    """What a whole command took; raises CalledProcessError when it fails.

    Linux lets a child inherit its parent's peak, so this process must stay smaller than what it measures: the sizes
    come first, and the tables that `twin` holds come after them.
    """
    begin = time.perf_counter()
    with (BUILD / "last.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=BUILD)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - begin
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, (BUILD / "last.log").read_text())
    return Cost(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 2**20)


def growth(sizes: list[Size]) -> float | None:
    """Exponent of cost over kernels between the smallest and the largest trace; n log n is about 1.07 here."""
    if len(sizes) < 2:
        return None
    low, high = sizes[0], sizes[-1]
    return math.log(high.analyze_s / low.analyze_s) / math.log(high.kernels / low.kernels)


def beside(nsys: str | None, recipe: str | None, nsys_ai: str | None) -> tuple[list[Beside], str]:
    """Other tools on the same rows, and what to know about it."""
    tool = None
    try:
        tool = find_nsys(nsys)
        remark = f"nsys {tool.version}. Its exports, like ours, were made beforehand."
    except NsysK3Error as error:
        remark = f"Not compared with Nsight's own tools: {error}"
    found = []
    try:
        for name, times in RECIPE_SIZES.items():
            trace = scaled(overlapping(), name, times, 1)
            tools = {"merge and sweep in pandas": [sys.executable, str(SWEEP), str(trace)]}
            if nsys_ai:
                tools["`nsys-ai overlap`, one GPU"] = [nsys_ai, "overlap", "--gpu", "0", "--trim", "0", "10000",
                                                      str(trace)]  # fmt: skip
            if tool:
                path, out = str(tool.path), str(BUILD / f"{name}-recipe")
                start = shlex.split(recipe) if recipe else [path, "recipe"]
                tools["`nsys stats -r cuda_gpu_kern_sum`"] = [path, "stats", "-r", "cuda_gpu_kern_sum", str(trace)]
                tools[f"`nsys recipe {RECIPE}`"] = [*start, RECIPE, "--input", str(twin(path, name, trace)), "--output",
                                                  out, "--force-overwrite"]  # fmt: skip
            for label, command in tools.items():
                # Once: the recipe takes minutes, and the two are far apart.
                theirs, ours = run(command), run(analyze(trace))
                ratios = theirs.wall_s / ours.wall_s, theirs.cpu_s / ours.cpu_s
                found.append(Beside(label, name, kernels_of(trace), theirs.wall_s, ours.wall_s, *ratios))
    except subprocess.CalledProcessError as error:
        said = (str(error.output).strip().splitlines() or ["nothing"])[-1]
        return found, f"`{shlex.join(error.cmd[:3])}` failed and said: {said}"
    return found, remark


def twin(nsys: str, name: str, trace: Path) -> Path:
    """A report for the recipe that holds the rows of ``trace``.

    The recipe reads the parquet tables beside a report when they are newer than it; here they hold the scaled rows, in
    the columns that this nsys writes.
    """
    report = BUILD / f"{name}.nsys-rep"
    tables = BUILD / f"{name}_pqtdir"
    shutil.copyfile(ANY_REPORT, report)
    shutil.rmtree(tables, ignore_errors=True)
    run([nsys, "export", "-t", "parquetdir", "-o", str(tables), str(report)])
    for table in ("StringIds", "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"):
        file = tables / f"{table}.parquet"
        schema = pl.read_parquet_schema(file)
        columns = ", ".join(f'"{column}"' for column in schema)
        with sqlite3.connect(trace) as db:
            rows = pl.read_database(f"select {columns} from {table}", db, infer_schema_length=None)
        rows.select(pl.col(column).cast(kind, strict=False) for column, kind in schema.items()).write_parquet(file)
    return report


def overlapping() -> Path:
    """The small trace with every collective moved beside the compute before it.

    The recipe leaves kernels without overlap out of its quadratic step, and the real trace has no others.
    """
    path = BUILD / "overlapping.sqlite"
    if not path.exists():
        shutil.copyfile(SMALL, path)
        with sqlite3.connect(path) as db:
            db.execute(
                f'update CUPTI_ACTIVITY_KIND_KERNEL set start = start - {EARLIER_NS}, "end" = "end" - {EARLIER_NS} '
                "where shortName in (select id from StringIds where value glob 'nccl*')"
            )
    return path


def machine() -> str:
    cpu = next((line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                if line.startswith("model name")), platform.machine())  # fmt: skip
    return (
        f"{os.cpu_count()} x {cpu}, Python {platform.python_version()}, polars {pl.__version__}, "
        f"nsysk3 {nsysk3.__version__}, load average {os.getloadavg()[1]:.1f} (an idle machine has 0)"
    )


def page(sizes: list[Size], others: list[Beside], remark: str, head: str) -> str:
    lines = [head, "",
             "| trace | kernels | file | `analyze` | peak memory | bare scan | analyze / scan | in CPU time |",
             "|---|---:|---:|---:|---:|---:|---:|---:|"]  # fmt: skip
    lines += [f"| {s.size} | {s.kernels:,} | {s.file_mb:,.0f} MB | {s.analyze_s:.1f} s | {s.peak_gib:.2f} GiB | "
              f"{s.scan_s:.2f} s | {s.ratio:.1f} | {s.cpu_ratio:.1f} |" for s in sizes]  # fmt: skip
    exponent = growth(sizes)
    if exponent is not None:
        lines += ["", f"Growth of `analyze`: kernels to the power {exponent:.2f}."]
    if others:
        lines += ["", "| beside | kernels | theirs | `analyze` | theirs / ours | in CPU time |",
                  "|---|---:|---:|---:|---:|---:|"]  # fmt: skip
        lines += [f"| {o.tool} | {o.kernels:,} | {o.tool_s:.1f} s | {o.analyze_s:.1f} s | {o.ratio:.1f} | "
                  f"{o.cpu_ratio:.1f} |" for o in others]  # fmt: skip
    return "\n".join([*lines, "", remark, ""])


if __name__ == "__main__":
    main()
