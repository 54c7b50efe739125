"""What the kernels compute, in plain PyTorch on one process: the truth of every test.

Shapes and names, here and in all of ``nsysk3.ops``:

* ``P`` ranks share the tokens of a batch, the tensor-parallel group of the attention.  ``M`` tokens; rank ``r`` owns
  the rows ``[r * M/P, (r+1) * M/P)``, ``Ml`` of them.  ``T`` is either count, whichever a function is given.
* ``H`` is the hidden size: 7168 for Kimi-K3.  Everything is bfloat16 unless said otherwise.
* ``prefix`` [T, H]: the running sum of the current block of layers.
* ``bank`` [T, NB, H]: frozen prefixes of earlier blocks; slots ``0 .. rows-1`` are valid, the rest may hold anything.
* ``score_weight`` [H]: the pseudo-query, weight of the score's RMSNorm times weight of its projection.
* ``norm_weight`` [H]: weight of the RMSNorm that follows.
* ``partial`` [M, H]: o_proj's output on one rank, not yet summed over the P ranks.

One attention-residual read, per token::

    row_j  = bank[:, j] for j < rows, and prefix last
    s_j    = (row_j . score_weight) / sqrt(mean(row_j ** 2) + eps)
    mixed  = sum_j softmax(s)_j * row_j
    normed = mixed / sqrt(mean(mixed ** 2) + eps) * norm_weight

With ``rows == 0`` nothing is mixed: normed is the RMSNorm of prefix.  A *write* layer stores prefix to the bank's next
slot, after which the running sum restarts empty: the next contribution alone is the prefix.

Functions compute in ``acc`` (float64 for truth, float32 for what a kernel can reach) and return normed in ``acc``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from nsysk3.ops.pytorch import torch

HIDDEN = 7168  # Kimi-K3
BLOCK = 12  # layers between two writes to the bank
EPS = 1e-6


def rows_at_attention(layer: int, block: int = BLOCK) -> int:
    """Valid bank rows when the attention side of ``layer`` reads: blocks that ended before it."""
    return -(-layer // block)


def rows_at_mlp(layer: int, block: int = BLOCK) -> int:
    """Valid bank rows when the MLP side of ``layer`` reads: a write layer has written by then."""
    return layer // block + 1


def writes_bank(layer: int, block: int = BLOCK) -> bool:
    """Whether the attention side of ``layer`` stores its prefix to the bank."""
    return layer % block == 0


def local_rows(tokens: int, rank: int, world: int) -> slice:
    """The rows of a batch that ``rank`` owns: contiguous, and one more on the first ranks where they do not divide."""
    each, more = divmod(tokens, world)
    start = rank * each + min(rank, more)
    return slice(start, start + each + (rank < more))


def attn_res(
    prefix: torch.Tensor,
    bank: torch.Tensor,
    rows: int,
    score_weight: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float = EPS,
    *,
    norm_eps: float | None = None,
    acc: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Normed [T, H] in ``acc``, directly from the definition.  ``norm_weight`` None: mixed, before the last norm."""
    head = prefix.to(acc).unsqueeze(1)
    every = torch.cat([bank[:, :rows].to(acc), head], dim=1) if rows else head
    scores = (every * score_weight.to(acc)).sum(-1) * torch.rsqrt(every.square().mean(-1) + eps)
    mixed = (torch.softmax(scores, -1).unsqueeze(-1) * every).sum(1)
    if norm_weight is None:
        return mixed
    norm_eps = eps if norm_eps is None else norm_eps
    return mixed * torch.rsqrt(mixed.square().mean(-1, keepdim=True) + norm_eps) * norm_weight.to(acc)


