"""K0, the attention residual without communication."""

from __future__ import annotations

import itertools

import torch
from ops_harness import EPS, NB, Bench

from nsysk3.ops import cuda

LOCALS = (0, 1)


def k0(bench: Bench) -> None:
    for tokens, nvb, add in (
        (4096, 8, True),
        (4096, 4, True),
        (8192, 8, False),
        (4096, 1, True),
        (512, 8, True),
        (32, 8, True),
    ):
        case = bench.case(tokens * bench.world, nvb, 5)
        sets = bench.copies_past_l2(tokens * NB * cuda.ROW_BYTES) if tokens <= 512 else 1
        cases = [case, *(bench.case(tokens * bench.world, nvb, 50 + s) for s in range(sets - 1))]
        addends = [c.partial[:tokens] if add else None for c in cases]
        out, new = torch.empty_like(case.prefix), torch.empty_like(case.prefix) if add else None
        moved = tokens * cuda.ROW_BYTES * (nvb + (4 if add else 2))
        for variant in LOCALS:
            if bench.spent():
                return

            def call(i: int, v: int = variant) -> None:
                c = cases[i % sets]
                cuda.attn_res(
                    c.prefix, c.bank, nvb, c.cw, c.ow, EPS, addend=addends[i % sets], out=out, prefix_out=new, variant=v
                )

            us = bench.time_us(call, graph=tokens <= 512)
            bench.record(
                section="k0", variant=variant, T=tokens, nvb=nvb, add=add, us=us, TBps=round(moved / us / 1e6, 3)
            )


def k0_grid(bench: Bench) -> None:
    """What one multiprocessor does by itself, and how it adds up."""
    tokens, nvb = 2048, 8
    case = bench.case(tokens * bench.world, nvb, 5)
    out, new = torch.empty_like(case.prefix), torch.empty_like(case.prefix)
    for variant, ctas in itertools.product(LOCALS, (132, 16, 4)):
        if bench.spent():
            return

        def call(i: int, v: int = variant, grid: int = ctas) -> None:
            cuda.attn_res(
                case.prefix, case.bank, nvb, case.cw, case.ow, EPS, addend=case.partial[:tokens], out=out,
                prefix_out=new, variant=v, grid=grid,
            )  # fmt: skip

        us = bench.time_us(call, iters=4, repeats=3, warm=1)
        rate = tokens * (nvb + 4) * cuda.ROW_BYTES / us / 1e3
        bench.record(
            section="k0_grid", variant=variant, ctas=ctas, us=us, GBps=round(rate),
            GBps_of_one=round(rate / ctas, 1),
        )  # fmt: skip
