"""One stage of the model: its layers, the embedding in the first stage and the logits in the last."""

from __future__ import annotations

from torch import nn
from torch.nn import functional

from nsysk3.ops.pytorch import dist, torch
from nsysk3.plugin.rank import Facts
from nsysk3.workload.delays import layer_passes
from nsysk3.workload.devices import host_numbers
from nsysk3.workload.groups import all_gather, split
from nsysk3.workload.kda import DeltaAttention
from nsysk3.workload.mla import MLAAttention
from nsysk3.workload.moe import DenseMLP, LatentMoE
from nsysk3.workload.options import Options
from nsysk3.workload.paths import Path, ReadWeights, Stream
from nsysk3.workload.requests import Requests
from nsysk3.workload.scheduler import MicroBatch
from nsysk3.workload.shape import Shape
from nsysk3.workload.weights import Linear, Source, frozen


class PPMissingLayer(nn.Module):
    """Stands for a layer of another stage, so that numbers are global; named as SGLang names it."""


class ReadOut(nn.Module):
    """Weights of one read of the attention residual."""

    def __init__(self, name: str, shape: Shape, source: Source) -> None:
        super().__init__()
        self.score = frozen(source.normal(f"{name}.score", (shape.hidden,), shape.hidden**-0.5).float())
        self.norm = frozen(source.gains(f"{name}.norm", shape.hidden))
        self.eps = shape.eps

    @property
    def weights(self) -> ReadWeights:
        """As a path takes them."""
        return ReadWeights(self.score, self.norm, self.eps)


class Layer(nn.Module):
    """Attention and MLP, each behind a read of the residual.

    ``passes``: how often the layer's own work is done; what more than one computes is thrown away.
    """

    def __init__(self, number: int, shape: Shape, facts: Facts, source: Source, passes: int) -> None:
        super().__init__()
        name = f"layers.{number}"
        attention = MLAAttention if shape.is_mla(number) else DeltaAttention
        mlp = DenseMLP if shape.is_dense(number) else LatentMoE
        self.self_attn_res = ReadOut(f"{name}.self_attn_res", shape, source)
        self.self_attn = attention(f"{name}.self_attn", shape, facts, source)
        self.mlp_res = ReadOut(f"{name}.mlp_res", shape, source)
        self.mlp = mlp(f"{name}.mlp", shape, facts, source)
        self.number, self.passes = number, passes
        self.rows_before, self.rows_after = shape.bank_rows(number), shape.bank_rows(number + 1)
        # By this name the markers know it, as in SGLang's layers.
        self.is_block_write_layer = number % shape.block == 0

    def forward(self, stream: Stream, batch: MicroBatch, requests: Requests, path: Path) -> None:
        """Run the layer on ``stream``, in place."""
        write_row = self.rows_before if self.is_block_write_layer else None
        normed = path.read(stream, self.rows_before, self.self_attn_res.weights, write_row)
        if self.is_block_write_layer:
            stream.prefix = None
        for again in reversed(range(self.passes)):
            out = self.self_attn(normed, batch, requests, self.number, keep=again == 0)
            if not path.takes_projection:
                out = self.self_attn.o_proj(out)
        weight = self.self_attn.o_proj.weight if path.takes_projection else None
        normed = path.join(out, weight, stream, self.rows_after, self.mlp_res.weights)
        for _ in range(self.passes - 1):
            self.mlp.local(normed)
        stream.prefix = self.mlp(normed, stream.prefix, path)


class Embedding(nn.Module):
    """One rank's share of the vocabulary."""

    def __init__(self, shape: Shape, facts: Facts, source: Source) -> None:
        super().__init__()
        self.mine = split(shape.vocab, facts.tp, facts.tp_size)
        self.weight = frozen(source.normal("embed_tokens", (shape.vocab, shape.hidden), 1.0)[self.mine])

    def forward(self, ids: torch.Tensor, path: Path) -> torch.Tensor:
        """This rank's rows [Ml, H] of the embedding of all ids [M]."""
        away = (ids < self.mine.start) | (ids >= self.mine.stop)
        part = functional.embedding((ids - self.mine.start).masked_fill(away, 0), self.weight)
        return path.reduce(part.masked_fill_(away.unsqueeze(-1), 0))


class LogitsProcessor(nn.Module):
    """The last read of the residual and the output layer, on the last token of each piece."""

    def __init__(self, shape: Shape, facts: Facts, source: Source, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.read_out = ReadOut("norm", shape, source)
        self.rows = shape.bank_rows(shape.layers)
        weight = source.matrix("lm_head", shape.vocab, shape.hidden)
        self.lm_head = Linear(weight[split(shape.vocab, facts.tp, facts.tp_size)])
        self._group, self._tp_size = group, facts.tp_size

    def forward(self, stream: Stream, batch: MicroBatch, path: Path) -> torch.Tensor:
        """Logits [pieces, vocabulary], the same on every rank of the stage."""
        normed = path.read_own(stream, self.rows, self.read_out.weights, None)
        logits: torch.Tensor = self.lm_head(self._last_rows(normed, batch, path))
        if self._group is None:
            return logits
        gathered = logits.new_empty((self._tp_size, *logits.shape))
        all_gather(gathered.view(-1, logits.shape[1]), logits, group=self._group)
        return gathered.transpose(0, 1).reshape(logits.shape[0], -1)

    def _last_rows(self, normed: torch.Tensor, batch: MicroBatch, path: Path) -> torch.Tensor:
        """Row of each piece's last token [pieces, H]; a rank that holds only its own gets the others' as a sum."""
        ends, at = [], -1
        for piece in batch.pieces:
            at += piece.count
            ends.append(at)
        if not path.sliced:
            return normed[host_numbers(ends, normed.device)]
        owned = path.owned(batch.tokens)
        held = [(place, end - owned.start) for place, end in enumerate(ends) if owned.start <= end < owned.stop]
        picked = normed.new_zeros((len(ends), normed.shape[1]))
        if held:
            places, rows = (host_numbers(list(numbers), normed.device) for numbers in zip(*held, strict=True))
            picked[places] = normed[rows]
        dist.all_reduce(picked, group=self._group)
        return picked


class Stage(nn.Module):
    """A pipeline stage on one rank."""

    def __init__(
        self, options: Options, shape: Shape, facts: Facts, source: Source, group: dist.ProcessGroup | None
    ) -> None:
        super().__init__()
        self.shape, self.facts = shape, facts
        self.held = shape.stage(facts.pp, facts.pp_size)
        self.passes = layer_passes(options, facts.pp, len(self.held))
        self.embed_tokens = Embedding(shape, facts, source) if facts.pp == 0 else PPMissingLayer()
        self.layers = nn.ModuleList(
            Layer(number, shape, facts, source, self.passes[number - self.held.start])
            if number in self.held
            else PPMissingLayer()
            for number in range(shape.layers)
        )
        last = facts.pp == facts.pp_size - 1
        self.logits_processor = LogitsProcessor(shape, facts, source, group) if last else PPMissingLayer()

    def run_layers(self, stream: Stream, batch: MicroBatch, requests: Requests, path: Path) -> None:
        """All layers of the stage."""
        for number in self.held:
            self.layers[number](stream, batch, requests, path)
