"""A small stack of layers with Kimi-K3's residual structure: run whole on one process, or by row slices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nsysk3.ops import reference as ref

BF16 = torch.bfloat16


@dataclass
class Layer:
    """Weights: of the two reads, per rank of what stands for attention and o_proj, and of what stands for the MLP."""

    attention: tuple[torch.Tensor, torch.Tensor]
    mlp: tuple[torch.Tensor, torch.Tensor]
    w_in: Sequence[torch.Tensor]
    w_out: Sequence[torch.Tensor]
    w_mlp: torch.Tensor


def make_layers(count: int, world: int, hidden: int, seed: int = 0) -> list[Layer]:
    g = torch.Generator().manual_seed(seed)

    def random(*shape: int, by: float) -> torch.Tensor:
        return (torch.randn(*shape, generator=g) * by).to(BF16)

    def read() -> tuple[torch.Tensor, torch.Tensor]:
        return random(hidden, by=2 / math.sqrt(hidden)), random(hidden, by=0.2) + 1

    each, by = hidden // world, 1 / math.sqrt(hidden)
    return [
        Layer(
            read(), read(), [random(each, hidden, by=by) for _ in range(world)],
            [random(hidden, each, by=by) for _ in range(world)], random(hidden, hidden, by=by),
        )
        for _ in range(count)
    ]  # fmt: skip


@dataclass
class State:
    """Between two layers: the stream's head, the bank and its valid rows; for all rows, or for one rank's."""

    head: torch.Tensor
    bank: torch.Tensor
    rows: int = 0


def start(head: torch.Tensor, slots: int) -> State:
    bank = torch.full((head.shape[0], slots, head.shape[1]), math.nan, dtype=BF16)
    return State(head, bank)


def attention(normed: torch.Tensor, layer: Layer, rank: int) -> torch.Tensor:
    """What rank ``rank`` contributes to o_proj's output, for all rows."""
    return ref.linear(ref.linear(normed, layer.w_in[rank]), layer.w_out[rank])


def after_mlp(normed: torch.Tensor, prefix: torch.Tensor, layer: Layer) -> torch.Tensor:
    return (ref.linear(normed.to(BF16), layer.w_mlp).double() + prefix.double()).to(BF16)


def run_whole(state: State, layers: Sequence[Layer], block: int, first: int = 0) -> State:
    """Every row on one process."""
    head, bank, rows = state.head, state.bank.clone(), state.rows
    for number, layer in enumerate(layers, first):
        assert rows == ref.rows_at_attention(number, block)
        normed = ref.attn_res(head, bank, rows, *layer.attention).to(BF16)
        prefix: torch.Tensor | None = head
        if ref.writes_bank(number, block):
            ref.write_bank(bank, rows, head)
            rows, prefix = rows + 1, None
        assert rows == ref.rows_at_mlp(number, block)
        total = torch.stack([attention(normed, layer, r).double() for r in range(len(layer.w_in))]).sum(0)
        prefix = (total if prefix is None else total + prefix.double()).to(BF16)
        head = after_mlp(ref.attn_res(prefix, bank, rows, *layer.mlp), prefix, layer)
    return State(head, bank, rows)


def run_sliced(states: Sequence[State], layers: Sequence[Layer], block: int, first: int = 0) -> list[State]:
    """The same where each rank holds the head and the bank of its own rows only."""
    world = len(states)
    heads, banks, rows = [s.head for s in states], [s.bank.clone() for s in states], states[0].rows
    for number, layer in enumerate(layers, first):
        writes = ref.writes_bank(number, block)
        normed = ref.attn_res_all_gather(heads, banks, rows, *layer.attention, write_row=rows if writes else None)
        rows += writes
        partials = [attention(normed, layer, r) for r in range(world)]
        for r in range(world):
            prefix = None if writes else heads[r]
            read, prefix = ref.reduce_scatter_attn_res(partials, r, prefix, banks[r], rows, *layer.mlp)
            heads[r] = after_mlp(read, prefix, layer)
    return [State(head, bank, rows) for head, bank in zip(heads, banks, strict=True)]


def cut(state: State, world: int, slots: int | None = None) -> list[State]:
    """Each rank's rows of a whole state, in a bank of ``slots``."""
    tokens, had, hidden = state.bank.shape
    result = []
    for rank in range(world):
        mine = ref.local_rows(tokens, rank, world)
        bank = torch.full((mine.stop - mine.start, slots or had, hidden), math.nan, dtype=BF16)
        bank[:, : state.rows] = state.bank[mine, : state.rows]
        result.append(State(state.head[mine].clone(), bank, state.rows))
    return result
