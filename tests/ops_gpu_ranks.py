"""What test_ops_gpu checks over several GPUs: each rank runs this file.  ``swap``: ranks and GPUs in opposite order."""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ops_cases import BF16, LINEAR, PREFIX, assert_normed, error
from ops_processes import Check, rank_main

from nsysk3.errors import RunFailedError
from nsysk3.ops import reference as ref
from nsysk3.ops.boundary import Boundary
from nsysk3.ops.sp import SequenceParallel

HIDDEN, SLOTS, EPS, MOST = 7168, 9, 1e-6, 4096
NAN = float("nan")
# Tokens that are held against the truth: enough of a large batch, all of a small one.
CHECKED = 128


def generator(seed: int) -> torch.Generator:
    return torch.Generator(torch.device("cuda", torch.cuda.current_device())).manual_seed(seed)


class Inputs:
    """One batch of this rank, fresh for each seed; ``partial_of`` makes any rank's partial, which a seed fixes."""

    def __init__(self, tokens: int, rows: int, seed: int, scale: float = 1.0) -> None:
        self.tokens, self.rows, self.seed, self.scale = tokens, rows, seed, scale
        self.mine = ref.local_rows(tokens, dist.get_rank(), dist.get_world_size())
        local = self.mine.stop - self.mine.start
        self.partial = self.partial_of(dist.get_rank())
        own = generator(seed * 31 + 7 * dist.get_rank() + 3)
        self.prefix = self._random(local, HIDDEN, generator=own) * (1.5 * scale)
        self.bank = torch.full((local, SLOTS, HIDDEN), NAN, dtype=BF16, device="cuda")
        for row in range(rows):
            self.bank[:, row] = self._random(local, HIDDEN, generator=own) * (scale * (0.3 + row))
        shared = generator(seed * 31 + 1)
        self.score = torch.randn(HIDDEN, device="cuda", generator=shared) * (3 / HIDDEN**0.5)
        self.norm = (torch.randn(HIDDEN, device="cuda", generator=shared) * 0.2 + 1).to(BF16)

    def _random(self, *shape: int, generator: torch.Generator) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator, dtype=BF16)

    def partial_of(self, rank: int) -> torch.Tensor:
        return self._random(self.tokens, HIDDEN, generator=generator(self.seed * 31 + 100 + rank)) * (
            (0.5 + 0.2 * rank) * self.scale
        )

    @property
    def weights(self) -> tuple[torch.Tensor, torch.Tensor, float]:
        return self.score, self.norm, EPS

    def check(self, normed: torch.Tensor, prefix: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Against float64, on rows chosen at random."""
        pick = torch.randperm(len(self.bank), device="cuda")[:CHECKED]
        partials = [self.partial_of(rank)[self.mine][pick] for rank in range(dist.get_world_size())]
        total = torch.stack([partial.double() for partial in partials]).sum(0)
        total = total if residual is None else total + residual[pick].double()
        assert error(prefix[pick], total.to(BF16)) < PREFIX
        assert_normed(normed[pick], ref.attn_res(prefix[pick], self.bank[pick], self.rows, *self.weights))
        assert bool(torch.isfinite(normed).all())
        assert bool(torch.isfinite(prefix).all())

    def check_gathered(self, normed: torch.Tensor) -> None:
        """Against what every rank would read: gathered by NCCL."""
        own = ref.attn_res(self.prefix, self.bank, self.rows, *self.weights, acc=torch.float32)
        everyone = own.new_empty(self.tokens, HIDDEN)
        dist.all_gather_into_tensor(everyone, own)
        assert_normed(normed, everyone)


def late(rank: int, cycles: int = 3_000_000) -> None:
    """Hold this rank's GPU back by some milliseconds, where it is the one."""
    if rank == dist.get_rank():
        torch.cuda._sleep(cycles)


def parallel(mode: str = "fused", **more: Any) -> SequenceParallel:
    options = {"hidden": HIDDEN, "max_tokens": MOST, "max_rows": 8, "device": torch.device("cuda", torch.cuda.current_device())}  # fmt: skip  # noqa: E501
    made = SequenceParallel(dist.group.WORLD, mode=mode, **{**options, **more})  # type: ignore[arg-type]
    assert mode == "nccl" or made.unable is None or more, made.unable
    return made


def every_path() -> None:
    """Each path: outputs poisoned, the other half of the double buffer poisoned, ranks late in turn."""
    sp = parallel()
    workspace = sp._fused._workspace  # type: ignore[union-attr]
    shapes = [(16, 8, 1.0), (48, 0, 3e-4), (256, 5, 3e-4), (1000, 1, 1.0), (2048, 7, 1.0)]
    for number, (path, (tokens, rows, scale)) in enumerate(itertools.product(("pull", "push"), shapes)):
        inputs = Inputs(tokens, rows, seed=number, scale=scale)
        residual = None if number % 3 == 0 else inputs.prefix
        out, new = torch.full_like(inputs.prefix, NAN), torch.full_like(inputs.prefix, NAN)
        partial = inputs.partial
        if path == "pull":
            workspace.partial(tokens).copy_(partial)
            partial = workspace.partial(tokens)
            torch.cuda.synchronize()
        late(number % (sp.world + 1))
        write = rows if number % 2 else None
        try:
            workspace.reduce_scatter_attn_res(
                partial, residual, inputs.bank, rows, *inputs.weights, out=out, prefix_out=new, write_row=write,
                path=path,
            )  # fmt: skip
            if path == "pull":
                workspace.partial(tokens).fill_(NAN)  # the next call's half, in which nobody may look now
            sp.check()
            inputs.check(out, new, residual)
            assert write is None or torch.equal(inputs.bank[:, rows], new)
        except Exception as wrong:
            raise AssertionError(f"{path}, {tokens} tokens, {rows} rows, scale {scale}: {wrong}") from wrong
        dist.barrier()


def operations() -> None:
    """SequenceParallel's three operations, through its own buffers and from any tensor, beside NCCL's."""
    fused, nccl = parallel(), parallel("nccl")
    for number, (tokens, rows, scale) in enumerate(((16, 8, 1.0), (128, 3, 3e-4), (2048, 8, 1.0), (4096, 5, 1.0))):
        inputs = Inputs(tokens, rows, seed=50 + number, scale=scale)
        arguments = (inputs.bank, rows, *inputs.weights)
        for residual in (inputs.prefix, None):
            late(number % fused.world)
            buffer = fused.partial_buffer(tokens)
            if buffer is not None:
                buffer.copy_(inputs.partial)
            for partial in ([buffer] if buffer is not None else []) + [inputs.partial]:
                inputs.check(*fused.reduce_scatter_attn_res(partial, residual, *arguments), residual)
            slow, summed = nccl.reduce_scatter_attn_res(inputs.partial, residual, *arguments)
            fast, _ = fused.reduce_scatter_attn_res(inputs.partial, residual, *arguments)
            assert error(fast, slow.double()) < 2e-2  # NCCL rounds twice
            assert bool(torch.isfinite(summed).all())
        late(number % fused.world)
        write = rows if number % 2 else None
        inputs.check_gathered(fused.attn_res_all_gather(inputs.prefix, *arguments, write_row=write))
        assert write is None or torch.equal(inputs.bank[:, rows], inputs.prefix)
        inputs.check_gathered(nccl.attn_res_all_gather(inputs.prefix, *arguments))
    fused.check()
    assert {each.path for each in nccl.decisions} == {"nccl"}
    assert {(each.op, each.path == "nccl") for each in fused.decisions} == {
        ("rs_attn_res", False),
        ("attn_res_ag", False),
    }


def linear() -> None:
    """The GEMM's form, many calls in one object and between them the other that uses the same memory."""
    sp = parallel()
    fused = sp._fused
    assert fused is not None
    share = 12288 // sp.world
    for number, (tokens, rows) in enumerate(((1024, 8), (2048, 4), (4096, 8))):
        inputs = Inputs(tokens, rows, seed=80 + number)
        g = generator(900 + number)
        xs = [torch.randn(tokens, share, device="cuda", generator=g, dtype=BF16) for _ in range(sp.world)]
        ws = [torch.randn(HIDDEN, share, device="cuda", generator=g, dtype=BF16) / 12288**0.5 for _ in range(sp.world)]
        pick = torch.randperm(len(inputs.bank), device="cuda")[:CHECKED]
        at = pick + inputs.mine.start
        exact = torch.stack([x[at].double() @ w.double().t() for x, w in zip(xs, ws, strict=True)]).sum(0)
        wanted = exact + inputs.prefix[pick].double()
        arguments = (xs[sp.rank], ws[sp.rank], inputs.prefix, inputs.bank, rows, *inputs.weights)
        for turn in range(6):
            late(turn % sp.world)
            normed, new = fused.linear_reduce_scatter_attn_res(*arguments)
            assert error(new[pick], wanted) < LINEAR, (turn, tokens)
            assert_normed(normed[pick], ref.attn_res(new[pick], inputs.bank[pick], rows, *inputs.weights))
            if turn % 2:
                fused.reduce_scatter_attn_res(inputs.partial, None, inputs.bank, rows, *inputs.weights, "push")
        normed, new = sp.linear_reduce_scatter_attn_res(*arguments)
        assert error(new[pick], wanted) < LINEAR
    sp.check()


def graphs() -> None:
    """An odd number of calls in a graph, replayed between eager calls, with inputs that change."""
    sp = parallel()
    for tokens in (64, 1024):
        inputs = Inputs(tokens, 4, seed=120)
        kept = [torch.empty_like(inputs.prefix) for _ in range(2)]
        gathered = torch.empty(tokens, HIDDEN, dtype=BF16, device="cuda")

        def step(inputs: Inputs = inputs, gathered: torch.Tensor = gathered, kept: Any = kept) -> None:
            arguments = (inputs.bank, 4, *inputs.weights)
            buffer = sp.partial_buffer(inputs.tokens)
            partial = inputs.partial if buffer is None else buffer.copy_(inputs.partial)
            normed, new = sp.reduce_scatter_attn_res(partial, inputs.prefix, *arguments)
            kept[0].copy_(normed)
            kept[1].copy_(new)
            gathered.copy_(sp.attn_res_all_gather(inputs.prefix, *arguments))

        step()
        torch.cuda.synchronize()
        dist.barrier()
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded):
            step()
        for number in range(6):
            fresh = Inputs(tokens, 4, seed=130 + number)
            for name in ("partial", "prefix", "bank"):
                getattr(inputs, name).copy_(getattr(fresh, name))
            inputs.seed = fresh.seed
            late(number % (sp.world + 1))
            for where in kept:
                where.fill_(NAN)
            step() if number == 3 else recorded.replay()
            inputs.check(*kept, inputs.prefix)
            inputs.check_gathered(gathered)
    sp.check()


