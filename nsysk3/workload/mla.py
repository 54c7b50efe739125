"""Multi-head latent attention without positions: keys and values are kept as one small latent a token."""

from __future__ import annotations

from torch import nn
from torch.nn import functional

from nsysk3.ops.pytorch import torch
from nsysk3.plugin.rank import Facts
from nsysk3.workload.groups import split
from nsysk3.workload.requests import Requests
from nsysk3.workload.scheduler import MicroBatch
from nsysk3.workload.shape import Shape
from nsysk3.workload.weights import Linear, Norm, Source


class MLAAttention(nn.Module):
    """One rank's heads of an MLA layer; every rank keeps the whole latent."""

    def __init__(self, name: str, shape: Shape, facts: Facts, source: Source) -> None:
        super().__init__()
        self.heads, self.head_dim, self.shared = shape.heads // facts.tp_size, shape.head_dim, shape.shared_key_dim
        self.q_lora, self.kv_lora = shape.q_lora, shape.kv_lora

        def by_head(part: str, each: int, into: int) -> torch.Tensor:
            rows = split(shape.heads * each, facts.tp, facts.tp_size)
            return source.matrix(f"{name}.{part}", shape.heads * each, into)[rows]

        down = (("q_a", shape.q_lora), ("kv_a", shape.kv_lora + shape.shared_key_dim))
        self.down_proj = Linear(torch.cat([source.matrix(f"{name}.{part}", out, shape.hidden) for part, out in down]))
        self.q_norm = Norm(source.gains(f"{name}.q_norm", shape.q_lora), shape.eps)
        self.kv_norm = Norm(source.gains(f"{name}.kv_norm", shape.kv_lora), shape.eps)
        self.q_proj = Linear(by_head("q_b", self.head_dim + self.shared, shape.q_lora))
        self.kv_proj = Linear(by_head("kv_b", 2 * self.head_dim, shape.kv_lora))
        self.gate_proj = Linear(by_head("gate", self.head_dim, shape.hidden))
        width = shape.heads * shape.head_dim
        mine = split(width, facts.tp, facts.tp_size)
        self.o_proj = Linear(source.matrix(f"{name}.o", shape.hidden, width)[:, mine])

    def forward(self, x: torch.Tensor, batch: MicroBatch, requests: Requests, layer: int, keep: bool) -> torch.Tensor:
        """[T, h d] of x [T, H], which o_proj takes.  Latents are written alike each time: ``keep`` changes nothing."""
        q, latents = self.down_proj(x).split([self.q_lora, self.kv_lora + self.shared], dim=-1)
        q = self.q_proj(self.q_norm(q)).view(-1, self.heads, self.head_dim + self.shared)
        latents = torch.cat([self.kv_norm(latents[:, : self.kv_lora]), latents[:, self.kv_lora :]], dim=-1)
        out = x.new_empty((x.shape[0], self.heads, self.head_dim))
        at = 0
        for piece in batch.pieces:
            rows, end = slice(at, at + piece.count), piece.start + piece.count
            at += piece.count
            cache = requests.latents(piece.rid, layer, piece.capacity, latents)
            cache[piece.start : end] = latents[rows]
            out[rows] = self._attend(q[rows], cache[:end])
        return out.view(x.shape[0], -1) * torch.sigmoid(self.gate_proj(x))

    def _attend(self, q: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        """[n, h, d] of the last n tokens' queries over all s of the request, each over itself and those before."""
        length = latents.shape[0]
        keys_values = self.kv_proj(latents[:, : self.kv_lora]).view(length, self.heads, 2 * self.head_dim)
        keys, v = keys_values.split(self.head_dim, dim=-1)
        shared = latents[:, None, self.kv_lora :].expand(length, self.heads, self.shared)
        k = torch.cat([keys, shared], dim=-1)
        # The fast kernels want values as wide as keys; the others keep every score, gigabytes of a long prompt.
        v = functional.pad(v, (0, self.shared))
        q, k, v = (each.transpose(0, 1).unsqueeze(0) for each in (q, k, v))
        return _causal(q, k, v)[0].transpose(0, 1)[..., : self.head_dim]


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention [1, h, n, d] of queries that are the last n of the keys' s tokens."""
    count, length = q.shape[2], k.shape[2]
    if count == length:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    if q.is_cuda:  # keeps to the fast kernels, and takes seconds to import
        from torch.nn.attention.bias import causal_lower_right

        return functional.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(count, length))
    mask = torch.ones((count, length), dtype=torch.bool, device=q.device).tril(length - count)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
