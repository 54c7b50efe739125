"""The parts of ops_bench.py.  Each takes the Bench, keeps to its time and records rows."""

# ruff: noqa: B023  (closures over loop variables: each is called before its loop goes on)
from __future__ import annotations

import contextlib
import itertools
import subprocess
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from ops_baselines import attn_res_separately
from ops_cublas import multiprocessors
from ops_harness import EPS, NB, OPROJ_K, Bench, Case, H, bf16, errors, truth

from nsysk3.ops import cuda
from nsysk3.ops.gemm import GemmReduceScatter

PATHS, LOCALS = ("pull", "push"), (0, 1)
OUT_LIMIT, PREFIX_LIMIT = 6e-3, 3e-3  # worst row against fp64


def k1(bench: Bench, case: Case, path: str, out: Any, prefix_out: Any, grid: int | None = None) -> None:
    """One call; for a pull the partial must lie in the workspace already."""
    partial = bench.ws.partial(case.partial.shape[0]) if path == "pull" else case.partial
    bench.ws.reduce_scatter_attn_res(partial, *case.args(), out=out, prefix_out=prefix_out, path=path, grid=grid)


def correct(bench: Bench) -> None:
    bad: list[str] = []
    worst: dict[str, float] = {}
    cases = 0
    shapes = [
        (16, 8, 1.0),
        (256, 0, 1.0),
        (256, 5, 3e-4),
        (1024, 8, 1.0),
        (8192, 8, 1.0),
        (32, 1, 1.0),
        (2048, 7, 3e-4),
    ]
    for number, (tokens, nvb, scale) in enumerate(shapes):
        for path in PATHS:
            if bench.spent():
                bad.append("time was over")
                break
            seed = number * 50 + cases
            case = bench.case(tokens, nvb, seed, scale)
            local = tokens // bench.world
            out = torch.full((local, H), float("nan"), device=bench.device, dtype=bf16)
            new = torch.full_like(out, float("nan"))
            if path == "pull":
                bench.ws.partial(tokens).copy_(case.partial)
                torch.cuda.synchronize()
            if cases % 3 < bench.world and bench.rank == cases % 3:
                torch.cuda._sleep(3_000_000)  # a rank that is late must not be read early
            bench.at = f"{path} M={tokens} nvb={nvb}"
            k1(bench, case, path, out, new)
            torch.cuda.synchronize()
            if path == "pull":  # the other half is the next call's: poison it
                bench.ws.partial(tokens).fill_(float("nan"))
            pick = torch.randperm(local, device=bench.device)[:256]
            mine = slice(bench.rank * local, (bench.rank + 1) * local)
            parts = [bench.peer_partial(tokens, seed, p, scale)[mine] for p in range(bench.world)]
            want, want_new = truth(parts, case.prefix, case, pick)
            e, e2 = errors(out[pick], want), errors(new[pick], want_new)
            whole = bool(torch.isfinite(out).all()) and bool(torch.isfinite(new).all())
            if not bench.healthy():
                bad.append(f"a wait gave up in {path}")
            if not (e < OUT_LIMIT and e2 < PREFIX_LIMIT and whole):
                bad.append(f"rank {bench.rank} {path} M={tokens} nvb={nvb} x{scale}: {e:.2e} {e2:.2e} {whole}")
            worst[path] = max(worst.get(path, 0.0), e)
            cases += 1
            dist.barrier()
    for variant in LOCALS:
        bench.at = f"K0 {variant}"
        case = bench.case(512, 6, 900 + variant)
        out, new = cuda.attn_res(
            case.prefix, case.bank, 6, case.cw, case.ow, EPS, addend=case.partial[: case.prefix.shape[0]],
            variant=variant, write_row=6,
        )  # fmt: skip
        pick = torch.arange(case.prefix.shape[0], device=bench.device)
        want, want_new = truth([case.partial[: case.prefix.shape[0]]], case.prefix, case, pick)
        e, e2 = errors(out, want), errors(new, want_new)
        if not (e < OUT_LIMIT and e2 < PREFIX_LIMIT and torch.equal(case.bank[:, 6], new)):
            bad.append(f"K0 variant {variant}: {e:.2e} {e2:.2e}")
        worst[f"K0 {variant}"] = e
    total = int(bench.agree(float(len(bad))))
    if bad:
        print("BAD", bench.rank, bad, flush=True)
    bench.record(section="correct", cases=cases, failures=total, worst={k: f"{v:.1e}" for k, v in worst.items()})
    bench.facts["bad"] = bad


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


def soak(bench: Bench) -> None:
    """Repeats must agree bit for bit, at sizes that change from call to call, with ranks late at random."""
    noise = torch.Generator().manual_seed(5 + bench.rank)
    first: dict[tuple[str, int], torch.Tensor] = {}
    differ, calls = 0, 0
    cases = {tokens: bench.case(tokens, 6, tokens) for tokens in (16, 48, 256, 1024)}
    while calls < 1000:
        for path, (tokens, case) in itertools.product(PATHS, cases.items()):
            local = tokens // bench.world
            out = torch.full((local, H), float("nan"), device=bench.device, dtype=bf16)
            if path == "pull":
                bench.ws.partial(tokens).copy_(case.partial)
            if int(torch.randint(0, 4, (1,), generator=noise)) == 0:
                torch.cuda._sleep(int(torch.randint(0, 200_000, (1,), generator=noise)))
            k1(bench, case, path, out, None)
            kept = first.setdefault((path, tokens), out)
            differ += int(not torch.equal(kept, out))
            calls += 1
        if bench.spent():
            break
    bench.record(section="soak", calls=calls, differ=int(bench.agree(differ)), healthy=bench.healthy())
