"""What a rank costs when there are more of them: simulated runs of 32 to 256 ranks on the workers of a Dask cluster.

    python benchmarks/scale_out.py --folder /scratch/runs

Every report holds eight ranks, a stage of a pipeline, with the same kernels a rank.  The largest run is simulated; the
smaller ones are its first reports, so that work grows with the ranks and nothing else does.  Each is analysed in a
fresh interpreter by workers that are processes of their own and read the files themselves, and its numbers are held
against the truth that the simulation wrote.  Takes about 20 GB and, on two cores, an hour.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import polars as pl

from nsysk3 import __version__
from nsysk3.analysis.analyze import analyze
from nsysk3.run.inputs import natural
from nsysk3.scale.cluster import Cluster
from nsysk3.simulate.run import simulate
from nsysk3.simulate.setup import configure

RESULTS = Path(__file__).parent / "results"
RANKS_A_REPORT = 8
GIB = 2**30
CLOSE = 0.001  # what a summed wait may be off by


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, required=True, help="where runs are made; those already there are kept")
    parser.add_argument("--ranks", type=int, nargs="+", default=[32, 64, 128, 256])
    parser.add_argument("--layers", type=int, default=8, help="of a stage, which is a report")
    parser.add_argument("--micro-batches", type=int, default=640)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--delete", action="store_true", help="delete each run when it is measured")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{time.strftime('%Y-%m-%d')}-scale-out.md")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measure(given.measure, given.workers)))
        return
    rows = []
    whole = given.folder / str(max(given.ranks))
    make(whole, max(given.ranks) // RANKS_A_REPORT, given.layers, given.micro_batches)
    for ranks in given.ranks:
        run = given.folder / str(ranks)
        first_reports(whole, run, ranks // RANKS_A_REPORT)
        command = [
            sys.executable,
            __file__,
            "--folder",
            given.folder,
            "--workers",
            str(given.workers),
            "--measure",
            run,
        ]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    if given.delete:
        shutil.rmtree(given.folder)
    facts = {
        "command": f"benchmarks/scale_out.py --ranks {' '.join(map(str, given.ranks))} --layers {given.layers} "
        f"--micro-batches {given.micro_batches} --workers {given.workers}",
        "nsysk3": __version__, "python": platform.python_version(), "polars": pl.__version__, "cores": os.cpu_count(),
        "distributed": __import__("distributed").__version__, "runs": rows,
    }  # fmt: skip
    given.out.write_text(page(facts), "utf-8")
    given.out.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n", "utf-8")


def make(run: Path, reports: int, layers: int, micro_batches: int) -> None:
    """Simulate a pipeline whose stages are reports, unless it is there already."""
    if not (run / "truth.json").is_file():
        sizes = {"pp": reports, "tp": RANKS_A_REPORT, "ep": RANKS_A_REPORT, "nodes": reports, "seed": reports}
        simulate(configure(None, (), sizes | {"layers": layers * reports, "micro_batches": micro_batches}), run)


def first_reports(whole: Path, run: Path, reports: int) -> None:
    """A run of the first reports of another, by links."""
    if run.exists():
        return
    facts = json.loads((whole / "truth.json").read_text("utf-8"))
    facts["ranks"] = facts["ranks"][: reports * RANKS_A_REPORT]
    (run / "nodes").mkdir(parents=True)
    for node in sorted((whole / "nodes").iterdir(), key=natural)[:reports]:
        (run / "nodes" / node.name).symlink_to(node.absolute())
    shutil.copy(whole / "run.json", run)
    (run / "truth.json").write_text(json.dumps(facts), "utf-8")


def measure(run: Path, workers: int) -> dict[str, Any]:
    """Analyse one run on a cluster of its own."""
    from distributed import LocalCluster

    os.environ["POLARS_MAX_THREADS"] = str(max(1, (os.cpu_count() or 1) // workers))  # for the workers: ours has begun
    with (
        LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=None, memory_limit=0) as cluster,
        Cluster(cluster.scheduler_address) as crew,
    ):
        before, begun, spent = crew.on_all(cpu_s), time.monotonic(), cpu_s()
        result = analyze(run, crew=crew)
        wall, here = time.monotonic() - begun, cpu_s() - spent
        there = sum(crew.on_all(cpu_s).values()) - sum(before.values())
        account = crew.account
    files = [file.stat().st_size for file in run.glob("nodes/*/*.sqlite")]
    return {
        "ranks": result.rank_metrics.height, "reports": len(files), "bytes": sum(files), "wall_s": wall,
        "workers_cpu_s": there, "client_cpu_s": here, "worker_peak": max(account.peaks.values()),
        "client_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "sent": account.sent,
        "received": account.received, **truth_of(run, result.rank_metrics),
    }  # fmt: skip


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def truth_of(run: Path, ranks: pl.DataFrame) -> dict[str, Any]:
    """How the analysis compares with what really happened, by rank."""
    facts = json.loads((run / "truth.json").read_text("utf-8"))
    both = pl.DataFrame(facts["ranks"]).join(ranks, left_on="rank", right_on="world_rank", suffix="_found")
    # Durations are as the hosts' clocks saw them, which drift by a few parts per million.
    pairs = (("allreduce_total_ns",) * 2, ("allreduce_p50_ns",) * 2, ("p2p_ns", "p2p_total_ns"))
    apart = [_apart(both[true], both[found if found != true else f"{true}_found"]) for true, found in pairs]
    # In a part of a run the first and the last stage wait for others that are not in it: that cannot be told.
    stages = pl.col("pp_rank")
    part = both.height < facts["config"]["pp"] * facts["config"]["tp"]
    inner = both.filter((stages > stages.min()) & (stages < stages.max())) if part else both
    waited = inner["wait_collective_ns"] + inner["wait_upstream_ns"] + inner["wait_downstream_ns"]
    return {
        "kernels": int(ranks["kernel_count"].sum()),
        "counts_exact": bool((both["allreduce_count"] == both["allreduce_count_found"]).all()),
        "time_error": max(apart),
        "wait_ranks": inner.height,
        "wait_close": int(((waited - inner["wait_ns"]).abs() < CLOSE * inner["wait_ns"]).sum()),
        "wait_error": _apart(inner["wait_ns"], waited),
    }


def _apart(true: pl.Series, found: pl.Series) -> float:
    return float(((found - true).abs() / true).max())  # type: ignore[arg-type]


def page(facts: dict[str, Any]) -> str:
    head = (
        "ranks", "reports", "kernels", "exports", "wall", "CPU a rank", "of it the client", "most memory of a worker",
        "of the client and scheduler", "sent", "received", "AllReduce counts exact", "times off by at most",
        "waits within 0.1 %",
    )  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|" + "---:|" * len(head)]
    for row in facts["runs"]:
        cells = (
            row["ranks"], row["reports"], f"{row['kernels']:,}", f"{row['bytes'] / 1e9:.1f} GB",
            f"{row['wall_s']:,.0f} s",
            f"{(row['workers_cpu_s'] + row['client_cpu_s']) / row['ranks']:.2f} s",
            f"{row['client_cpu_s'] / row['ranks']:.2f} s", f"{row['worker_peak'] / GIB:.2f} GiB",
            f"{row['client_peak'] / GIB:.2f} GiB", f"{row['sent'] / 1e6:,.0f} MB", f"{row['received'] / 1e6:,.0f} MB",
            "yes" if row["counts_exact"] else "no", f"{row['time_error'] * 100:.4f} %",
            f"{row['wait_close']} of {row['wait_ranks']} ranks",
        )  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return (
        "# Cost of a rank, 32 to 256 ranks on a Dask cluster\n\n"
        + "\n".join(lines)
        + "\n\nA simulated run of the most ranks, and the first reports of it: eight ranks a report, the same kernels "
        "a rank. The workers are processes of their own that read the files. Against the truth of the simulation, on "
        "the worst rank: number of AllReduce kernels; total and median time of AllReduce and total of P2P; and how "
        "long its communication waited (in a part without its first and last stage, whose partners are not in it).\n\n"
        f"`{facts['command']}` on {facts['cores']} cores, nsysk3 {facts['nsysk3']}, Python {facts['python']}, "
        f"polars {facts['polars']}, distributed {facts['distributed']}.\n"
    )


if __name__ == "__main__":
    main()
