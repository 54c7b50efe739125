#!/usr/bin/env python3
"""Make a large Nsight Systems SQLite export out of a small real one.

usage: scale.py SMALL.sqlite BIG.sqlite --times N [--processes P]

GPU work, CUDA calls and NVTX ranges are repeated N times, one copy after the other in time, for P copies of the
processes, each with process ids and GPUs of its own.  The ratios between the tables (launches, other CUDA calls and
NCCL ranges a kernel), the kernel names and the payloads stay those of the real trace.
"""

from __future__ import annotations

import argparse
import shutil
import sqlite3
from pathlib import Path

KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
EVENTS = (
    KERNELS, "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS",
)  # fmt: skip
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
    tables = [table for table in EVENTS if table in present]
    spans = [db.execute(f"select min(start), max(end) from {table} {_kept(table)}").fetchone() for table in tables]
    spans = [span for span in spans if span[0] is not None]
    with_ids = [table for table in tables if table != "NVTX_EVENTS"]
    ids = [db.execute(f"select max(correlationId) from {table}").fetchone()[0] or 0 for table in with_ids]
    values = {
        "period": max(end for _, end in spans) - min(start for start, _ in spans) + PAUSE_NS,
        "ids": max(ids) + 1,
        "devices": db.execute(f"select max(deviceId) + 1 from {KERNELS}").fetchone()[0],
    }
    for name, count in (("copies", times), ("processes", processes)):
        db.execute(f"create temp table {name} ({name[0]} integer)")
        db.executemany(f"insert into {name} values (?)", [(number,) for number in range(count)])
    for table in tables:
        _repeat(db, table, values)
    if "ANALYSIS_DETAILS" in present:
        db.execute(
            "update ANALYSIS_DETAILS set duration = duration + (:copies - 1) * :period", {"copies": times, **values}
        )
    if "TARGET_INFO_GPU" in present:
        _more_gpus(db, values["devices"])
    kernels: int = db.execute(f"select count(*) from {KERNELS}").fetchone()[0]
    db.commit()
    db.close()
    beside.replace(big)
    return kernels


def _columns(db: sqlite3.Connection, table: str) -> list[str]:
    return [row[1] for row in db.execute(f"pragma table_info({table})")]


def _kept(table: str) -> str:
    """Of NVTX only ranges go on in time; domains, names and marks are said once a process."""
    return "where eventType = 59" if table == "NVTX_EVENTS" else ""


def _repeat(db: sqlite3.Connection, table: str, values: dict[str, int]) -> None:
    columns = _columns(db, table)
    made = [f'"{name}" + {SHIFTED[name]}' if name in SHIFTED else f'"{name}"' for name in columns]
    db.execute(f"create temp table small as select * from {table}")
    once = "and (c = 0 or eventType = 59)" if table == "NVTX_EVENTS" else ""
    # `cross join` fixes the order: by time over all processes, as Nsight writes its tables.
    db.execute(
        f"insert into {table} select {', '.join(made)} from copies cross join small cross join processes "
        f"where p + c > 0 {once}",
        values,
    )
    db.execute("drop table small")


def _more_gpus(db: sqlite3.Connection, devices: int) -> None:
    columns = _columns(db, "TARGET_INFO_GPU")
    another = {"id": f"id + p * {devices}", "cuDevice": f"cuDevice + p * {devices}", "uuid": "uuid || '-' || p"}
    made = [another.get(name, f'"{name}"') for name in columns]
    db.execute("create temp table gpus as select * from TARGET_INFO_GPU")
    db.execute(f"insert into TARGET_INFO_GPU select {', '.join(made)} from gpus cross join processes where p > 0")


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
