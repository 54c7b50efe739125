"""What memory and NVLink give at most, by copies of several kinds."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from ops_harness import Bench, H, bf16

from nsysk3.ops import cuda


def ceilings(bench: Bench) -> None:
    lib, ws = cuda.library(), bench.ws
    rows = ws.layout.half // cuda.ROW_BYTES
    size = rows * cuda.ROW_BYTES
    here, there = (
        ws.peers[bench.rank] + ws.layout.staging,
        ws.peers[(bench.rank + 1) % bench.world] + ws.layout.partials,
    )
    bench.ws.rows_at(ws.layout.partials, rows).normal_()

    def stream() -> int:
        return torch.cuda.current_stream().cuda_stream

    def note(what: str, us: float, factor: float = 1, **more: Any) -> None:
        bench.record(section="ceilings", what=what, us=us, GBps=round(size * factor / us / 1e3, 1), **more)

    hbm = torch.empty(2, rows * 8, H, device=bench.device, dtype=bf16).normal_()
    big, target = hbm
    us = bench.time_us(lambda i: target.copy_(big), iters=4, repeats=3)
    note("HBM copy, torch", us, 16)
    for mode, label, factor in ((0, "HBM copy, words", 16), (1, "HBM copy, bulk", 16), (2, "HBM read, bulk", 8)):
        call = lambda i, mode=mode: lib.k3_copy(target.data_ptr(), big.data_ptr(), rows * 8, mode, 132, stream())  # noqa: E731
        note(label, bench.time_us(call, iters=4, repeats=3), factor)
    for both in (True, False):
        busy = both or bench.rank == 0
        ways = "both ways" if both else "one way"
        for label, dst, src in (("pull", here, there), ("push", there + ws.layout.half, here)):
            call = lambda i, a=dst, b=src: busy and lib.k3_memcpy(a, b, size, stream())  # noqa: E731
            note(f"{label}, copy engine, {ways}", bench.time_us(call, iters=4, repeats=3))
            for mode, grid in itertools.product((0, 1), (132, 32, 8) if both else (132,)):
                if mode == 0 and grid == 8:
                    continue
                call = lambda i, a=dst, b=src, m=mode, g=grid: busy and lib.k3_copy(a, b, rows, m, g, stream())  # noqa: E731
                kind = ("words", "bulk")[mode]
                note(f"{label}, {kind}, {ways}", bench.time_us(call, iters=4, repeats=3), ctas=grid)