def soak() -> None:
    """A thousand calls of all kinds in one order, with ranks late at random: every repeat gives the same bits."""
    sp = parallel()
    noise = torch.Generator().manual_seed(5 + dist.get_rank())
    cases = [Inputs(tokens, rows, seed=200 + tokens) for tokens, rows in ((16, 8), (48, 1), (256, 6), (1024, 4))]
    first: dict[tuple[int, str], torch.Tensor] = {}
    differ = torch.zeros((), dtype=torch.int64, device="cuda")
    for turn in range(125):
        for inputs in cases:
            if int(torch.randint(0, 4, (1,), generator=noise)) == 0:
                torch.cuda._sleep(int(torch.randint(0, 300_000, (1,), generator=noise)))
            arguments = (inputs.bank, inputs.rows, *inputs.weights)
            normed, new = sp.reduce_scatter_attn_res(inputs.partial, inputs.prefix, *arguments)
            everyone = sp.attn_res_all_gather(inputs.prefix, *arguments)
            for name, got in (("normed", normed), ("new", new), ("gathered", everyone)):
                kept = first.setdefault((inputs.tokens, name), got.clone())
                differ += (kept != got).sum()
        if turn % 25 == 0:
            sp.check()
    sp.check()
    assert int(differ) == 0, f"{int(differ)} elements differ from the first call's"


