"""The GEMM before a reduce-scatter: cuBLAS alone, on fewer multiprocessors, and beside what slows it down."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
from typing import Any

import torch
from ops_cublas import multiprocessors
from ops_harness import OPROJ_K, Bench, H, bf16

from nsysk3.ops import cuda


def gemm_inputs(bench: Bench, tokens: int) -> tuple[Any, Any]:
    k = OPROJ_K // bench.world
    own = torch.Generator(device=bench.device).manual_seed(91 + bench.rank)
    x = torch.randn(tokens, k, device=bench.device, generator=own, dtype=bf16)
    w = torch.randn(H, k, device=bench.device, generator=own, dtype=bf16) / OPROJ_K**0.5
    return x, w


def gemm_alone(bench: Bench) -> None:
    """CuBLAS on all multiprocessors and on fewer, whole and in pieces."""
    for tokens in (8192, 4096):
        x, w = gemm_inputs(bench, tokens)
        full = torch.empty(tokens, H, device=bench.device, dtype=bf16)
        plans = [("cublas", 1, s) for s in (None, 128, 124, 120, 116, 108, 100)]
        plans += [("cublaslt", 1, s) for s in (None, 128, 124, 116, 108)]
        plans += [("cublas", p, s) for p, s in itertools.product((2, 4, 8), (None, 124))]
        for library, pieces, sms in plans:
            if bench.spent():
                break
            torch.backends.cuda.preferred_blas_library(library)
            cut = [slice(tokens * i // pieces, tokens * (i + 1) // pieces) for i in range(pieces)]
            with multiprocessors(sms) as told:
                us = bench.time_us(lambda i: [torch.mm(x[c], w.t(), out=full[c]) for c in cut], iters=6, repeats=3)
            rate = round(2 * tokens * H * w.shape[1] / us / 1e6)
            bench.record(
                section="gemm", library=library, M=tokens, pieces=pieces, sms=sms, told=told, us=us, TFLOPs=rate
            )
        torch.backends.cuda.preferred_blas_library("default")


def gemm_beside(bench: Bench) -> None:
    """What slows cuBLAS down: other multiprocessors that only read memory, a copy engine, both; clock and power."""
    tokens = 8192
    lib = cuda.library()
    x, w = gemm_inputs(bench, tokens)
    full = torch.empty(tokens, H, device=bench.device, dtype=bf16)
    rows = bench.ws.layout.half // cuda.ROW_BYTES
    big = torch.empty(rows * 6, H, device=bench.device, dtype=bf16).normal_()
    side, engine = torch.cuda.Stream(bench.device), torch.cuda.Stream(bench.device)
    here = bench.ws.peers[bench.rank] + bench.ws.layout.staging
    there = bench.ws.peers[(bench.rank + 1) % bench.world] + bench.ws.layout.partials
    for sms, readers, share, copies in (
        (None, 0, 0.0, 0), (None, 0, 0.0, 1), (128, 4, 0.5, 0), (124, 8, 1.0, 0), (120, 12, 1.0, 0), (120, 12, 1.0, 1),
        (116, 16, 1.0, 0), (120, 0, 0.0, 0), (128, 0, 0.0, 1),
    ):  # fmt: skip

        def call(i: int) -> None:
            main = torch.cuda.current_stream()
            side.wait_stream(main)
            engine.wait_stream(main)
            if readers:
                n = int(rows * 6 * share) // 12 * 12
                lib.k3_copy(big.data_ptr(), big.data_ptr(), n, 2, readers, side.cuda_stream)
            if copies:
                lib.k3_memcpy(there, here, bench.ws.layout.half // bench.world, engine.cuda_stream)
            with multiprocessors(sms):
                torch.mm(x, w.t(), out=full)
            main.wait_stream(side)
            main.wait_stream(engine)

        if bench.spent():
            return
        us = bench.time_us(call, iters=6, repeats=3)
        moved = round(rows * 6 * share * cuda.ROW_BYTES / 1e6)
        bench.record(
            section="gemm_beside", M=tokens, sms=sms, readers=readers, read_MB=moved, peer_copies=copies, us=us
        )
    query = ["nvidia-smi", f"--id={bench.rank}", "--query-gpu=clocks.sm,clocks.max.sm,power.draw,power.limit"]
    for _ in range(1500):
        torch.mm(x, w.t(), out=full)
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        found = subprocess.run(
            [*query, "--format=csv,noheader"], capture_output=True, text=True, timeout=5, check=False
        )
        bench.record(
            section="gemm_power", what="clock, most, power, limit while cuBLAS runs", text=found.stdout.strip()
        )
    torch.cuda.synchronize()
