"""Reduce-scatter and all-gather of token rows through torch.distributed: NCCL on GPUs, gloo on CPUs."""

from __future__ import annotations

from nsysk3.ops.pytorch import dist, torch
from nsysk3.ops.reference import local_rows


def reduce_scatter_rows(partial: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's rows [Ml, H] of the sum over ranks of ``partial`` [M, H]; rows as local_rows has them.

    Rows that do not divide are padded to equal blocks.  On the CPU the blocks are exchanged and summed in float32 in
    the order of the ranks, as the GPU kernels do, so that results do not depend on what gloo can reduce.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    tokens, hidden = partial.shape
    mine = local_rows(tokens, rank, world)
    blocks = _padded(partial, world)
    most = blocks.shape[0] // world
    if partial.is_cuda:
        summed = partial.new_empty((most, hidden))
        _reduce_scatter(summed, blocks, group=group)
    else:
        received = torch.empty_like(blocks)
        dist.all_to_all_single(received, blocks, group=group)
        summed = received.view(world, most, hidden).float().sum(0).to(partial.dtype)
    return summed[: mine.stop - mine.start]


def all_gather_rows(local: torch.Tensor, tokens: int, group: dist.ProcessGroup) -> torch.Tensor:
    """The rows [M, H] of all ranks, ``tokens`` of them, from each rank's own ``local`` [Ml, H]."""
    world = dist.get_world_size(group)
    most = -(-tokens // world)
    block = local.contiguous()
    if local.shape[0] != most:
        block = local.new_zeros((most, local.shape[1]))
        block[: local.shape[0]] = local
    gathered = local.new_empty((world * most, local.shape[1]))
    _all_gather(gathered, block, group=group)
    if tokens == world * most:
        return gathered
    rows = [local_rows(tokens, rank, world) for rank in range(world)]
    return torch.cat([gathered[r * most : r * most + each.stop - each.start] for r, each in enumerate(rows)])


def _padded(rows: torch.Tensor, world: int) -> torch.Tensor:
    """``rows`` [M, H] as ``world`` blocks of equal length, each rank's rows first and zeros behind."""
    tokens, hidden = rows.shape
    most = -(-tokens // world)
    if tokens == world * most:
        return rows.contiguous()
    blocks = rows.new_zeros((world, most, hidden))
    for rank in range(world):
        own = local_rows(tokens, rank, world)
        blocks[rank, : own.stop - own.start] = rows[own]
    return blocks.view(world * most, hidden)


# torch 2.13 renames both, and warns at every call of the old names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
