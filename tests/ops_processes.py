"""Checks that need several ranks: processes that run them all once, and what each check said on each rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

Check = Callable[[], None]
_GRACE_S = 20
# Neither needed nor wanted: on some hosts it does harm.
_NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


def run_ranks(script: Path, world: int, folder: Path, *arguments: str, limit_s: float = 300) -> dict[str, list[str]]:
    """What went wrong, by check: a text for each rank that failed, or died."""
    here = Path(__file__).resolve().parent
    paths = [str(here), str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **_NO_MULTICAST, "PYTHONPATH": os.pathsep.join(paths)}
    logs = [folder / f"rank{rank}.log" for rank in range(world)]
    ranks = []
    for rank, log in enumerate(logs):
        command = [sys.executable, str(script), str(rank), str(world), str(folder), *arguments]
        with log.open("w") as out:
            ranks.append(subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT))
    _wait(ranks, limit_s)
    written = {n: json.loads(path.read_text()) for n in range(world) if (path := folder / f"rank{n}.json").is_file()}
    names = dict.fromkeys(name for said in written.values() for name in said)
    assert names, "\n".join(_shown(log) for log in logs)
    results: dict[str, list[str]] = {name: [] for name in names}
    for number, rank in enumerate(ranks):
        dead = f"died with {rank.returncode}: {_shown(logs[number])}"
        for name in names:
            if failure := written.get(number, {}).get(name, dead):
                results[name].append(f"rank {number}: {failure}")
    return results


def _shown(log: Path) -> str:
    """What a rank printed: how far it came and what went wrong first stand at the beginning."""
    text = log.read_text()
    return text if len(text) <= 6000 else f"{text[:4000]}\n[...]\n{text[-2000:]}"


def _wait(ranks: list[subprocess.Popen[bytes]], limit_s: float) -> None:
    """Until all have ended; those that wait for one that failed have not long."""
    end = time.monotonic() + limit_s
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < end:
        if any(rank.poll() is not None for rank in ranks):
            end = min(end, time.monotonic() + _GRACE_S)
        time.sleep(0.05)
    for rank in ranks:
        if rank.poll() is None:
            rank.kill()
            rank.wait()


def rank_main(checks: Callable[..., dict[str, Check]], backend: str) -> None:
    """The main of a rank: join the others and run every check until one fails, for the others then wait in vain."""
    rank, world, folder, *arguments = sys.argv[1:]
    torch.set_num_threads(1)
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None
    dist.init_process_group(
        backend, init_method=f"file://{folder}/meet", rank=int(rank), world_size=int(world),
        timeout=timedelta(seconds=120), device_id=device,
    )  # fmt: skip
    said = dict.fromkeys(named := checks(*arguments), "not run: a check before it failed")
    try:
        for name, check in named.items():
            begin = time.monotonic()
            check()
            dist.barrier()
            said[name] = ""
            print(f"{name}: {time.monotonic() - begin:.1f} s", flush=True)
    except BaseException:
        said[name] = traceback.format_exc()
    Path(folder, f"rank{rank}.json").write_text(json.dumps(said))
    os._exit(0)  # with a failed peer, the end of the group would wait
