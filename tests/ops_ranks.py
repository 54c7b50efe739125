"""What test_ops_distributed checks, on the CPU: each rank of it runs this file."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from ops_cases import BF16, PREFIX, assert_normed, error, make_case
from ops_processes import Check, rank_main
from ops_stack import Layer, after_mlp, attention, make_layers, run_whole, start

from nsysk3.errors import InputError
from nsysk3.ops import reference as ref
from nsysk3.ops.boundary import Boundary
from nsysk3.ops.sp import SequenceParallel

HIDDEN, BLOCK = 48, 3


def groups(sizes: Sequence[Sequence[int]]) -> list[Any]:
    """A group for each list of ranks, made on every rank; this rank's own."""
    made = [(ranks, dist.new_group(list(ranks))) for ranks in sizes]
    return [group for ranks, group in made if dist.get_rank() in ranks]


def collectives(group: Any, tokens: int, mode: str) -> None:
    """Every operation against the reference, a prefix and none, weights of either type."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    sp = SequenceParallel(group, hidden=HIDDEN, max_tokens=64, max_rows=4, device="cpu", mode=mode)  # type: ignore[arg-type]
    mine = sp.rows(tokens)
    for rows, scale in ((1, 1.0), (3, 3e-4)):
        case = make_case(tokens, world, HIDDEN, rows, seed=rows + tokens, scale=scale)
        bank, prefix = case.bank[mine].clone(), case.prefix[mine]
        for residual in (prefix, None):
            out, new = sp.reduce_scatter_attn_res(case.partials[rank], residual, bank, rows, *case.weights)
            _, wanted = ref.reduce_scatter_attn_res(case.partials, rank, residual, bank, rows, *case.weights)
            assert error(new, wanted) < 4e-3 if residual is not None else error(new, wanted) < PREFIX
            assert_normed(out, ref.attn_res(new, bank, rows, *case.weights))
        gathered = sp.attn_res_all_gather(prefix, bank, rows, *case.weights, write_row=rows, tokens=tokens)
        assert_normed(gathered, ref.attn_res(case.prefix, case.bank, rows, *case.weights))
        assert torch.equal(bank[:, rows], prefix)
        g = torch.Generator().manual_seed(5)
        xs = [torch.randn(tokens, 32, generator=g).to(BF16) for _ in range(world)]
        ws = [(torch.randn(HIDDEN, 32, generator=g) / 8).to(BF16) for _ in range(world)]
        out, new = sp.linear_reduce_scatter_attn_res(xs[rank], ws[rank], None, bank, rows, *case.weights)
        assert error(new, ref.linear_reduce_scatter(xs, ws, rank, exact=True)) < 8e-3
        assert_normed(out, ref.attn_res(new, bank, rows, *case.weights))
    assert {each.path for each in sp.decisions} == {"nccl", "separate"}
    assert {each.reason for each in sp.decisions} == {"asked for" if mode == "nccl" else "no GPU"}
    assert sp.partial_buffer(tokens) is None
    sp.check()


def one_line_says_why(group: Any) -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("nsysk3.ops").addHandler(handler)
    sp = SequenceParallel(group, hidden=HIDDEN, max_tokens=64, max_rows=4, device="cpu", mode="fused")
    case = make_case(8, 1, HIDDEN, 1, seed=1)
    mine = sp.rows(8)
    for _ in range(3):
        sp.attn_res_all_gather(case.prefix[mine], case.bank[mine], 1, *case.weights)
        sp.reduce_scatter_attn_res(case.prefix, None, case.bank[mine], 1, *case.weights)
    logging.getLogger("nsysk3.ops").removeHandler(handler)
    assert len(said) == (1 if dist.get_rank(group) == 0 else 0), said
    assert all("no GPU" in each for each in said)
    assert len(sp.decisions) == 2


def wrong_slices_are_told(group: Any) -> None:
    sp = SequenceParallel(group, hidden=HIDDEN, max_tokens=64, max_rows=4, device="cpu", mode="nccl")
    case = make_case(8, 1, HIDDEN, 1, seed=1)
    for bank, prefix in ((case.bank, None), (case.bank[sp.rows(8)], case.prefix)):
        try:
            sp.reduce_scatter_attn_res(case.prefix, prefix, bank, 1, *case.weights)
        except InputError:
            continue
        raise AssertionError("rows of the whole batch were taken for this rank's")


def run_layers(
    sp: SequenceParallel, head: torch.Tensor, bank: torch.Tensor, rows: int, layers: Sequence[Layer], first: int,
    tokens: int,
) -> tuple[torch.Tensor, int]:  # fmt: skip
    """One rank's part of the stack: its rows of the head, and how many of ``bank`` are valid behind it."""
    for number, layer in enumerate(layers, first):
        writes = ref.writes_bank(number, BLOCK)
        normed = sp.attn_res_all_gather(
            head, bank, rows, *layer.attention, 1e-6, write_row=rows if writes else None, tokens=tokens
        )
        rows += writes
        read, prefix = sp.reduce_scatter_attn_res(
            attention(normed, layer, sp.rank), None if writes else head, bank, rows, *layer.mlp, 1e-6
        )
        head = after_mlp(read, prefix, layer)
    return head, rows


