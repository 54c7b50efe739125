"""K1, the reduce-scatter that ends in an attention residual, alone."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from ops_harness import NB, Bench, Case, H, bf16

from nsysk3.ops import cuda

PATHS = ("pull", "push")


def k1(bench: Bench, case: Case, path: str, out: Any, prefix_out: Any, grid: int | None = None) -> None:
    """One call; for a pull the partial must lie in the workspace already."""
    partial = bench.ws.partial(case.partial.shape[0]) if path == "pull" else case.partial
    bench.ws.reduce_scatter_attn_res(partial, *case.args(), out=out, prefix_out=prefix_out, path=path, grid=grid)


def k1_large(bench: Bench) -> None:
    for tokens, nvb in ((8192, 8), (8192, 4), (4096, 8), (4096, 4), (8192, 1), (4096, 1), (2048, 8)):
        case = bench.case(tokens, nvb, 3)
        local = tokens // bench.world
        for _ in range(2):
            bench.ws.partial(tokens).copy_(case.partial)
            bench.ws._calls["pull"] += 1
        out, new = (torch.empty(local, H, device=bench.device, dtype=bf16) for _ in range(2))
        for path in PATHS:
            if bench.spent():
                return
            us = bench.time_us(lambda i, p=path: k1(bench, case, p, out, new), iters=12)
            bytes_ = local * cuda.ROW_BYTES * (nvb + 5)
            bench.record(
                section="k1", path=path, P=bench.world, M=tokens, nvb=nvb, us=us,
                hbm_TBps=round(bytes_ / us / 1e6, 2), nvlink_GBps=round(local * cuda.ROW_BYTES / us / 1e3, 1),
            )  # fmt: skip
        if (tokens, nvb) == (8192, 8):
            for path, grid in (("pull", 96), ("pull", 64), ("push", 96)):
                us = bench.time_us(lambda i, p=path, g=grid: k1(bench, case, p, out, new, g), iters=12)
                bench.record(section="k1_grid", path=path, M=tokens, nvb=nvb, ctas=grid, us=us)


def k1_small(bench: Bench) -> None:
    for tokens, nvb in itertools.product((16, 64, 32, 256, 512, 1024, 128), (8, 4, 1)):
        if bench.spent():
            return
        local = tokens // bench.world
        sets = bench.copies_past_l2(local * NB * cuda.ROW_BYTES)
        cases = [bench.case(tokens, nvb, 30 + s) for s in range(sets)]
        for _ in range(2):
            bench.ws.partial(tokens).copy_(cases[0].partial)
            bench.ws._calls["pull"] += 1
        out, new = (torch.empty(local, H, device=bench.device, dtype=bf16) for _ in range(2))
        row: dict[str, Any] = {}
        for path in PATHS:
            call = lambda i, p=path: k1(bench, cases[i % sets], p, out, new)  # noqa: E731
            row[path] = bench.time_us(call, graph=True)
        bench.record(section="k1_graph", P=bench.world, M=tokens, nvb=nvb, sets=sets, **row)
    empty = bench.time_us(
        lambda i: cuda.library().k3_copy(None, None, 0, 0, 1, torch.cuda.current_stream().cuda_stream), graph=True
    )
    bench.record(section="k1_graph_floor", what="a kernel that does nothing", us=empty)