def falls_back() -> None:
    """Whatever the kernels cannot take goes through NCCL and gives the same."""
    sp, other = parallel(), parallel(hidden=1024)
    assert other.unable == "hidden size 1024, not 7168"
    inputs = Inputs(33, 3, seed=300)  # does not divide over two
    arguments = (inputs.bank, 3, *inputs.weights)
    normed, new = sp.reduce_scatter_attn_res(inputs.partial, inputs.prefix, *arguments)
    pick = slice(None)
    truth = ref.attn_res(new[pick], inputs.bank, 3, *inputs.weights)
    assert_normed(normed, truth)
    half = Inputs(32, 3, seed=301)
    partial, prefix, bank = (each.half() for each in (half.partial, half.prefix, half.bank))
    normed, new = sp.reduce_scatter_attn_res(partial, prefix, bank, 3, *half.weights)
    assert_normed(normed, ref.attn_res(new, bank, 3, *half.weights))
    assert {(each.path, each.reason) for each in sp.decisions} == {
        ("nccl", "tokens do not divide over 2 ranks"), ("nccl", "float16, not bfloat16"),
    }  # fmt: skip


def measured(folder: Path) -> None:
    """Mode auto takes what a table names, and nothing where there is none."""
    device = torch.cuda.get_device_name()
    cells = [{"tokens": tokens, "rows": 4, "path": path, "us": {}} for tokens, path in ((64, "pull"), (128, "nccl"))]
    table = {"device": device, "world": dist.get_world_size(), "source": {"date": "a test"}, "operations": {"rs_attn_res": cells}}  # fmt: skip  # noqa: E501
    tables = folder / f"tables{dist.get_rank()}"
    tables.mkdir()
    (tables / "own.json").write_text(json.dumps(table))
    os.environ["NSYSK3_DISPATCH"] = str(tables)
    sp = parallel("auto")
    for tokens in (64, 128):
        inputs = Inputs(tokens, 4, seed=310 + tokens)
        inputs.check(*sp.reduce_scatter_attn_res(inputs.partial, None, inputs.bank, 4, *inputs.weights), None)
    assert [(each.tokens, each.path) for each in sp.decisions] == [(64, "pull"), (128, "nccl")]
    del os.environ["NSYSK3_DISPATCH"]


