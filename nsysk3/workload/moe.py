"""The MLPs: a dense one in the first layer, and experts that work in a latent space in all others."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.nn import functional

from nsysk3.ops.pytorch import torch
from nsysk3.plugin.rank import Facts
from nsysk3.workload.groups import split
from nsysk3.workload.paths import Path
from nsysk3.workload.shape import Shape
from nsysk3.workload.weights import Linear, Norm, Source, frozen

_GATE_BOUND, _UP_BOUND = 4.0, 25.0  # SiTU's, as in K3's configuration


def situ(gate_up: torch.Tensor) -> torch.Tensor:
    """Bounded gate times bounded input: [..., n] of [..., 2n], b tanh(g / b) sigmoid(g) times c tanh(u / c)."""
    gate, up = gate_up.chunk(2, dim=-1)
    bounded = torch.tanh(gate / _GATE_BOUND).mul_(_GATE_BOUND).mul_(torch.sigmoid(gate))
    return bounded.mul_(torch.tanh(up / _UP_BOUND).mul_(_UP_BOUND))


def _gate_up(name: str, width: int, into: int, mine: slice, source: Source) -> torch.Tensor:
    """The gate's and the input's columns of one rank, one below the other."""
    return torch.cat([source.matrix(f"{name}.{part}", width, into)[mine] for part in ("gate", "up")])


class DenseMLP(nn.Module):
    """One rank's columns of the first layer's MLP."""

    def __init__(self, name: str, shape: Shape, facts: Facts, source: Source) -> None:
        super().__init__()
        mine = split(shape.dense, facts.tp, facts.tp_size)
        self.gate_up_proj = Linear(_gate_up(name, shape.dense, shape.hidden, mine, source))
        self.down_proj = Linear(source.matrix(f"{name}.down", shape.hidden, shape.dense)[:, mine])

    def local(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part [T, H], to be summed over ranks, of x [T, H]."""
        part: torch.Tensor = self.down_proj(situ(self.gate_up_proj(x)))
        return part

    def forward(self, x: torch.Tensor, prefix: torch.Tensor | None, path: Path) -> torch.Tensor:
        """The new prefix of this rank's rows."""
        summed = path.reduce(self.local(x))
        return summed if prefix is None else summed.add_(prefix)


class LatentMoE(nn.Module):
    """One rank's share of the routed and the shared experts.

    Routed experts are divided over the expert-parallel ranks, and each expert's columns over the ranks that hold it;
    the shared ones' columns over all.  What is reduced over ranks is one tensor, [latent | shared].
    """

    def __init__(self, name: str, shape: Shape, facts: Facts, source: Source) -> None:
        super().__init__()
        self.experts, self.top_k, self.scale = shape.experts, shape.top_k, shape.routed_scale
        self.latent, self.hidden = shape.latent, shape.hidden
        sharing = facts.tp_size // facts.ep_size
        mine = split(shape.expert, facts.tp % sharing, sharing)
        self.held = range(shape.experts)[split(shape.experts, facts.ep, facts.ep_size)]
        self.router = Linear(source.matrix(f"{name}.router", shape.experts, shape.hidden))
        self.router_bias = frozen(source.normal(f"{name}.router_bias", (shape.experts,), 0.05))
        self.latent_proj = Linear(source.matrix(f"{name}.latent", shape.latent, shape.hidden))
        columns = mine.stop - mine.start
        sizes = (len(self.held), 2 * columns, shape.latent)
        gate_up = torch.empty(sizes, dtype=source.dtype, device=source.device)
        down = gate_up.new_empty((len(self.held), shape.latent, columns))
        for place, expert in enumerate(self.held):
            gate_up[place] = _gate_up(f"{name}.{expert}", shape.expert, shape.latent, mine, source)
            down[place] = source.matrix(f"{name}.{expert}.down", shape.latent, shape.expert)[:, mine]
        self.expert_gate_up, self.expert_down = frozen(gate_up), frozen(down)
        shared = split(shape.shared, facts.tp, facts.tp_size)
        self.shared_gate_up = Linear(_gate_up(f"{name}.shared", shape.shared, shape.hidden, shared, source))
        self.shared_down = Linear(source.matrix(f"{name}.shared.down", shape.hidden, shape.shared)[:, shared])
        self.latent_norm = Norm(source.gains(f"{name}.latent_norm", shape.latent), shape.eps)
        self.up_proj = Linear(source.matrix(f"{name}.latent_up", shape.hidden, shape.latent))

    def forward(self, x: torch.Tensor, prefix: torch.Tensor | None, path: Path) -> torch.Tensor:
        """The new prefix of this rank's rows, of all tokens' x [T, H]."""
        summed = path.reduce(self.local(x))
        latent, shared = summed[:, : self.latent], summed[:, self.latent :]
        rest = shared if prefix is None else shared + prefix
        return torch.addmm(rest, self.latent_norm(latent), self.up_proj.weight.t())

    def local(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part [T, latent + H], to be summed over ranks, of x [T, H]."""
        part = x.new_empty((x.shape[0], self.latent + self.hidden))
        weights, chosen = self._route(x)
        part[:, : self.latent] = self._experts(self.latent_proj(x), weights, chosen)
        torch.mm(situ(self.shared_gate_up(x)), self.shared_down.weight.t(), out=part[:, self.latent :])
        return part

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and numbers of each token's experts, [T, k] both."""
        scores = torch.sigmoid(self.router(x).float())
        chosen = (scores + self.router_bias).topk(self.top_k, dim=-1).indices
        weights = scores.gather(-1, chosen)
        return self.scale * weights / weights.sum(-1, keepdim=True), chosen

    def _experts(self, latent: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """The held experts' part [T, latent].  The host never learns how many tokens each expert got."""
        number = chosen.reshape(-1) - self.held.start
        away = (number < 0) | (number >= len(self.held))
        number = number.masked_fill(away, len(self.held)) if len(self.held) < self.experts else number
        ordered, order = number.sort(stable=True)
        ends = torch.searchsorted(ordered, torch.arange(len(self.held), device=latent.device), right=True).int()
        rows = latent[order // self.top_k]
        out = grouped_mm(situ(grouped_mm(rows, self.expert_gate_up, ends)), self.expert_down, ends)
        if len(self.held) < self.experts:  # rows of experts held elsewhere, at the end, hold anything
            out.masked_fill_((ordered == len(self.held)).unsqueeze(-1), 0)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        by_token = out[place].view(-1, self.top_k, self.latent)
        return (weights.to(out.dtype).unsqueeze(1) @ by_token).squeeze(1)


def grouped_mm(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Rows [n, out] of x [n, in]: up to ``ends[0]`` by weight[0] [out, in], and so on; those behind, anything."""
    if _fused_grouped_mm is not None and (x.dtype == torch.bfloat16 or not x.is_cuda):
        return _fused_grouped_mm(x, weight.transpose(-2, -1), offs=ends)
    out = x.new_empty((x.shape[0], weight.shape[1]))
    start = 0
    for number, end in enumerate(ends.tolist()):
        torch.mm(x[start:end], weight[number].t(), out=out[start:end])
        start = end
    return out


# Public since torch 2.10.
_fused_grouped_mm: Callable[..., torch.Tensor] | None = getattr(functional, "grouped_mm", None) or getattr(
    torch, "_grouped_mm", None
)
