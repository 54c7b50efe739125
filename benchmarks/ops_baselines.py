"""What one would run without these kernels: NCCL, PyTorch's symmetric memory, and launches of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from ops_gemm import gemm_inputs
from ops_harness import EPS, Bench, H, bf16, errors
from ops_separate import attn_res_separately

from nsysk3.ops import cuda


def baselines(bench: Bench) -> None:
    for tokens, nvb in (
        (8192, 8),
        (4096, 8),
        (64, 8),
        (16, 8),
        (8192, 4),
        (1024, 8),
        (256, 8),
        (4096, 4),
        (16, 4),
        (64, 4),
        (1024, 4),
        (256, 4),
        (8192, 1),
        (4096, 1),
        (1024, 1),
        (256, 1),
        (64, 1),
        (16, 1),
    ):
        case = bench.case(tokens, nvb, 7)
        local = tokens // bench.world
        shard = torch.empty(local, H, device=bench.device, dtype=bf16)
        out, new = torch.empty_like(shard), torch.empty_like(shard)

        def scatter() -> None:
            dist.reduce_scatter_tensor(shard, case.partial)

        def separate(i: int) -> None:
            scatter()
            attn_res_separately(shard + case.prefix, case.bank, nvb, case.cw, case.ow, EPS)

        def one(i: int) -> None:
            scatter()
            cuda.attn_res(case.prefix, case.bank, nvb, case.cw, case.ow, EPS, addend=shard, out=out, prefix_out=new)

        row = {}
        for name, call in (("nccl_rs", lambda i: scatter()), ("nccl_separate", separate), ("nccl_k0", one)):
            row[name] = guarded(lambda c=call: bench.time_us(c, iters=10, graph=tokens <= 1024, repeats=3))
        if tokens >= 1024:
            row["low_contention_rs"] = guarded(lambda: low_contention(bench, case.partial, shard))
        bench.record(section="baselines", P=bench.world, M=tokens, nvb=nvb, **row)
        if bench.spent():
            return
    for tokens in (8192, 4096):
        x, w = gemm_inputs(bench, tokens)
        case = bench.case(tokens, 8, 7)

        def asynchronous(i: int) -> None:
            y = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, w.t(), "sum", 0, bench.group)
            cuda.attn_res(case.prefix, case.bank, 8, case.cw, case.ow, EPS, addend=y)

        us = guarded(lambda: bench.time_us(asynchronous, iters=6, repeats=3))
        bench.record(section="baselines_gemm", M=tokens, nvb=8, what="fused_matmul_reduce_scatter, then K0", us=us)
        if bench.spent():
            return


def low_contention(bench: Bench, partial: torch.Tensor, shard: torch.Tensor) -> Any:
    """PyTorch's reduce-scatter by copies, of symmetric memory; waited for, and compared with NCCL's."""
    source = symmetric.empty(partial.shape, dtype=bf16, device=bench.device)
    symmetric.rendezvous(source, bench.group)
    source.copy_(partial)

    def call(i: int) -> torch.Tensor:
        return torch.ops._c10d_functional.wait_tensor(
            torch.ops.symm_mem._low_contention_reduce_scatter(source, "sum", bench.group)
        )

    got = call(0)
    dist.reduce_scatter_tensor(shard, partial)
    error = bench.agree(errors(got, shard))
    return bench.time_us(call, iters=10, repeats=3) if error < 1e-2 else f"wrong: {error:.1e}"


def guarded(measure: Callable[[], float]) -> Any:
    try:
        return measure()
    except Exception as error:
        with contextlib.suppress(Exception):
            torch.cuda.synchronize()
        return repr(error)[:80]