class Wire:
    """Bytes that this rank gives to torch.distributed to send."""

    def __init__(self) -> None:
        self.sent = 0
        self._send, dist.isend = dist.isend, self.send

    def send(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.sent += tensor.nbytes
        return self._send(tensor, *args, **kwargs)

    def close(self) -> int:
        dist.isend = self._send
        return self.sent


def every_cut(tp: Any, column: Any, ranks: list[int], tokens: int) -> None:
    """Two stages of two ranks: wherever the stack is cut, what arrives is what would have been there."""
    layers = make_layers(7, 2, HIDDEN, seed=9)
    first = ranks.index(dist.get_rank()) == 0
    sp = SequenceParallel(tp, hidden=HIDDEN, max_tokens=64, max_rows=4, device="cpu", mode="nccl")
    mine = sp.rows(tokens)
    head = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(1)).to(BF16)
    uncut = start(head[mine], 3)
    wanted, _ = run_layers(sp, uncut.head, uncut.bank, 0, layers, 0, tokens)
    whole = run_whole(start(head, 3), layers, BLOCK)
    assert error(wanted, whole.head[mine]) < 2e-2  # roundings of 7 layers apart
    for cut in range(1, 7):
        boundary = Boundary(
            column, ranks, [0, cut, 7], hidden=HIDDEN, max_tokens=64, device="cpu", layers_a_row=BLOCK
        )  # fmt: skip
        assert boundary.transport == "distributed"
        wire = Wire()
        if first:
            handed = boundary.start(head[mine])
            mid, bank = handed.wait()
            mid, rows = run_layers(sp, mid, bank, 0, layers[:cut], 0, tokens)
            assert rows == boundary.stage.slots
            boundary.hand_over(mid, bank)
            boundary.flush()
            share = (mine.stop - mine.start) * HIDDEN * 2
            # The head and each valid row once, nothing else.
            assert wire.close() == boundary.bytes_sent == share * (rows + 1)
        else:
            handed = boundary.expect(mine.stop - mine.start)
            mid, bank = handed.wait()
            out, rows = run_layers(sp, mid, bank, boundary.stage.inherited, layers[cut:], cut, tokens)
            assert wire.close() == 0
            assert torch.equal(out, wanted), f"cut before layer {cut}"
            assert torch.equal(bank, uncut.bank)
        handed.release()
        dist.barrier()


