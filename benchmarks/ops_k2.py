"""K2, the GEMM and K1 overlapped, against one after the other."""

from __future__ import annotations

import torch
import torch.distributed as dist
from ops_gemm import gemm_inputs
from ops_harness import Bench, H, bf16, errors, truth
from ops_k1 import PATHS

from nsysk3.ops.gemm import GemmReduceScatter


def k2(bench: Bench) -> None:
    product = GemmReduceScatter(bench.ws)
    for tokens, nvb in ((8192, 8), (4096, 8), (8192, 4), (4096, 4), (8192, 1), (4096, 1)):
        x, w = gemm_inputs(bench, tokens)
        case = bench.case(tokens, nvb, 17)
        full = torch.empty(tokens, H, device=bench.device, dtype=bf16)
        alone = bench.time_us(lambda i: torch.mm(x, w.t(), out=full), iters=6, repeats=3)
        bench.record(section="k2", M=tokens, nvb=nvb, what="GEMM alone", us=alone, of_gemm=1.0)
        everyone = [torch.empty_like(full) for _ in range(bench.world)]
        dist.all_gather(everyone, full)
        local = tokens // bench.world
        parts = [e[bench.rank * local : (bench.rank + 1) * local] for e in everyone]
        pick = torch.randperm(local, device=bench.device)[:256]
        want, _ = truth(parts, case.prefix, case, pick)
        del everyone

        def serial(i: int, path: str) -> None:
            partial = bench.ws.partial(tokens)
            torch.mm(x, w.t(), out=partial)
            bench.ws.reduce_scatter_attn_res(partial, *case.args(), path=path)

        timed = {path: bench.time_us(lambda i, p=path: serial(i, p), iters=6, repeats=3) for path in PATHS}
        us = min(timed.values())
        bench.record(
            section="k2", M=tokens, nvb=nvb, what="GEMM, then K1", us=us, of_gemm=round(us / alone, 3), **timed
        )
        if bench.spent():
            return
        run = lambda i: product.linear_reduce_scatter_attn_res(x, w, *case.args())  # noqa: E731
        out, _ = run(0)
        healthy = bench.healthy()
        e = bench.agree(errors(out[pick], want))
        us = bench.time_us(run, iters=6, repeats=3)
        healthy = bench.healthy() and healthy
        bench.record(
            section="k2", M=tokens, nvb=nvb, what="K2", us=us, of_gemm=round(us / alone, 3), error=f"{e:.1e}",
            healthy=healthy,
        )  # fmt: skip
