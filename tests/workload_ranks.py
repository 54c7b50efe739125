"""What test_workload_layouts looks at: four processes run the same requests in one layout after the other."""

from __future__ import annotations

import dataclasses
import queue
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from ops_processes import Check, rank_main

from nsysk3.workload.boundary import make_boundary
from nsysk3.workload.engine import Engine
from nsysk3.workload.groups import make_facts, make_groups
from nsysk3.workload.hub import pack
from nsysk3.workload.marks import Marks
from nsysk3.workload.model import Stage
from nsysk3.workload.options import Options, check
from nsysk3.workload.paths import make_path
from nsysk3.workload.rank import read_batch
from nsysk3.workload.scheduler import Request, Scheduler
from nsysk3.workload.weights import Source

BASE = Options(scale="small", layers=4, chunked_prefill_size=47, device="cpu")
# Prompts of several chunks, of less than one, of a length that no number of ranks divides.
PROMPTS = (101, 7, 33, 1)
NEW_TOKENS = 2
Found = dict[str, Any]


class Layout:
    """One layout's rank in this process; processes beyond its size only watch."""

    def __init__(self, options: Options) -> None:
        check(options)
        rank, device, shape = dist.get_rank(), torch.device("cpu"), options.shape()
        self.takes_part = rank < options.world_size
        self.done: queue.SimpleQueue[tuple[int, list[int] | None]] = queue.SimpleQueue()
        self.logits: list[torch.Tensor] = []
        facts = make_facts(options, rank % options.world_size, rank % options.world_size)
        groups = make_groups(facts, device, 60.0)
        if not self.takes_part:
            return
        stage = Stage(options, shape, facts, Source(1, device, torch.float32), groups.tp)
        self.path = make_path(options, shape, groups.tp, device)
        self.boundary = make_boundary(options, facts, groups, self.path, shape, torch.empty(0))
        self.marks = Marks(facts, stage, device, groups.tp_host, options.depth, lambda: None)
        self.engine = Engine(
            options, facts, stage, self.path, self.boundary, groups, device, self.marks,
            lambda number, tokens: self.done.put((number, tokens)), lambda error: self.done.put((-1, [])),
        )  # fmt: skip

    def run(self, message: dict[str, Any]) -> None:
        if self.takes_part:
            self.engine.run(read_batch(message))
            if self.engine.logits is not None:
                self.logits.append(self.engine.logits)


def serve(options: Options) -> Found:
    """Run the prompts to their end as the server does; the first rank schedules."""
    layout, first = Layout(options), dist.get_rank() == 0
    scheduler = Scheduler(chunk=options.chunked_prefill_size, requests_a_batch=2, running=3, depth=options.depth)
    requests = []
    for rid, length in enumerate(PROMPTS):
        ids = torch.randint(0, 32_000, (length,), generator=torch.Generator().manual_seed(rid)).tolist()
        requests.append(Request(rid, ids, NEW_TOKENS))
        scheduler.add(requests[-1])
    while True:
        batch = scheduler.next() if first else None
        said: list[Any] = [
            None if batch is None else batch.message() | {"ids": pack(batch.ids)},
            len(scheduler.under_way),
        ]
        dist.broadcast_object_list(said)
        if said[0] is not None:
            layout.run(said[0])
        elif not said[1]:
            break
        elif first:
            number, tokens = layout.done.get(timeout=60)
            assert tokens is not None
            scheduler.done(number, tokens)
    every: list[Any] = [None] * dist.get_world_size()
    found = {"logits": torch.cat(layout.logits) if layout.logits else None, "tokens": [r.output for r in requests]}
    if layout.takes_part:
        found |= {"decisions": layout.path.decisions(), "transport": layout.boundary.transport}
        layout.engine.close()
        # What a request leaves behind goes with the next micro-batch: here, that of the last ones stays.
        assert len(layout.engine.requests) <= 2
    dist.all_gather_object(every, found)
    return every[0] | {"logits": every[options.world_size - 1]["logits"]}


def checks() -> dict[str, Check]:
    base: Found = {}

    def alone() -> None:
        base.update(serve(BASE))
        assert [len(tokens) for tokens in base["tokens"]] == [NEW_TOKENS] * len(PROMPTS)
        assert len({token for tokens in base["tokens"] for token in tokens}) > 4  # it does not say one thing always

    def agrees(changes: dict[str, Any]) -> None:
        found = serve(dataclasses.replace(BASE, **changes))
        assert found["tokens"] == base["tokens"]
        torch.testing.assert_close(found["logits"], base["logits"], rtol=1e-3, atol=1e-3)
        if changes.get("sp") == "nsysk3" and changes["tp_size"] > 1:
            assert {each["op"] for each in found["decisions"]} == {"attn_res_ag", "rs_attn_res", "linear_rs_attn_res"}
            assert all("no GPU" in each["reason"] for each in found["decisions"])

    def other_chunks() -> None:
        assert serve(dataclasses.replace(BASE, chunked_prefill_size=101))["tokens"] == base["tokens"]

    layouts: dict[str, dict[str, Any]] = {
        "pp2, uneven and late": {"pp_size": 2, "imbalance_factor": 1.5, "imbalance_stage": 1, "jitter": 0.1},
        "pp4 with more under way": {"pp_size": 4, "pp_async_batch_depth": 2},
        "tp2": {"tp_size": 2},
        "pp2 tp2": {"pp_size": 2, "tp_size": 2},
        "tp2 ep2": {"tp_size": 2, "ep_size": 2},
        "tp4 ep2": {"tp_size": 4, "ep_size": 2},
        "pp2 tp2 nccl": {"pp_size": 2, "tp_size": 2, "sp": "nccl"},
        "pp2 tp2 nsysk3": {"pp_size": 2, "tp_size": 2, "sp": "nsysk3"},
        "pp2 nsysk3": {"pp_size": 2, "tp_size": 1, "sp": "nsysk3"},
    }
    agreeing: dict[str, Check] = {name: partial(agrees, changes) for name, changes in layouts.items()}
    return {"alone": alone, **agreeing, "other chunks": other_chunks}


if __name__ == "__main__":
    rank_main(checks, "gloo")
