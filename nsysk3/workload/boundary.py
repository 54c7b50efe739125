"""The hand-over between stages, and the tokens that go back to the first.

A micro-batch's stream is its prefix [M, H] and the bank's rows that are written by now, [M, rows, H]: the later the
boundary, the more.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from nsysk3.errors import NsysK3Error
from nsysk3.ops.pytorch import dist, torch
from nsysk3.plugin.rank import Facts
from nsysk3.workload.devices import cuda
from nsysk3.workload.groups import Groups, all_gather
from nsysk3.workload.options import Options
from nsysk3.workload.paths import Path, Stream
from nsysk3.workload.shape import Shape

if TYPE_CHECKING:
    from nsysk3.ops.boundary import Handed

logger = logging.getLogger("nsysk3.workload")
Tensors = dict[str, torch.Tensor]


class Boundary(Protocol):
    """One rank's two boundaries; the calls of a micro-batch are start or receive, outgoing and send, done."""

    transport: str

    def start(self, prefix: torch.Tensor, tokens: int) -> Stream:
        """A stream of the first stage, from its embedding."""

    def receive(self, tokens: int, rows: int) -> Stream:
        """The next stream from the stage before, ``rows`` of its tokens on this rank, with room for this stage's rows.

        On a GPU it is there once the current stream gets to what uses it.
        """

    def outgoing(self, stream: Stream) -> Tensors:
        """What this rank holds of what the next stage needs."""

    def send(self, stream: Stream) -> list[Any]:
        """Begin to send it; works to wait for before its tensors are gone."""

    def done(self) -> None:
        """Everything of the micro-batch is launched."""

    def close(self) -> None:
        """Nothing follows."""