def put_boundary(put: bool) -> None:
    """Two stages: head and bank arrive bit for bit, in slots that are used again, while the sender hurries on."""
    ranks, cuts = [0, 1], [0, 13, 26]
    boundary = Boundary(
        dist.group.WORLD, ranks, cuts, hidden=HIDDEN, max_tokens=512,
        device=torch.device("cuda", torch.cuda.current_device()), put=put,
    )  # fmt: skip
    first, sizes = dist.get_rank() == 0, [512, 7, 300, 512, 1, 64, 512, 33]
    assert boundary.transport == ("distributed" if not put else "out by copy engine" if first else "in by copy engine")
    for index, tokens in enumerate(sizes):
        g = generator(index)
        head = torch.randn(tokens, HIDDEN, device="cuda", generator=g, dtype=BF16)
        rows = torch.randn(2, tokens, HIDDEN, device="cuda", generator=g, dtype=BF16)
        if first:
            _, bank = boundary.start(head).wait()
            torch.cuda._sleep(1_000_000)  # computing: what is sent is not there yet
            bank.copy_(rows.transpose(0, 1))
            boundary.hand_over(head, bank)
        else:
            handed = boundary.expect(tokens)
            got, bank = handed.wait()
            if index % 3 == 0:
                torch.cuda._sleep(3_000_000)  # a receiver that is slow to use its slot
            same = (got == head).all() & (bank[:, :2] == rows.transpose(0, 1)).all()
            bank[:, 2:].fill_(1)
            got.fill_(NAN)
            handed.release()
            assert bool(same), f"micro-batch {index}"
    boundary.flush()
    torch.cuda.synchronize()
    sent = sum(sizes) * HIDDEN * 2 * 3 if first else 0
    assert boundary.bytes_sent == sent


def a_peer_that_never_comes() -> None:
    """A wait inside a kernel is bounded, and says so."""
    sp = parallel()
    inputs = Inputs(64, 2, seed=400)
    if dist.get_rank() == 0:
        sp.reduce_scatter_attn_res(inputs.partial, None, inputs.bank, 2, *inputs.weights)
        try:
            sp.check()
        except RunFailedError:
            return
        raise AssertionError("nobody came, and nobody said so")


def checks(order: str, folder: str) -> dict[str, Check]:
    few = {"every path": every_path, "operations": operations}
    if order == "swap":
        return few
    return few | {
        "linear": linear, "graphs": graphs, "soak": soak, "falls back": falls_back,
        "measured": lambda: measured(Path(folder)), "put": lambda: put_boundary(True),
        "boundary by NCCL": lambda: put_boundary(False), "a peer that never comes": a_peer_that_never_comes,
    }  # fmt: skip


if __name__ == "__main__":
    rank, world = int(sys.argv[1]), int(sys.argv[2])
    torch.cuda.set_device(world - 1 - rank if "swap" in sys.argv else rank)
    rank_main(checks, "nccl")
