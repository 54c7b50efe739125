"""The collectives around the attention residual: three forms that compute the same function.

``off`` keeps the whole stream on every rank and sums with AllReduce.  ``nccl`` and ``nsysk3`` keep each rank's own rows
(sequence parallelism): reduce-scatter behind o_proj and the MLP, all-gather before the attention and the MLP; the
former with separate kernels, the latter with those of nsysk3.ops that communicate themselves.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Protocol

from nsysk3.errors import NsysK3Error
from nsysk3.ops.collectives import all_gather_rows, reduce_scatter_rows
from nsysk3.ops.pytorch import dist, torch
from nsysk3.ops.reference import local_rows
from nsysk3.workload.attn_res import Read, choose_read
from nsysk3.workload.options import Options
from nsysk3.workload.shape import Shape

logger = logging.getLogger("nsysk3.workload")


@dataclass
class Stream:
    """What flows from layer to layer: this rank's rows of the running block sum and of the bank of those before it."""

    prefix: torch.Tensor | None  # [Ml, H]; None right after it went to the bank
    bank: torch.Tensor  # [Ml, NB, H]
    tokens: int  # of the micro-batch, over all ranks


@dataclass(frozen=True)
class ReadWeights:
    """Weights [H] of one read of the residual: of its score (float32) and of the norm behind it."""

    score: torch.Tensor
    norm: torch.Tensor
    eps: float


class Path(Protocol):
    """One form.  M tokens in all, Ml rows that this rank owns."""

    sliced: bool  # the stream holds this rank's rows only
    takes_projection: bool  # o_proj belongs to ``join``, not to the attention

    def owned(self, tokens: int) -> slice:
        """The rows of a micro-batch that this rank's stream holds."""

    def read_own(self, stream: Stream, rows: int, weights: ReadWeights, write_row: int | None) -> torch.Tensor:
        """Normed rows [Ml, H] of the stream; ``write_row``: the prefix goes to that row of the bank."""

    def read(self, stream: Stream, rows: int, weights: ReadWeights, write_row: int | None) -> torch.Tensor:
        """As read_own, the rows of all tokens [M, H]."""

    def join(
        self, x: torch.Tensor, o_proj: torch.Tensor | None, stream: Stream, rows: int, weights: ReadWeights
    ) -> torch.Tensor:
        """Sum the attention over ranks into the stream and read for the MLP: normed rows of all tokens [M, H].

        ``x``: o_proj's output on this rank [M, H], or, where the path takes the projection, its input [M, K].
        """

    def reduce(self, part: torch.Tensor) -> torch.Tensor:
        """This rank's rows [Ml, W] of the sum over ranks of ``part`` [M, W]; may be ``part`` itself."""

    def decisions(self) -> list[dict[str, Any]]:
        """What was asked for, what runs and why, where that can differ."""

    def check(self) -> None:
        """Raise RunFailedError when a kernel gave up waiting for a peer; waits for the GPU."""


class WholeStream:
    """AllReduce; every rank reads all rows.  Without a group there is nothing to sum over."""

    sliced = False
    takes_projection = False

    def __init__(self, group: dist.ProcessGroup | None, read: Read) -> None:
        self._group, self._read = group, read

    def owned(self, tokens: int) -> slice:
        """All."""
        return slice(0, tokens)

    def read_own(self, stream: Stream, rows: int, weights: ReadWeights, write_row: int | None) -> torch.Tensor:
        """Without communication."""
        assert stream.prefix is not None
        return self._read(stream.prefix, stream.bank, rows, weights.score, weights.norm, weights.eps, write_row)

    def read(self, stream: Stream, rows: int, weights: ReadWeights, write_row: int | None) -> torch.Tensor:
        """All rows are this rank's."""
        return self.read_own(stream, rows, weights, write_row)

    def join(
        self, x: torch.Tensor, o_proj: torch.Tensor | None, stream: Stream, rows: int, weights: ReadWeights
    ) -> torch.Tensor:
        """AllReduce of [M, H], add, read."""
        summed = self.reduce(x)
        stream.prefix = summed if stream.prefix is None else stream.prefix + summed
        return self.read(stream, rows, weights, None)

    def reduce(self, part: torch.Tensor) -> torch.Tensor:
        """AllReduce in place."""
        if self._group is not None:
            dist.all_reduce(part, group=self._group)
        return part

    def decisions(self) -> list[dict[str, Any]]:
        """None to make."""
        return []

    def check(self) -> None:
        """Collectives wait until they are done."""


