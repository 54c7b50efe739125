"""What the parts of ops_bench.py share: ranks, memory, timing, inputs, truth, and a record that survives a kill."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

from nsysk3.errors import RunFailedError
from nsysk3.ops import cuda
from nsysk3.ops.cuda_workspace import Workspace, workspace_bytes

H, NB, EPS = cuda.HIDDEN, 8, 1e-6
OPROJ_K = 12288
bf16 = torch.bfloat16
L2_BYTES = 60 << 20


@dataclass
class Case:
    """Inputs of one call on this rank, and what the peers' partials are (they follow from the seed)."""

    partial: torch.Tensor
    prefix: torch.Tensor
    bank: torch.Tensor
    nvb: int
    cw: torch.Tensor
    ow: torch.Tensor
    seed: int

    def args(self) -> tuple[Any, ...]:
        return self.prefix, self.bank, self.nvb, self.cw, self.ow, EPS


@dataclass
class Bench:
    rank: int
    world: int
    max_tokens: int
    out: Path
    started: float
    limit_s: float
    rows: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    budget_until: float = math.inf
    at: str = ""  # what runs, for who reads of its failure

    def __post_init__(self) -> None:
        torch.cuda.set_device(self.rank)
        self.device = torch.device("cuda", self.rank)
        dist.init_process_group("nccl", rank=self.rank, world_size=self.world, device_id=self.device)
        self.group = dist.group.WORLD.group_name
        self._symm = symmetric.empty(
            (workspace_bytes(self.world, self.max_tokens),), dtype=torch.uint8, device=self.device
        )
        self._handle = symmetric.rendezvous(self._symm, self.group)
        peers = [self._handle.get_buffer(p, (16,), torch.uint8, 0).data_ptr() for p in range(self.world)]
        assert peers[self.rank] == self._symm.data_ptr()
        self.ws = Workspace(self._symm, peers, self.rank, self.max_tokens)
        self.one = torch.zeros(1, device=self.device)
        self.meet()

    def meet(self) -> None:
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()

    def budget(self, seconds: float) -> None:
        self.budget_until = time.monotonic() + seconds

    def spent(self) -> bool:
        """Whether this part's time, or all of it, is over: the same answer on every rank."""
        now = time.monotonic()
        over = now > self.budget_until or now - self.started > self.limit_s - 15
        word = torch.tensor([float(over)], device=self.device)
        dist.all_reduce(word, op=dist.ReduceOp.MAX)
        return bool(word.item())

    def agree(self, value: float) -> float:
        """The largest of the ranks' values."""
        word = torch.tensor([value], device=self.device, dtype=torch.float64)
        dist.all_reduce(word, op=dist.ReduceOp.MAX)
        return float(word.item())

    def healthy(self) -> bool:
        """Whether no bounded wait gave up on any rank since the last look; waits for the GPUs."""
        try:
            self.ws.check()
        except RunFailedError as error:
            print("BAD", error, flush=True)
            return self.agree(1.0) == 0.0
        return self.agree(0.0) == 0.0

    def record(self, **row: Any) -> None:
        self.rows.append(row)
        if self.rank:
            return
        print(json.dumps(row), flush=True)
        self.save()

    def save(self) -> None:
        if self.rank:
            return
        document = {"facts": self.facts, "rows": self.rows}
        part = self.out / "ops.json.part"
        part.write_text(json.dumps(document, indent=0), "utf-8")
        part.replace(self.out / "ops.json")

    def case(self, tokens: int, nvb: int, seed: int, scale: float = 1.0) -> Case:
        local = tokens // self.world
        mine = torch.Generator(device=self.device).manual_seed(seed * 1000 + 77 + self.rank)
        shared = torch.Generator(device=self.device).manual_seed(seed * 1000 + 500)
        bank = torch.full((local, NB, H), float("nan"), device=self.device, dtype=bf16)
        bank[:, :nvb] = torch.randn(local, nvb, H, device=self.device, generator=mine, dtype=bf16) * (2 * scale)
        return Case(
            partial=self.peer_partial(tokens, seed, self.rank, scale),
            prefix=torch.randn(local, H, device=self.device, generator=mine, dtype=bf16) * scale,
            bank=bank,
            nvb=nvb,
            cw=(torch.randn(H, device=self.device, generator=shared) * 3 / math.sqrt(H)).float(),
            ow=(torch.randn(H, device=self.device, generator=shared) * 0.2 + 1).to(bf16),
            seed=seed,
        )

    def peer_partial(self, tokens: int, seed: int, rank: int, scale: float = 1.0) -> torch.Tensor:
        source = torch.Generator(device=self.device).manual_seed(seed * 1000 + rank)
        return torch.randn(tokens, H, device=self.device, generator=source, dtype=bf16) * scale

    def time_us(
        self, call: Callable[[int], Any], *, iters: int = 20, graph: bool = False, repeats: int = 5, warm: int = 2
    ) -> float:
        """Median over repeats of the time of one call, of `iters` back to back, on the slower rank.

        All ranks start together: behind a collective in stream order.  `call` gets its number, to rotate inputs.
        """
        for i in range(warm):
            call(i)
        self.meet()
        recorded = None
        if graph:
            recorded = torch.cuda.CUDAGraph()
            with torch.cuda.graph(recorded):
                for i in range(iters):
                    call(i)
            recorded.replay()
            self.meet()
        times = []
        for _ in range(repeats):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(2_000_000)  # about a millisecond, in which the host gets ahead of the GPU
            dist.all_reduce(self.one)
            begin.record()
            if recorded is None:
                for i in range(iters):
                    call(i)
            else:
                recorded.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / iters)
        median = sorted(times)[len(times) // 2]
        return round(self.agree(median), 2)

    def copies_past_l2(self, size: int) -> int:
        """How many sets of inputs of this size make the rotation miss the L2."""
        return max(1, min(16, math.ceil(3 * L2_BYTES / max(size, 1))))


def truth(parts: list[torch.Tensor], prefix: torch.Tensor | None, case: Case, pick: torch.Tensor) -> tuple[Any, Any]:
    """(out, prefix) of the picked local rows in fp64."""
    total = sum(p[pick].double() for p in parts)
    if prefix is not None:
        total = total + prefix[pick].double()
    new = total.to(bf16)
    rows = torch.cat([case.bank[pick, : case.nvb].double(), new.double().unsqueeze(1)], 1)
    score = (rows * case.cw.double()).sum(-1) * torch.rsqrt(rows.pow(2).mean(-1) + EPS)
    mixed = (torch.softmax(score, -1).unsqueeze(-1) * rows).sum(1)
    out = mixed * torch.rsqrt(mixed.pow(2).mean(-1, keepdim=True) + EPS) * case.ow.double()
    return out, new


def errors(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest relative error of a row; nan where anything is."""
    d = (got.double() - want.double()).norm(dim=1) / want.double().norm(dim=1).clamp_min(1e-30)
    return float(d.max().item()) if bool(torch.isfinite(d).all()) else math.nan


def result_folder() -> Path:
    folder = Path(os.environ.get("OUT", "build/ops"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder
