"""Kimi delta attention: a linear attention with a decay for every channel, a delta rule and a short convolution."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn
from torch.nn import functional

from nsysk3.ops.pytorch import torch
from nsysk3.plugin.rank import Facts
from nsysk3.workload.groups import split
from nsysk3.workload.requests import Requests
from nsysk3.workload.scheduler import MicroBatch
from nsysk3.workload.shape import Shape
from nsysk3.workload.weights import Linear, Norm, Source, frozen

CHUNK = 64
# A channel keeps at least e**-4 of itself over a chunk, so that no factor of the chunk form leaves float32.
_LONGEST_DECAY = 4.0 / CHUNK


@dataclass
class DeltaState:
    """What a request leaves in a layer: ``inputs`` [taps - 1, 3hd] of the convolution, and ``memory`` [h, d, d]."""

    inputs: torch.Tensor
    memory: torch.Tensor


class DeltaAttention(nn.Module):
    """One rank's heads of a KDA layer."""

    def __init__(self, name: str, shape: Shape, facts: Facts, source: Source) -> None:
        super().__init__()
        mine = split(shape.heads * shape.head_dim, facts.tp, facts.tp_size)
        width = shape.heads * shape.head_dim
        self.heads, self.head_dim, self.taps = shape.heads // facts.tp_size, shape.head_dim, shape.conv
        parts = [source.matrix(f"{name}.{part}", width, shape.hidden)[mine] for part in ("q", "k", "v", "gate")]
        self.qkvg_proj = Linear(torch.cat(parts))
        convolved = [source.normal(f"{name}.conv.{part}", (width, shape.conv), 0.5)[mine] for part in ("q", "k", "v")]
        self.conv_weight = frozen(torch.cat(convolved))
        beta = source.matrix(f"{name}.beta", shape.heads, shape.hidden)[split(shape.heads, facts.tp, facts.tp_size)]
        self.small_proj = Linear(torch.cat([source.matrix(f"{name}.decay_a", shape.decay_rank, shape.hidden), beta]))
        self.decay_proj = Linear(source.matrix(f"{name}.decay_b", width, shape.decay_rank)[mine])
        self.decay_bias = frozen(source.normal(f"{name}.decay_bias", (width,), 2.0)[mine])
        self.o_norm = Norm(source.gains(f"{name}.o_norm", shape.head_dim), shape.eps)
        self.o_proj = Linear(source.matrix(f"{name}.o", shape.hidden, width)[:, mine])

    def forward(self, x: torch.Tensor, batch: MicroBatch, requests: Requests, layer: int, keep: bool) -> torch.Tensor:
        """[T, h d] of x [T, H], which o_proj takes; with ``keep`` the requests' states move on."""
        tokens, width = x.shape[0], self.heads * self.head_dim
        qkv, gate = self.qkvg_proj(x).split([3 * width, width], dim=-1)
        decay, beta = self.small_proj(x).split([self.small_proj.weight.shape[0] - self.heads, self.heads], dim=-1)
        log_decay = -_LONGEST_DECAY * torch.sigmoid((self.decay_proj(decay) + self.decay_bias).float())
        beta = torch.sigmoid(beta.float())
        out = x.new_empty((tokens, self.heads, self.head_dim))
        at = 0
        for piece in batch.pieces:
            rows = slice(at, at + piece.count)
            at += piece.count
            state = requests.delta(piece.rid, layer, lambda: self._empty(x))
            convolved, inputs = _convolve(qkv[rows], state.inputs, self.conv_weight)
            q, k, v = functional.silu(convolved).float().view(-1, 3, self.heads, self.head_dim).unbind(1)
            decays = log_decay[rows].view(-1, self.heads, self.head_dim)
            out[rows], memory = delta_rule(
                functional.normalize(q, dim=-1), functional.normalize(k, dim=-1), v, decays, beta[rows], state.memory
            )
            if keep:
                state.inputs, state.memory = inputs, memory
        gated: torch.Tensor = self.o_norm(out) * torch.sigmoid(gate).view_as(out)
        return gated.view(tokens, width)

    def _empty(self, x: torch.Tensor) -> DeltaState:
        inputs = x.new_zeros((self.taps - 1, 3 * self.heads * self.head_dim))
        return DeltaState(inputs, x.new_zeros((self.heads, self.head_dim, self.head_dim), dtype=torch.float32))


