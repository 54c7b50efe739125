#!/usr/bin/env python3
"""Make a large Nsight Systems SQLite export out of a small real one.

usage: scale.py SMALL.sqlite BIG.sqlite --times N [--processes P]

GPU work, CUDA calls and NVTX ranges are repeated N times, one copy after the other in time, for P copies of the
processes, each with process ids and GPUs of its own.  The ratios between the tables (launches, other CUDA calls and
NCCL ranges a kernel), the kernel names and the payloads stay those of the real trace.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import sqlite3
from pathlib import Path

KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
GPU_AND_API = (KERNELS, "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET", "CUPTI_ACTIVITY_KIND_RUNTIME")
PAUSE_NS = 2_000_000  # between two copies
# What to add to a column for copy `c` of process `p`; a process id has bits 24 to 47 of a global id.
PID_STEP = 4096
SHIFTED = {
    "start": "c * :period",
    "end": "c * :period",
    "correlationId": "c * :ids",
    "globalPid": f"p * {PID_STEP << 24}",
    "globalTid": f"p * {PID_STEP << 24}",
    "endGlobalTid": f"p * {PID_STEP << 24}",
    "deviceId": "p * :devices",
}


def scale(small: Path, big: Path, times: int, processes: int) -> int:
    """Write ``big`` and return its number of kernels; written beside and renamed, so a killed run leaves nothing."""
    beside = big.with_name(big.name + ".part")
    shutil.copyfile(small, beside)
    db = sqlite3.connect(beside)
    db.execute("pragma journal_mode = off")
    db.execute("pragma synchronous = off")
    present = {name for (name,) in db.execute("select name from sqlite_master where type = 'table'")}
    first, last, devices = db.execute(f"select min(start), max(end), max(deviceId) + 1 from {KERNELS}").fetchone()
    tables = [table for table in GPU_AND_API if table in present]
    ids = max(db.execute(f"select max(correlationId) from {table}").fetchone()[0] or 0 for table in tables) + 1
    values = {"period": last - first + PAUSE_NS, "ids": ids, "devices": devices}
    db.execute("create temp table copies (p integer, c integer)")
    others = [(p, c) for p, c in itertools.product(range(processes), range(times)) if (p, c) != (0, 0)]
    db.executemany("insert into copies values (?, ?)", others)
    for table in tables:
        _repeat(db, table, values)
    if "NVTX_EVENTS" in present:
        # Only ranges go on in time; domains, names and marks are said once a process.
        _repeat(db, "NVTX_EVENTS", values, where="c = 0 or eventType = 59")
    if "TARGET_INFO_GPU" in present:
        _more_gpus(db, processes, devices)
    kernels: int = db.execute(f"select count(*) from {KERNELS}").fetchone()[0]
    db.commit()
    db.close()
    beside.replace(big)
    return kernels


def _columns(db: sqlite3.Connection, table: str) -> list[str]:
    return [row[1] for row in db.execute(f"pragma table_info({table})")]


def _repeat(db: sqlite3.Connection, table: str, values: dict[str, int], where: str = "true") -> None:
    columns = _columns(db, table)
    made = [f'"{name}" + {SHIFTED[name]}' if name in SHIFTED else f'"{name}"' for name in columns]
    db.execute(f"create temp table small as select * from {table}")
    # `cross join` fixes the order: copy by copy, each in the order of the real file.
    db.execute(f"insert into {table} select {', '.join(made)} from copies cross join small where {where}", values)
    db.execute("drop table small")


def _more_gpus(db: sqlite3.Connection, processes: int, devices: int) -> None:
    columns = _columns(db, "TARGET_INFO_GPU")
    another = {"id": f"id + p * {devices}", "cuDevice": f"cuDevice + p * {devices}", "uuid": "uuid || '-' || p"}
    made = [another.get(name, f'"{name}"') for name in columns]
    db.execute("create temp table gpus as select * from TARGET_INFO_GPU")
    db.execute(f"insert into TARGET_INFO_GPU select {', '.join(made)} from copies cross join gpus where c = 0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("small", type=Path)
    parser.add_argument("big", type=Path)
    parser.add_argument("--times", type=int, required=True)
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    print(scale(args.small, args.big, args.times, args.processes), "kernels")


if __name__ == "__main__":
    main()