class GatheredBoundary:
    """As SGLang does: where every rank of a stage holds the whole stream, each sends 1/P of every tensor, in two steps.

    Its peer in the next stage receives the share, gathers all of them, and copies the bank to where there is room for
    its own rows.  Ranks that hold their own rows only send these as they are.
    """

    transport = "distributed"

    def __init__(self, facts: Facts, groups: Groups, path: Path, shape: Shape, like: torch.Tensor) -> None:
        self._facts, self._groups, self._like, self._hidden = facts, groups, like, shape.hidden
        self._divides = not path.sliced and facts.tp_size > 1
        held = shape.stage(facts.pp, facts.pp_size)
        self._inherited, self._slots = shape.bank_rows(held.start), shape.bank_rows(held.stop)
        # A micro-batch comes in while the one before it still computes.
        self._stream = cuda.Stream(like.device) if like.is_cuda else None

    def start(self, prefix: torch.Tensor, tokens: int) -> Stream:
        """Its bank holds nothing yet."""
        return Stream(prefix, prefix.new_empty((prefix.shape[0], self._slots, self._hidden)), tokens)

    def receive(self, tokens: int, rows: int) -> Stream:
        """Receive, gather, copy."""
        shapes = ((rows, self._hidden), (rows, self._inherited, self._hidden))
        with self._beside():
            prefix, received = whole = [self._like.new_empty(shape) for shape in shapes]
            shares = [self._room(tensor) for tensor in whole]
            peer = self._facts.pp_ranks[self._facts.pp - 1]
            works: list[Any] = [dist.irecv(share, peer, group=self._groups.pipeline) for share in shares]
            for work, share, tensor in zip(works, shares, whole, strict=True):
                work.wait()
                if share is not tensor:
                    all_gather(tensor.view(-1), share, group=self._groups.tp_boundary)
        if self._stream is not None:
            current = cuda.current_stream(self._like.device)
            current.wait_stream(self._stream)
            for tensor in whole:
                tensor.record_stream(current)
        if self._inherited == self._slots:
            return Stream(prefix, received, tokens)
        bank = self._like.new_empty((rows, self._slots, self._hidden))
        bank[:, : self._inherited] = received
        return Stream(prefix, bank, tokens)

    def outgoing(self, stream: Stream) -> Tensors:
        """By SGLang's names."""
        assert stream.prefix is not None
        return {"hidden_states": stream.prefix, "attn_res_bank": stream.bank}

    def send(self, stream: Stream) -> list[Any]:
        """This rank's share."""
        peer, group = self._facts.pp_ranks[self._facts.pp + 1], self._groups.pipeline
        return [dist.isend(self._share(tensor), peer, group=group) for tensor in self.outgoing(stream).values()]

    def done(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is left."""

    def _divided(self, tensor: torch.Tensor) -> bool:
        return self._divides and tensor.numel() % self._facts.tp_size == 0

    def _share(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(self._facts.tp_size, -1)[self._facts.tp] if self._divided(tensor) else tensor

    def _room(self, tensor: torch.Tensor) -> torch.Tensor:
        """Where this rank's share arrives, apart from the whole."""
        return tensor.new_empty(tensor.numel() // self._facts.tp_size) if self._divided(tensor) else tensor

    @contextmanager
    def _beside(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with cuda.stream(self._stream):
            yield


class RelayedBoundary:
    """Of nsysk3.ops.boundary: row slices, straight into place, inherited rows sent on while the stage computes."""

    def __init__(
        self, options: Options, facts: Facts, groups: Groups, path: Path, shape: Shape, like: torch.Tensor
    ) -> None:
        from nsysk3.ops.boundary import Boundary as Relayed

        assert groups.pipeline is not None
        cuts = [shape.stage(stage, facts.pp_size).start for stage in range(facts.pp_size)] + [shape.layers]
        largest = path.owned(options.chunked_prefill_size)
        self._relayed = Relayed(
            groups.pipeline, facts.pp_ranks, cuts, hidden=shape.hidden, max_tokens=largest.stop - largest.start + 1,
            device=like.device, dtype=like.dtype, layers_a_row=shape.block,
        )  # fmt: skip
        self.transport = self._relayed.transport
        self._handed: Handed | None = None
        self._own = slice(self._relayed.stage.inherited if facts.pp else 0, self._relayed.stage.slots)

    def start(self, prefix: torch.Tensor, tokens: int) -> Stream:
        """Its bank holds nothing yet."""
        self._handed = self._relayed.start(prefix)
        return Stream(*self._handed.wait(), tokens)

    def receive(self, tokens: int, rows: int) -> Stream:
        """Where it will be computed on."""
        self._handed = self._relayed.expect(rows)
        return Stream(*self._handed.wait(), tokens)

    def outgoing(self, stream: Stream) -> Tensors:
        """What the relay has not sent."""
        assert stream.prefix is not None
        return {"hidden_states": stream.prefix, "attn_res_bank": stream.bank[:, self._own]}

    def send(self, stream: Stream) -> list[Any]:
        """What is sent keeps itself alive."""
        assert stream.prefix is not None
        self._relayed.hand_over(stream.prefix, stream.bank)
        return []

    def done(self) -> None:
        """Its memory may hold another micro-batch."""
        assert self._handed is not None
        self._handed.release()
        self._handed = None

    def close(self) -> None:
        """Wait until everything has left."""
        self._relayed.flush()


def make_boundary(
    options: Options, facts: Facts, groups: Groups, path: Path, shape: Shape, like: torch.Tensor
) -> Boundary:
    """The form that ``--sp`` asks for; ``like``: a tensor of the stage's device and type.  Collective."""
    if options.sp == "nsysk3" and facts.pp_size > 1 and (path.sliced or facts.tp_size == 1):
        try:
            return RelayedBoundary(options, facts, groups, path, shape, like)
        except (ImportError, NsysK3Error) as error:
            logger.warning("--sp nsysk3: %s; stages hand over as without it", error)
    return GatheredBoundary(facts, groups, path, shape, like)


class Results:
    """The ring of results: tokens [pieces] from the last stage to the first, rank by rank."""

    def __init__(self, facts: Facts, groups: Groups) -> None:
        self._first, self._last, self._group = facts.pp_ranks[0], facts.pp_ranks[-1], groups.results

    def send(self, tokens: torch.Tensor) -> list[Any]:
        """Begin to send; see Boundary.send."""
        return [dist.isend(tokens, self._first, group=self._group)]

    def receive(self, tokens: torch.Tensor) -> list[Any]:
        """Begin to receive into ``tokens``."""
        return [dist.irecv(tokens, self._last, group=self._group)]