def attn_res_online(
    prefix: torch.Tensor,
    bank: torch.Tensor,
    rows: int,
    score_weight: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float = EPS,
    *,
    norm_eps: float | None = None,
    acc: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The same value by the online-softmax recurrence, one row at a time, as the kernels compute it.

    Per token: a running maximum m, denominator l and sum a, so that every row is read once and nothing of size
    [T, rows, H] exists.  The RMSNorm is taken of a / l without dividing: it needs sum(a ** 2) / l ** 2 only.
    """
    tokens, hidden = prefix.shape
    m = prefix.new_full((tokens,), -math.inf, dtype=acc)
    total = prefix.new_zeros((tokens,), dtype=acc)
    mixed = prefix.new_zeros((tokens, hidden), dtype=acc)
    weight = score_weight.to(acc)
    for row in (*(bank[:, j] for j in range(rows)), prefix):
        value = row.to(acc)
        score = (value * weight).sum(-1) * torch.rsqrt(value.square().mean(-1) + eps)
        peak = torch.maximum(m, score)
        shrink, share = torch.exp(m - peak), torch.exp(score - peak)
        mixed = mixed * shrink[:, None] + share[:, None] * value
        total = total * shrink + share
        m = peak
    inverse = 1.0 / total
    square = mixed.square().mean(-1) * inverse * inverse
    scale = inverse * torch.rsqrt(square + (eps if norm_eps is None else norm_eps))
    return mixed * scale[:, None] * norm_weight.to(acc)


def write_bank(bank: torch.Tensor, row: int, prefix: torch.Tensor) -> None:
    """Store the prefix [T, H] of a write layer to slot ``row``, bit for bit."""
    bank[:, row].copy_(prefix)


def reduce_scatter(
    partials: Sequence[torch.Tensor], rank: int, *, acc: torch.dtype = torch.float64, rounds: str = "once"
) -> torch.Tensor:
    """Rank ``rank``'s rows of the sum of every rank's ``partial``, [Ml, H] in ``acc``.

    ``rounds`` says what a real one rounds: ``once``, nothing on the way, as nsysk3's kernels do; ``sum``, the sum
    through the storage type, as NVLink's own reduction does; ``hop``, after every hop, as a ring does.
    """
    world, dtype = len(partials), partials[0].dtype
    mine = local_rows(partials[0].shape[0], rank, world)
    if rounds == "hop":
        total = partials[(rank + 1) % world][mine].to(acc)
        for hop in range(2, world + 1):
            total = (total + partials[(rank + hop) % world][mine].to(acc)).to(dtype).to(acc)
        return total
    total = torch.stack([each[mine].to(acc) for each in partials]).sum(0)
    return total.to(dtype).to(acc) if rounds == "sum" else total


def reduce_scatter_attn_res(
    partials: Sequence[torch.Tensor],
    rank: int,
    prefix: torch.Tensor | None,
    bank: torch.Tensor,
    rows: int,
    score_weight: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float = EPS,
    *,
    acc: torch.dtype = torch.float64,
    rounds: str = "once",
) -> tuple[torch.Tensor, torch.Tensor]:
    """K1: reduce-scatter, prefix add, attention residual and RMSNorm on rank ``rank``'s rows.

    ``prefix`` [Ml, H], None after a write layer; ``bank`` [Ml, NB, H].  Returns normed [Ml, H] in ``acc`` and the new
    prefix [Ml, H] in the storage type: rounded once, and what is scored and mixed is the rounded one, as every later
    reader sees it.
    """
    total = reduce_scatter(partials, rank, acc=acc, rounds=rounds)
    if prefix is not None:
        total = total + prefix.to(acc)
    new_prefix = total.to(partials[0].dtype)
    return attn_res(new_prefix, bank, rows, score_weight, norm_weight, eps, acc=acc), new_prefix


def attn_res_all_gather(
    prefixes: Sequence[torch.Tensor],
    banks: Sequence[torch.Tensor],
    rows: int,
    score_weight: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float = EPS,
    *,
    write_row: int | None = None,
    acc: torch.dtype = torch.float64,
) -> torch.Tensor:
    """K3: every rank reads its own rows, then the normalised rows [M, H] are gathered, in rank order.

    ``prefixes`` and ``banks``: [Ml, H] and [Ml, NB, H] of every rank; ``write_row`` stores the prefixes there first.
    Equal, bit for bit, to gathering first and reading every row on every rank: a read looks at one token.
    """
    normed = []
    for prefix, bank in zip(prefixes, banks, strict=True):
        normed.append(attn_res(prefix, bank, rows, score_weight, norm_weight, eps, acc=acc).to(prefix.dtype))
        if write_row is not None:
            write_bank(bank, write_row, prefix)
    return torch.cat(normed)


def linear(x: torch.Tensor, weight: torch.Tensor, *, acc: torch.dtype = torch.float64) -> torch.Tensor:
    """One rank's share of o_proj, its ``partial`` [M, H]: x [M, K/P] times weight [H, K/P], rounded to x's type."""
    return (x.to(acc) @ weight.to(acc).t()).to(x.dtype)


def linear_reduce_scatter(
    xs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    rank: int,
    *,
    acc: torch.dtype = torch.float64,
    exact: bool = False,
) -> torch.Tensor:
    """K2 up to the reduce-scatter: rank ``rank``'s rows [Ml, H] of the sum of x times weight over ranks, in ``acc``.

    ``exact``: partials unrounded, the product as mathematics has it; else each is rounded to the storage type, as it
    must be to be sent.
    """
    mine = local_rows(xs[0].shape[0], rank, len(xs))
    if exact:
        return torch.stack([x[mine].to(acc) @ w.to(acc).t() for x, w in zip(xs, weights, strict=True)]).sum(0)
    return reduce_scatter([linear(x, w, acc=acc) for x, w in zip(xs, weights, strict=True)], rank, acc=acc)


def boundary_bytes(tokens: int, rows: int, world: int, hidden: int = HIDDEN, element_size: int = 2) -> dict[str, int]:
    """Bytes that one rank moves at a pipeline boundary for ``tokens`` and ``rows`` valid bank rows.

    ``sent``: to the same rank of the next stage, either way.  ``full_gathered`` and ``full_copied``: received by
    all-gathers, and read and written by the copy into the bank, where every rank is to hold every row.
    ``sliced_gathered``: by the gather of the first read's output, which is all that sliced rows need.
    """
    row = tokens * hidden * element_size
    others = (world - 1) / world
    return {
        "sent": row * (rows + 1) // world,
        "full_gathered": round(row * (rows + 1) * others),
        "full_copied": 2 * row * rows,
        "sliced_gathered": round(row * others),
    }
