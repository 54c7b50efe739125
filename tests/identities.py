"""GPUs of processes, and which ranks they are found to be."""

from __future__ import annotations

from typing import Any

from exports import GEMM, Export

from nsysk3.trace.load import Run


def gpus(*pids: int, host: str | None = None) -> Export:
    """One GPU a process."""
    export = Export()
    for device, pid in enumerate(pids):
        export.kernel(GEMM, 0, 100, pid=pid, device=device)
    return export.host(host) if host else export


def ranks_of(run: Run) -> dict[int, tuple[Any, ...]]:
    """Pid to world, pp, tp, ep and source."""
    columns = ("world_rank", "pp_rank", "tp_rank", "ep_rank", "rank_source")
    return {pid: tuple(rest) for pid, *rest in run.ranks.select("pid", *columns).iter_rows()}
