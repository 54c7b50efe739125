#!/usr/bin/env python3
"""How much communication ran beside compute, by merging and sweeping intervals in pandas.

usage: interval_sweep.py TRACE.sqlite

The approach of Holistic Trace Analysis, which reads PyTorch's traces only, on an Nsight export: merge the intervals of
each class of kernels of a GPU, then sort all their ends and sum up.  One number a GPU, to hold `analyze` against.
"""

from __future__ import annotations

import sqlite3
import sys

import pandas as pd

KERNELS = """
select k.start, k."end", k.globalPid as pid, k.deviceId as device, s.value glob 'nccl*' as comm
from CUPTI_ACTIVITY_KIND_KERNEL k left join StringIds s on s.id = k.shortName
"""


def merged(kernels: pd.DataFrame) -> pd.DataFrame:
    ordered = kernels[["start", "end"]].sort_values("start")
    reach = ordered["end"].cummax()
    group = (ordered["start"] > reach.shift()).cumsum()
    return ordered.groupby(group).agg({"start": "min", "end": "max"})


def overlap_ns(kernels: pd.DataFrame) -> int:
    """Time in which both classes ran: where as many have begun and not ended."""
    sides = [merged(kernels[kernels["comm"] == comm]) for comm in (0, 1)]
    ends = pd.concat(
        pd.DataFrame({"at": side[edge], "step": step})
        for side in sides
        for edge, step in (("start", 1), ("end", -1))
    ).sort_values("at")  # fmt: skip
    lasted = ends["at"].shift(-1) - ends["at"]
    return int(lasted[ends["step"].cumsum() == 2].sum())


def main() -> None:
    with sqlite3.connect(f"file:{sys.argv[1]}?mode=ro&immutable=1", uri=True) as db:
        kernels = pd.read_sql_query(KERNELS, db)
    for (pid, device), own in kernels.groupby(["pid", "device"]):
        print(pid, device, overlap_ns(own))


if __name__ == "__main__":
    main()
