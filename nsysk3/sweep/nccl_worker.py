"""Collectives timed through torch.distributed, printed as nccl-tests would.

Runs on hosts that have torch but not nsysk3: standard library and torch only, one file.  On each host one process
starts a rank for each of its devices; rank 0 prints the log.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

LIMIT_S = 300


def options(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    add = parser.add_argument
    add("--op", choices=("all_reduce", "sendrecv"), default="all_reduce")
    add("--world", type=int, required=True, help="ranks of all hosts")
    add("--first", type=int, default=0, help="number of this host's first rank")
    add("--devices", required=True, help="this host's devices, with commas between; a rank each")
    add("--meet", help="ADDRESS:PORT of the first host; without it all ranks are here")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--sizes", required=True, help="bytes, with commas between")
    add("--iters", type=int, default=20)
    add("--warmup", type=int, default=5)
    add("--rank", type=int, help="set by the process that starts the ranks")
    return parser.parse_args(words)


def main() -> int:
    """Start the ranks, or be one."""
    given = options()
    if given.rank is not None:
        measure(given)
        return 0
    meet = given.meet or f"127.0.0.1:{free_port()}"
    count = len(given.devices.split(","))
    command = [sys.executable, os.path.abspath(__file__), *sys.argv[1:]]  # noqa: PTH100
    ranks = [subprocess.Popen([*command, "--meet", meet, "--rank", str(given.first + place)]) for place in range(count)]
    try:
        return wait(ranks)
    finally:
        for rank in ranks:
            rank.kill()


def wait(ranks: list[Any]) -> int:
    """The first exit code that is not 0; the other ranks would only wait for the lost one."""
    while True:
        codes = [rank.poll() for rank in ranks]
        failed = [code for code in codes if code]
        if failed:
            return 1
        if all(code == 0 for code in codes):
            return 0
        time.sleep(0.05)


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def measure(given: argparse.Namespace) -> None:
    """Be one rank."""
    import torch
    import torch.distributed as dist

    number = int(given.devices.split(",")[given.rank - given.first])
    cuda = given.device == "cuda"
    if cuda:
        torch.cuda.set_device(number)
    device = torch.device("cuda", number) if cuda else torch.device("cpu")
    dist.init_process_group(
        "nccl" if cuda else "gloo", init_method=f"tcp://{given.meet}", rank=given.rank, world_size=given.world,
        timeout=timedelta(seconds=LIMIT_S), device_id=device if cuda else None,
    )  # fmt: skip
    try:
        places: list[Any] = [None] * given.world
        dist.all_gather_object(places, place_of(torch, number, cuda))
        if given.rank == 0:
            print(head(torch, given, places, cuda), flush=True)
        rates, wrongs = [], 0
        for size in map(int, given.sizes.split(",")):
            count = max(size // 4, 1)
            wrong = check(torch, dist, given, count, device)
            seconds = timed(torch, dist, given, count, device)
            busbw = count * 4 / seconds / 1e9 * (2 * (given.world - 1) / given.world if given.op == "all_reduce" else 1)
            rates.append(busbw)
            wrongs += wrong
            if given.rank == 0:
                print(line(given.op, count, seconds, busbw, wrong), flush=True)
        if given.rank == 0:
            print(tail(rates, wrongs), flush=True)
    finally:
        dist.destroy_process_group()


def place_of(torch: Any, number: int, cuda: bool) -> tuple[str, int, int, str, str]:
    """Host, process, device, PCI address and name of this rank's device."""
    if not cuda:
        return socket.gethostname(), os.getpid(), number, "", "CPU"
    facts = torch.cuda.get_device_properties(number)
    try:
        bus = f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}"
    except AttributeError:  # older versions of torch do not tell
        bus = ""
    return socket.gethostname(), os.getpid(), number, bus, facts.name


def make(torch: Any, count: int, rank: int, device: Any) -> Any:
    """Small whole numbers, unlike those of the next ranks; their sums over any number of ranks are exact."""
    return ((torch.arange(count, device=device, dtype=torch.int32) + rank) % 8).to(torch.float32)


