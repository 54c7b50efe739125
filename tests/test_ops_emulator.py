"""The CUDA kernels themselves, on the CPU: threads in random order, copies late and out of order, ranks late.

Every op must be right for every seed here, and every planted bug must show.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch", reason="the operations need PyTorch")

from ops_cases import row_error  # noqa: E402
from ops_emulator.rig import Bug, Rig, Stream, emulated, on  # noqa: E402

from nsysk3.ops import cuda, gemm, reference  # noqa: E402

__all__ = ["emulated"]  # the fixture
BF16 = torch.bfloat16
LIMIT = 3e-3  # worst row; bf16 rounding alone is 1.7e-3


def reduce_scatter(rig: Rig, rows: int, path: str, *, calls: int = 3, grid: int = 2) -> float:
    """Some calls in a row, ranks late at random; the worst error of a row of anything that was written."""
    local = rig.tokens // rig.world
    outputs = []
    for call in range(calls):
        case = rig.case(rows, call)
        for r, ws in enumerate(rig.ranks):
            mine = slice(r * local, (r + 1) * local)
            source, bank = case.partials[r], case.bank[mine]
            prefix = case.prefix[mine] if call % 2 == 0 else None
            out, new = (torch.full((local, cuda.HIDDEN), math.nan, dtype=BF16) for _ in range(2))
            rig.late(r)
            with on(rig.streams[r]):
                if path == "pull":
                    source = ws.partial(rig.tokens)
                    rig.copy(source, case.partials[r], r)
                ws.reduce_scatter_attn_res(
                    source, prefix, bank, rows, *case.weights, out=out, prefix_out=new, path=path,
                    write_row=rows, grid=grid,
                )  # fmt: skip
            outputs.append((case, r, prefix, bank, out, new))
    failure = rig.run()
    if failure:
        return math.inf
    worst = 0.0
    for case, r, prefix, bank, out, new in outputs:
        whole = reference.reduce_scatter_attn_res(case.partials, r, prefix, bank, rows, *case.weights)
        if not torch.equal(bank[:, rows], new):
            return math.inf
        worst = max(worst, *(row_error(got, want) for got, want in zip((out, new), whole, strict=True)))
    return worst


def gather(rig: Rig, rows: int, *, calls: int = 3) -> float:
    local = rig.tokens // rig.world
    outputs = []
    for call in range(calls):
        case = rig.case(rows, call)
        for r, ws in enumerate(rig.ranks):
            mine = slice(r * local, (r + 1) * local)
            rig.late(r)
            with on(rig.streams[r]):
                got = ws.attn_res_all_gather(case.prefix[mine], case.bank[mine], rows, *case.weights, grid=2)
                kept = torch.empty_like(got)
                rig.copy(kept, got, r)  # what the next kernel of the stream would read
            outputs.append((case, kept))
    if rig.run():
        return math.inf
    return max(row_error(got, reference.attn_res(c.prefix, c.bank, rows, *c.weights)) for c, got in outputs)


def alone(rig: Rig, rows: int, variant: int) -> float:
    """K0."""
    case = rig.case(rows, 1)
    with on(rig.streams[0]):
        out, new = cuda.attn_res(
            case.prefix,
            case.bank,
            rows,
            *case.weights,
            addend=case.partials[0],
            variant=variant,
            write_row=rows,
            grid=2,
        )
    if rig.run() or not torch.equal(case.bank[:, rows], new):
        return math.inf
    return row_error(out, reference.attn_res(new, case.bank, rows, *case.weights))


def product(rig: Rig, rows: int, monkeypatch: pytest.MonkeyPatch, *, calls: int = 3) -> float:
    """K2; the products run in stream order, as cuBLAS's would."""
    local, worst = rig.tokens // rig.world, 0.0
    multiply = torch.mm
    ks = [gemm.GemmReduceScatter(ws) for ws in rig.ranks]
    for call in range(calls):
        case = rig.case(rows, call)
        xs = [torch.randn(rig.tokens, 16, generator=rig.random).to(BF16) for _ in range(rig.world)]
        weights = [torch.randn(cuda.HIDDEN, 16, generator=rig.random).to(BF16) for _ in range(rig.world)]
        outputs = []
        for r, k2 in enumerate(ks):
            mine = slice(r * local, (r + 1) * local)
            rig.late(r)

            def later(x: torch.Tensor, w: torch.Tensor, *, out: torch.Tensor) -> None:
                rig.hold(Stream.current, 100_000)
                rig.call(lambda: multiply(x, w, out=out))

            with on(rig.streams[r]), monkeypatch.context() as patch:
                patch.setattr(torch, "mm", later)
                args = (case.prefix[mine], case.bank[mine], rows, *case.weights)
                outputs.append(k2.linear_reduce_scatter_attn_res(xs[r], weights[r], *args))
        if rig.run():
            return math.inf
        partials = [multiply(x, w.t()) for x, w in zip(xs, weights, strict=True)]
        for r, got in enumerate(outputs):
            mine = slice(r * local, (r + 1) * local)
            want = reference.reduce_scatter_attn_res(
                partials, r, case.prefix[mine], case.bank[mine], rows, *case.weights
            )
            worst = max(worst, *(row_error(a, b) for a, b in zip(got, want, strict=True)))
    return worst