def relayed_chain(ranks: list[int], relay: bool) -> None:
    """Four stages, several micro-batches of different sizes in flight: what arrives is what was sent, in order."""
    cuts, number = [0, 4, 6, 10, 12], ranks.index(dist.get_rank())
    boundary = Boundary(
        dist.group.WORLD, ranks, cuts, hidden=HIDDEN, max_tokens=64, device="cpu", layers_a_row=BLOCK, relay=relay,
        depth=3,
    )  # fmt: skip
    sizes = [5, 1, 64, 7, 30]
    slots = [2, 2, 4, 4]  # rows written by the end of each stage

    def batch(index: int, upto: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What stage ``upto`` hands over: rows that say which stage wrote them, and a head."""
        g = torch.Generator().manual_seed(index)
        rows = torch.randn(4, sizes[index], HIDDEN, generator=g).to(BF16)
        return (rows[0] + upto).to(BF16), rows[: slots[upto]].transpose(0, 1)

    wire, coming = Wire(), []
    for index, size in enumerate(sizes):
        if number:
            # As far ahead as the depth allows, as one would on a GPU.
            while len(coming) < min(len(sizes), index + 3):
                coming.append(boundary.expect(sizes[len(coming)]))
            handed = coming[index]
            head, bank = handed.wait()
            wanted, rows = batch(index, number - 1)
            assert torch.equal(head, wanted)
            assert torch.equal(bank[:, : slots[number - 1]], rows)
        else:
            handed = boundary.start(torch.zeros(size, HIDDEN, dtype=BF16))
            _, bank = handed.wait()
        head, rows = batch(index, number)
        before = slots[number - 1] if number else 0
        bank[:, before : slots[number]] = rows[:, before:]
        if number < 3:
            boundary.hand_over(head, bank)
        handed.release()
    boundary.flush()
    row = HIDDEN * 2 * sum(sizes)
    assert wire.close() == boundary.bytes_sent == (row * (slots[number] + 1) if number < 3 else 0)


def misuse_is_told(ranks: list[int]) -> None:
    last = dist.get_rank() == ranks[-1]
    for cuts in ([0, 0, 2, 3, 4], [0, 1, 2], [3, 2, 1, 0, 4]):
        try:
            Boundary(dist.group.WORLD, ranks, cuts, hidden=8, max_tokens=4, device="cpu")
        except InputError:
            continue
        raise AssertionError(f"cuts {cuts} were taken")
    boundary = Boundary(dist.group.WORLD, ranks, [0, 1, 2, 3, 4], hidden=8, max_tokens=4, device="cpu")
    wrong = (lambda: boundary.hand_over(torch.zeros(1, 8), torch.zeros(1, 1, 8))) if last else None
    wrong = (lambda: boundary.expect(1)) if dist.get_rank() == ranks[0] else wrong
    if wrong is not None:
        try:
            wrong()
        except InputError:
            return
        raise AssertionError("a stage that is not there was taken for one")


def checks() -> dict[str, Check]:
    rank, everyone = dist.get_rank(), [0, 1, 2, 3]
    (tp,) = groups([[0, 1], [2, 3]])
    (column,) = groups([[0, 2], [1, 3]])
    ranks = [0, 2] if rank % 2 == 0 else [1, 3]
    world = dist.group.WORLD
    return {
        "nccl": lambda: collectives(world, 16, "nccl"),
        "nccl uneven": lambda: collectives(world, 11, "nccl"),
        "nccl fewer tokens than ranks": lambda: collectives(world, 3, "nccl"),
        "fused falls back": lambda: collectives(tp, 8, "fused"),
        "auto falls back": lambda: collectives(tp, 8, "auto"),
        "one line": lambda: one_line_says_why(tp),
        "wrong slices": lambda: wrong_slices_are_told(tp),
        "every cut": lambda: every_cut(tp, column, ranks, 8),
        "every cut, uneven": lambda: every_cut(tp, column, ranks, 7),
        "relayed chain": lambda: relayed_chain(everyone, True),
        "chain without relay": lambda: relayed_chain(everyone, False),
        "chain the other way": lambda: relayed_chain([3, 1, 2, 0], True),
        "misuse": lambda: misuse_is_told(everyone),
    }


if __name__ == "__main__":
    rank_main(checks, "gloo")