def check(torch: Any, dist: Any, given: argparse.Namespace, count: int, device: Any) -> int:
    """Values that are wrong after one operation, on all ranks together."""
    mine = make(torch, count, given.rank, device)
    if given.op == "all_reduce":
        got = mine
        dist.all_reduce(got)
        expected = torch.zeros_like(got)
        for rank in range(given.world):
            expected += make(torch, count, rank, device)
    else:
        got = torch.empty_like(mine)
        ring(dist, given, mine, got)
        expected = make(torch, count, (given.rank - 1) % given.world, device)
    wrong = (got != expected).sum()
    dist.all_reduce(wrong)
    return int(wrong)


def ring(dist: Any, given: argparse.Namespace, out: Any, into: Any) -> None:
    """Send to the next rank what the one before sends here."""
    following, before = (given.rank + 1) % given.world, (given.rank - 1) % given.world
    pair = [dist.P2POp(dist.isend, out, following), dist.P2POp(dist.irecv, into, before)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()


def timed(torch: Any, dist: Any, given: argparse.Namespace, count: int, device: Any) -> float:
    """Seconds of one operation: the mean over the iterations, then over the ranks, as nccl-tests has it."""
    out, into = torch.zeros(count, device=device), torch.zeros(count, device=device)

    def step() -> None:
        if given.op == "all_reduce":
            dist.all_reduce(out)
        else:
            ring(dist, given, out, into)

    for _ in range(given.warmup):
        step()
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(given.iters):
            step()
        end.record()
        torch.cuda.synchronize()
        seconds = begin.elapsed_time(end) / 1000 / given.iters
    else:
        start = time.perf_counter()
        for _ in range(given.iters):
            step()
        seconds = (time.perf_counter() - start) / given.iters
    mean = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(mean)
    return float(mean.item()) / int(given.world)


def head(torch: Any, given: argparse.Namespace, places: list[Any], cuda: bool) -> str:
    """The beginning of the log."""
    version = ".".join(map(str, torch.cuda.nccl.version())) if cuda else ""
    sizes = [int(size) for size in given.sizes.split(",")]
    made_by = f"NCCL {version}" if cuda else "gloo on CPUs"
    lines = [
        f"# Collective test starting: {given.op}_perf",
        f"# measured by nsysk3 nccl-bench through torch {torch.__version__}, {made_by}",
        f"# nRanks {given.world} minBytes {min(sizes)} maxBytes {max(sizes)} warmup iters: {given.warmup} "
        f"iters: {given.iters} validation: 1",
        "#",
        "# Using devices",
    ]
    for rank, (host, pid, device, bus, name) in enumerate(places):
        lines.append(f"#  Rank {rank:2d} Group  0 Pid {pid:6d} on {host:>10} device {device:2d} [{bus}] {name}")
    lines += ["#", "#" + columns(*[""] * 5, *["", "out-of-place", "", ""], *["", "in-place", "", ""])[1:]]
    measured = ("time", "algbw", "busbw", "#wrong")
    lines.append("#" + columns("size", "count", "type", "redop", "root", *measured, *measured)[1:])
    units = ("(us)", "(GB/s)", "(GB/s)", "")
    lines.append("#" + columns("(B)", "(elements)", "", "", "", *units, *units)[1:])
    return "\n".join(lines)


def columns(*cells: object) -> str:
    """Cells flush right in the columns of a log, a blank between any two."""
    widths = (12, 13, 9, 7, 7, 9, 12, 7, 6, 9, 8, 7, 6)
    return " ".join(f"{cell!s:>{width}}" for cell, width in zip(cells, widths, strict=True))


def line(op: str, count: int, seconds: float, busbw: float, wrong: int) -> str:
    """One size."""
    size = count * 4
    redop = "sum" if op == "all_reduce" else "none"
    measured = (f"{seconds * 1e6:.2f}", f"{size / seconds / 1e9:.3f}", f"{busbw:.3f}", wrong)
    return columns(size, count, "float", redop, -1, *measured, *["N/A"] * 4)


def tail(rates: list[float], wrong: int) -> str:
    """The end of the log."""
    return (
        f"# Out of bounds values : {wrong} {'OK' if not wrong else 'FAILED'}\n"
        f"# Avg bus bandwidth    : {sum(rates) / max(len(rates), 1):g}\n#"
    )


if __name__ == "__main__":
    sys.exit(main())