class SlicedStream:
    """Reduce-scatter and all-gather by NCCL (gloo on CPUs), everything else in kernels of its own."""

    sliced = True
    takes_projection = False

    def __init__(self, group: dist.ProcessGroup, read: Read) -> None:
        self._group, self._read = group, read
        self._rank, self._world = dist.get_rank(group), dist.get_world_size(group)

    def owned(self, tokens: int) -> slice:
        """A contiguous share."""
        return local_rows(tokens, self._rank, self._world)

    def read_own(self, stream: Stream, rows: int, weights: ReadWeights, write_row: int | None) -> torch.Tensor:
        """Without communication."""
        assert stream.prefix is not None
        return self._read(stream.prefix, stream.bank, rows, weights.score, weights.norm, weights.eps, write_row)

    def read(self, stream: Stream, rows: int, weights: ReadWeights, write_row: int | None) -> torch.Tensor:
        """Read this rank's rows, then gather."""
        return all_gather_rows(self.read_own(stream, rows, weights, write_row), stream.tokens, self._group)

    def join(
        self, x: torch.Tensor, o_proj: torch.Tensor | None, stream: Stream, rows: int, weights: ReadWeights
    ) -> torch.Tensor:
        """Reduce-scatter, add, read this rank's rows, gather for the MLP."""
        summed = self.reduce(x)
        stream.prefix = summed if stream.prefix is None else stream.prefix + summed
        return self.read(stream, rows, weights, None)

    def reduce(self, part: torch.Tensor) -> torch.Tensor:
        """Reduce-scatter."""
        return reduce_scatter_rows(part, self._group)

    def decisions(self) -> list[dict[str, Any]]:
        """None to make."""
        return []

    def check(self) -> None:
        """Collectives wait until they are done."""


class FusedStream(SlicedStream):
    """As SlicedStream, through nsysk3.ops.sp: fused kernels where they can run and, by mode, are faster."""

    takes_projection = True

    def __init__(
        self, group: dist.ProcessGroup, read: Read, shape: Shape, options: Options, device: torch.device
    ) -> None:
        super().__init__(group, read)
        from nsysk3.ops.sp import SequenceParallel

        self._fused = SequenceParallel(
            group, hidden=shape.hidden, max_tokens=options.chunked_prefill_size, max_rows=shape.bank_rows(shape.layers),
            device=device, mode="fused" if options.sp_mode == "fused" else "auto",
        )  # fmt: skip

    def read(self, stream: Stream, rows: int, weights: ReadWeights, write_row: int | None) -> torch.Tensor:
        """Read and gather in one kernel (K3)."""
        assert stream.prefix is not None
        return self._fused.attn_res_all_gather(
            stream.prefix, stream.bank, rows, weights.score, weights.norm, weights.eps, write_row, tokens=stream.tokens
        )

    def join(
        self, x: torch.Tensor, o_proj: torch.Tensor | None, stream: Stream, rows: int, weights: ReadWeights
    ) -> torch.Tensor:
        """o_proj, reduce-scatter, add and read in one (K2, or K1 behind a GEMM), then gather for the MLP."""
        assert o_proj is not None
        normed, stream.prefix = self._fused.linear_reduce_scatter_attn_res(
            x, o_proj, stream.prefix, stream.bank, rows, weights.score, weights.norm, weights.eps
        )
        return all_gather_rows(normed, stream.tokens, self._group)

    def decisions(self) -> list[dict[str, Any]]:
        """Of nsysk3.ops.sp."""
        return [
            {"op": each.op, "path": each.path, "reason": each.reason, "tokens": each.tokens, "rows": each.rows}
            for each in self._fused.decisions
        ]

    def check(self) -> None:
        """Of nsysk3.ops.sp."""
        self._fused.check()


def make_path(options: Options, shape: Shape, group: dist.ProcessGroup | None, device: torch.device) -> Path:
    """The form that ``--sp`` asks for; one line says where another is taken."""
    read = choose_read(options.attn_res)
    if options.sp == "off":
        return WholeStream(group, read)
    if group is None:
        logger.info("--sp %s: nothing to share with one rank in the TP group; off", options.sp)
        return WholeStream(group, read)
    if options.sp == "nccl":
        return SlicedStream(group, read)
    try:
        return FusedStream(group, choose_read("fused"), shape, options, device)
    except (ImportError, NsysK3Error) as error:
        logger.warning("--sp nsysk3: %s; nccl", error)
        return SlicedStream(group, read)