SHAPES = [
    ("pull", 2, 10, 3), ("pull", 3, 9, 5), ("pull", 2, 10, 0), ("pull", 2, 2, 1),
    ("push", 2, 12, 3), ("push", 3, 12, 2), ("push", 2, 4, 8),
]  # fmt: skip


@pytest.mark.parametrize(("path", "world", "tokens", "rows"), SHAPES)
def test_reduce_scatter(emulated: ctypes.CDLL, path: str, world: int, tokens: int, rows: int) -> None:
    assert reduce_scatter(Rig(emulated, world, tokens, tokens + rows), rows, path) < LIMIT


@pytest.mark.parametrize(("world", "rows"), [(2, 3), (3, 8)])
def test_all_gather(emulated: ctypes.CDLL, world: int, rows: int) -> None:
    assert gather(Rig(emulated, world, 4 * world, rows), rows) < LIMIT


@pytest.mark.parametrize(("variant", "rows"), [(0, 5), (1, 6), (0, 0)])
def test_one_gpu(emulated: ctypes.CDLL, variant: int, rows: int) -> None:
    assert alone(Rig(emulated, 2, 6, rows), rows, variant) < LIMIT


@pytest.mark.parametrize("world", [2, 3])
def test_product(emulated: ctypes.CDLL, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert product(Rig(emulated, world, 6 * world, 5), 3, monkeypatch) < LIMIT


def test_inputs_near_epsilon(emulated: ctypes.CDLL) -> None:
    """Where a wrong softmax denominator shows: the norm divides it away from larger inputs."""
    rig = Rig(emulated, 2, 6, 1)
    original = rig.case
    rig.case = lambda rows, call, **_: original(rows, call, scale=3e-4)  # type: ignore[method-assign, misc]
    assert reduce_scatter(rig, 4, "pull") < LIMIT


Run = Callable[[ctypes.CDLL, int, pytest.MonkeyPatch], float]


def _scatter(path: str, rows: int, *, tokens: int = 14) -> Run:
    return lambda lib, seed, _: reduce_scatter(Rig(lib, 2, tokens, seed), rows, path)


def _gather(lib: ctypes.CDLL, seed: int, _: pytest.MonkeyPatch) -> float:
    return gather(Rig(lib, 2, 8, seed), 3)


def _product(lib: ctypes.CDLL, seed: int, patch: pytest.MonkeyPatch) -> float:
    return product(Rig(lib, 2, 12, seed), 3, patch)


FILL = "mbar_wait(&S.empty[w.slot], w.phase);\n      mbar_expect(&S.full[w.slot], kRowBytes);"
GATE = "passed = pass_gates(p.gate_{0}, p.n{0}, p.gate, t, target, p.spin_limit, p.error);"
OPEN = "passed = 1 << 30;"
TOLD = "if (lane == 0) mbar_arrive(&S.scored[batch]);"
SCORED = "mbar_wait(&S.scored[batch.slot], batch.phase);\n        float a"
ARRIVED = "mbar_wait(&S.full[w.slot], w.phase);\n            uint4 x[kScoreVec];"
TAKE = "uint4 (&row)[kVec]) {"
GIVE_BACK = " if ({on}) { if (lane == 0) mbar_arrive(&S.empty[w.slot]); for (int n = 0; n < 99; ++n) relax(); }"
TURN = "if (++slot == FIRST + N) { slot = FIRST; phase ^= 1; }"
LAST_OUT = "gridDim.x - 1) {\n        p.state->exits"
PULL, PUSH = _scatter("pull", 3), _scatter("push", 2)
RING, ROWS = "ring.cuh", "rows.cuh"
PLANTED: list[tuple[Bug, Run]] = [
    (Bug("slot filled before it is empty", RING, FILL, "mbar_expect(&S.full[w.slot], kRowBytes);"), PULL),
    (Bug("slot given back before it is read", RING, TAKE, TAKE + GIVE_BACK), PULL),
    (Bug("ring's phase not turned", RING, TURN, "if (++slot == FIRST + N) slot = FIRST;"), PULL),
    (Bug("row scored before it comes", RING, ARRIVED, "if (!{on}) " + ARRIVED), PULL),
    (Bug("scores told before they are written", RING, "__syncwarp();\n        " + TOLD, TOLD), PULL),
    (Bug("scores not waited for", RING, SCORED, "if (!{on}) " + SCORED), PULL),
    (Bug("sums not alternated", RING, "flip ^= 1;  //", "if (!{on}) flip ^= 1;  //"), _scatter("pull", 0, tokens=40)),
    (Bug("exchange not waited for", RING, "group_sync<kMix>();"), PULL),
    (Bug("mix not rescaled", RING, "acc[e] *= corr;"), PULL),
    (Bug("bank taken for contiguous", RING, "j * p.stride_bb);", "j * ({on} ? kH : p.stride_bb));"), PULL),
    (Bug("pulled rows not waited for", RING, GATE.format("remote"), OPEN), PULL),
    (Bug("copied rows not waited for", RING, GATE.format("local"), OPEN), _product),
    (Bug("epoch kept", ROWS, "s->epoch = epoch;"), PULL),
    (Bug("turns not moved on", ROWS, "s->base = base + tokens;"), PULL),
    (Bug("arrivals kept", ROWS, "s->arrivals = 0;"), PULL),
    (Bug("row announced too early", RING, "bulk_wait<1>();"), PUSH),
    (Bug("row sent before it is loaded", RING, "mbar_wait(&S.loaded[s], (k / kSlots) & 1);"), PUSH),
    (Bug("first out announces", RING, LAST_OUT, "({on} ? 1 : " + LAST_OUT.replace(".x", ".x)", 1)), _gather),
    (Bug("gathered rows not waited for", RING, "wait_ge(p.my_done + q, epoch, p.spin_limit, p.error);"), _gather),
]
BUGS = tuple(bug for bug, _ in PLANTED)


@pytest.mark.parametrize(
    ("number", "run"), [(n, run) for n, (_, run) in enumerate(PLANTED, 1)], ids=[b.name for b in BUGS]
)
def test_a_planted_bug_shows(emulated: ctypes.CDLL, number: int, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    emulated.emu_plant(number)
    try:
        assert any(not run(emulated, seed, monkeypatch) < LIMIT for seed in range(1, 5))
    finally:
        emulated.emu_plant(0)