def _convolve(x: torch.Tensor, before: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Every column of x [T, C] convolved with its taps of weight [C, taps] after ``before`` [taps - 1, C].

    Also returns the last inputs, the next call's ``before``.
    """
    tokens, taps = x.shape[0], weight.shape[1]
    inputs = torch.cat([before, x])
    out = inputs[:tokens] * weight[:, 0]
    for tap in range(1, taps):
        out.addcmul_(inputs[tap : tap + tokens], weight[:, tap])
    return out, inputs[tokens:].clone()


def delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor, memory: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated delta rule over T tokens, in float32, chunk by chunk.

    q, k, v, log_decay: [T, h, d]; beta: [T, h]; memory S: [h, d, d] by (key, value) channel.  For each token::

        S = exp(log_decay) * S;  S = S + k (beta * (v - S^T k))^T;  out = S^T q / sqrt(d)

    Returns out [T, h, d] and the last S.  Within a chunk, with G the sum of log_decay up to a token, the corrections
    u = beta * (v - S^T k) solve (1 + L) U = beta (V - (k e^G) S0), L being strictly lower triangular; so U, the output
    and the next S0 are linear in S0, and only S0 passes from chunk to chunk.
    """
    tokens, heads, dim = q.shape
    chunks = -(-tokens // CHUNK)
    q, k, v, log_decay = (_chunked(each, chunks) for each in (q, k, v, log_decay))  # [h, n, C, d]
    beta = _chunked(beta.unsqueeze(-1), chunks)  # [h, n, C, 1]
    total = log_decay.cumsum(2)
    grown, shrunk = k * total.exp(), k * (-total).exp()
    read = q * total.exp() * dim**-0.5
    inverse = _inverse(beta * (grown @ shrunk.transpose(-1, -2)).tril(-1))
    scores = (read @ shrunk.transpose(-1, -2)).tril()
    fixed, moved = inverse @ (beta * v), inverse @ (beta * grown)  # U = fixed - moved S0
    left = total[:, :, -1].exp().unsqueeze(-1)  # [h, n, d, 1]: of S0 at the chunk's end
    shrunk = shrunk.transpose(-1, -2)
    passed = left * (torch.eye(dim, device=q.device) - shrunk @ moved)  # [h, n, d, d]
    before, memory = _scan(passed, left * (shrunk @ fixed), memory)
    out = read @ before + scores @ (fixed - moved @ before)
    return out.permute(1, 2, 0, 3).reshape(chunks * CHUNK, heads, dim)[:tokens], memory


def _chunked(x: torch.Tensor, chunks: int) -> torch.Tensor:
    """[T, h, d] as [h, n, C, d] with zeros behind: keys, values and decays of zero change nothing."""
    tokens, heads, dim = x.shape
    padded = functional.pad(x, (0, 0, 0, 0, 0, chunks * CHUNK - tokens))
    return padded.view(chunks, CHUNK, heads, dim).permute(2, 0, 1, 3).contiguous()


def _inverse(lower: torch.Tensor) -> torch.Tensor:
    """Inverse of 1 + L for strictly lower triangular L [..., C, C]: (1 - L)(1 + L**2)(1 + L**4) ..., as L**C is 0."""
    power = -lower
    inverse = torch.eye(lower.shape[-1], device=lower.device) + power
    for _ in range(math.ceil(math.log2(lower.shape[-1])) - 1):
        power = power @ power
        inverse = inverse + inverse @ power
    return inverse


def _scan(a: torch.Tensor, b: torch.Tensor, first: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Every S before its chunk [h, n, d, d], and the last, of S' = a S + b with a, b [h, n, d, d].

    Chunks are grouped: the groups run their steps side by side, then one after the other, so that n chunks take some
    2 sqrt(n) steps rather than n.
    """
    heads, chunks, dim = a.shape[:3]
    size = math.isqrt(chunks - 1) + 1
    groups = -(-chunks // size)
    if groups * size > chunks:  # chunks that change nothing
        idle = torch.eye(dim, device=a.device).expand(heads, groups * size - chunks, dim, dim)
        a, b = torch.cat([a, idle], 1), torch.cat([b, torch.zeros_like(idle)], 1)
    a, b = (each.view(heads, groups, size, dim, dim) for each in (a, b))
    along_a, along_b = torch.empty_like(a), torch.empty_like(b)  # from a group's beginning through each of its chunks
    along_a[:, :, 0], along_b[:, :, 0] = a[:, :, 0], b[:, :, 0]
    for step in range(1, size):
        along_a[:, :, step] = a[:, :, step] @ along_a[:, :, step - 1]
        along_b[:, :, step] = a[:, :, step] @ along_b[:, :, step - 1] + b[:, :, step]
    begins = torch.empty_like(a[:, :, 0])
    state = first
    for group in range(groups):
        begins[:, group] = state
        state = along_a[:, group, -1] @ state + along_b[:, group, -1]
    after = along_a @ begins.unsqueeze(2) + along_b
    before = torch.cat([begins.unsqueeze(2), after[:, :, :-1]], 2)
    return before.view(heads, groups * size, dim, dim)[:, :chunks], state
