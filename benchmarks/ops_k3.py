"""K3, the attention residual that ends in an all-gather."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from ops_correct import OUT_LIMIT
from ops_harness import EPS, Bench, H, bf16, errors

from nsysk3.ops import cuda


def k3(bench: Bench) -> None:
    for tokens, nvb in itertools.product((8192, 64, 1024, 4096, 256, 16), (8, 4, 1)):
        case = bench.case(tokens, nvb, 11)
        local = tokens // bench.world
        args = (case.prefix, case.bank, nvb, case.cw, case.ow, EPS)
        mine, _ = cuda.attn_res(*args)
        gathered = torch.empty(tokens, H, device=bench.device, dtype=bf16)
        dist.all_gather_into_tensor(gathered, mine)
        got = bench.ws.attn_res_all_gather(*args)
        same = bench.healthy() and bench.agree(errors(got, gathered)) < OUT_LIMIT
        normed = torch.empty_like(mine)

        def separate(i: int) -> None:
            cuda.attn_res(*args, out=normed)
            dist.all_gather_into_tensor(gathered, normed)

        graph = tokens <= 1024
        base = bench.time_us(separate, graph=graph, iters=10, repeats=3)
        us = bench.time_us(lambda i: bench.ws.attn_res_all_gather(*args), graph=graph)
        bench.record(
            section="k3", M=tokens, nvb=nvb, us=us, k0_nccl=base, same=same,
            nvlink_GBps=round(local * cuda.ROW_BYTES / us / 1e3, 1),
        )  # fmt: skip
        if bench.spent():
            return
