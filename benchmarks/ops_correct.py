"""Every kernel against fp64, and repeats against each other."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from ops_harness import EPS, Bench, H, bf16, errors, truth
from ops_k0 import LOCALS
from ops_k1 import PATHS, k1

from nsysk3.ops import cuda

OUT_LIMIT, PREFIX_LIMIT = 6e-3, 3e-3  # worst row against fp64


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
