"""Two stages that run a prompt with markers, for a profiler to look at: the first starts the other."""

from __future__ import annotations

import os
import subprocess
import sys

import torch
import torch.distributed as dist
from workload_ranks import Layout

from nsysk3.workload.hub import pack
from nsysk3.workload.options import Options
from nsysk3.workload.scheduler import Request, Scheduler


def main(rank: int, meet: str) -> None:
    other = None if rank else subprocess.Popen([sys.executable, __file__, "1", meet])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
    options = Options(scale="small", layers=4, pp_size=2, pp_async_batch_depth=2, chunked_prefill_size=24, device="cpu")
    layout = Layout(options)
    scheduler = Scheduler(chunk=24, requests_a_batch=2, running=3, depth=options.depth)
    scheduler.add(Request(1, range(1, 61), 1))
    layout.marks.start(None)
    while (batch := scheduler.next()) is not None:
        layout.run(batch.message() | {"ids": pack(batch.ids)})
    layout.marks.stop()
    layout.engine.close()
    if other is not None:
        assert other.wait() == 0


if __name__ == "__main__":
    os.environ["NSYSK3_MARKERS"] = "1"
    main(int(sys.argv[1]), sys.argv[2])
