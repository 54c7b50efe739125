#!/usr/bin/env python3
"""Measures nsysk3.ops on all GPUs of one machine: correct first, then ceilings, then every variant.

usage: ops_bench.py [--limit-s S] [--sections a,b,...] [--quick]

Writes ops.json and ops.md to $OUT (default build/ops), after every row, so that a killed run keeps what it had.
One process a GPU; a watchdog ends them all at the limit.  NVLink multicast stays off.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import time
import traceback
from pathlib import Path

for name, value in (
    ("NCCL_NVLS_ENABLE", "0"),
    ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"),
    ("NVSHMEM_DISABLE_NVLS", "1"),
    ("TORCH_CPP_LOG_LEVEL", "ERROR"),  # a line for every look at a tensor that is not symmetric
):
    os.environ[name] = value
sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from ops_baselines import baselines  # noqa: E402
from ops_ceilings import ceilings  # noqa: E402
from ops_correct import correct, soak  # noqa: E402
from ops_gemm import gemm_alone, gemm_beside  # noqa: E402
from ops_harness import Bench, result_folder  # noqa: E402
from ops_k0 import k0, k0_grid  # noqa: E402
from ops_k1 import k1_large, k1_small  # noqa: E402
from ops_k2 import k2  # noqa: E402
from ops_k3 import k3  # noqa: E402
from ops_table import write_markdown  # noqa: E402

from nsysk3.ops import cuda  # noqa: E402

# In order of what would be missed most; seconds each may take.  Each part keeps to its time and records rows.
PARTS = {
    correct: 30, ceilings: 20, k1_large: 30, k1_small: 25, k0: 15, k2: 40, k0_grid: 10, k3: 10,
    baselines: 30, gemm_beside: 15, gemm_alone: 20, soak: 15,
}  # fmt: skip
SECTIONS = {part.__name__: (part, seconds) for part, seconds in PARTS.items()}


def worker(rank: int, world: int, options: argparse.Namespace, started: float) -> None:
    faulthandler.dump_traceback_later(options.limit_s, exit=True)
    bench = Bench(rank, world, options.max_tokens, result_folder(), started, options.limit_s)
    properties = torch.cuda.get_device_properties(rank)
    bench.facts = {
        "device": properties.name,
        "world": world,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["ops_bench.py", *sys.argv[1:]]),
        "quick": options.quick,
    }
    for name in options.sections:
        part, seconds = SECTIONS[name]
        bench.budget(seconds * (0.5 if options.quick else 1) * options.stretch)
        if bench.spent():
            bench.record(section=name, skipped="no time left")
            continue
        begin = time.monotonic()
        try:
            part(bench)
        except Exception as error:  # one part's failure must not cost the others
            traceback.print_exc()
            bench.record(section=name, at=bench.at, failed=f"{type(error).__name__}: {error}"[:300])
        bench.facts[f"seconds_{name}"] = round(time.monotonic() - begin, 1)
    bench.save()
    if rank == 0:
        write_markdown(bench.out)
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit-s", type=float, default=230)
    parser.add_argument("--max-tokens", type=int, default=8192)
    parser.add_argument("--sections", type=lambda text: text.split(","), default=list(SECTIONS))
    parser.add_argument("--quick", action="store_true", help="half the time for every part")
    parser.add_argument("--stretch", type=float, default=1.0, help="times the time for every part")
    options = parser.parse_args()
    started = time.monotonic()
    reason = cuda.available()
    world = torch.cuda.device_count()
    if reason or world < 2:
        print(f"cannot measure: {reason or 'one GPU'}", file=sys.stderr)
        return 3
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29577")
    context = mp.start_processes(worker, (world, options, started), nprocs=world, join=False, start_method="spawn")
    code = 0
    try:
        while not context.join(timeout=1):
            if time.monotonic() - started > options.limit_s:
                print("watchdog: time is over", file=sys.stderr)
                code = 124
                break
    except Exception as error:
        print(error, file=sys.stderr)
        code = 1
    for process in context.processes:
        if process.is_alive():
            process.kill()
    write_markdown(result_folder())
    return code


if __name__ == "__main__":
    sys.exit(main())
