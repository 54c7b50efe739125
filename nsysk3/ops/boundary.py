"""The hand-over between pipeline stages by row slices: what a stage needs is sent once, and nothing is gathered.

With sequence parallelism each rank of a stage holds its own rows of the stream's head and of the bank.  The same rank
of the next stage needs just those: it receives them straight into its bank's slots, and neither gathers nor copies.
Bank rows never change once written, so those that a stage inherited travel on as soon as they arrive, while the stage
computes (the relay); behind it, only the rows that the stage wrote itself and the head remain to be sent.

On one node the sender's copy engine writes into the receiver's memory (nsysk3.ops.put); between nodes, and on CPUs,
torch.distributed sends and receives (nsysk3.ops.links).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nsysk3.errors import InputError
from nsysk3.ops.links import (
    Channels,
    Incoming,
    Outgoing,
    Received,
    Sent,
    Size,
    block,
    new_stream,
    on_stream,
    recorded_event,
)
from nsysk3.ops.put import put_links
from nsysk3.ops.pytorch import dist, torch
from nsysk3.ops.reference import BLOCK, rows_at_attention


@dataclass(frozen=True)
class Stage:
    """Bank rows of a stage: valid when it starts (``inherited``) and when it ends (``slots``).

    ``relayed``: of the inherited ones, those that the stage before had inherited itself.
    """

    inherited: int
    slots: int
    relayed: int

    @classmethod
    def of(cls, cuts: Sequence[int], number: int, block: int = BLOCK) -> Stage:
        """Stage ``number`` of a pipeline whose stages start at layers ``cuts[:-1]`` and end before ``cuts[1:]``."""
        if list(cuts) != sorted(set(cuts)) or not 0 <= number < len(cuts) - 1:
            raise InputError(f"no stage {number} in a pipeline cut at layers {list(cuts)}")
        before = rows_at_attention(cuts[number - 1], block) if number else 0
        return cls(rows_at_attention(cuts[number], block), rows_at_attention(cuts[number + 1], block), before)


@dataclass(frozen=True)
class Handed:
    """One micro-batch of a stage."""

    _head: torch.Tensor
    _bank: torch.Tensor
    _wait: Callable[[], None]
    _release: Callable[[], None]

    def wait(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Head [Ml, H] and bank [Ml, slots, H]: complete, on a GPU for what runs next on the current stream.  Once."""
        self._wait()
        return self._head, self._bank

    def release(self) -> None:
        """Say that this micro-batch is computed and handed over: its memory may hold another."""
        self._release()


class Boundary:
    """One rank's place in the pipeline.  All ranks of a stage make the same calls; micro-batches keep their order.

    Per micro-batch ``start`` or ``expect``, then ``wait``, compute, ``hand_over`` (not on the last stage), ``release``.
    At most ``depth`` micro-batches may be expected and not released.

    ``group``: the ranks of this column, one a stage; ``ranks``: their global ranks in stage order; ``cuts``: see
    Stage.of; ``max_tokens``: most rows of a micro-batch on one rank.  ``put`` False: never the copy engine.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: Sequence[int],
        cuts: Sequence[int],
        *,
        hidden: int,
        max_tokens: int,
        device: torch.device | str,
        dtype: torch.dtype = torch.bfloat16,
        layers_a_row: int = BLOCK,
        relay: bool = True,
        put: bool = True,
        depth: int = 2,
    ) -> None:
        ranks, number, last = list(ranks), list(ranks).index(dist.get_rank()), len(ranks) - 1
        self.stage = Stage.of(cuts, number, layers_a_row)
        self._size = Size(hidden, dtype, torch.device(device))
        relayed = self.stage.relayed if relay else 0
        # What goes on as it arrives: all that this stage inherited, where there is a stage behind.
        self._relays = self.stage.inherited if relay and number < last else 0
        # A relay waits for what arrives, and must not hold up what is already computed.
        self._arrivals, self._relaying, self._departures = (new_stream(self._size.device) for _ in range(3))
        self._relayed: deque[Any] = deque()
        channels = Channels(group, ranks, self._size.device)
        stages = [Stage.of(cuts, each, layers_a_row) for each in range(len(ranks))]
        near = put_links(group, ranks, stages, self._size, max_tokens, depth, relay) if put else None
        self.transport = "distributed" if near is None else near.describe()
        self._incoming: Incoming | None = None
        if number:
            self._incoming = (near.incoming if near else None) or Received(
                self._size, channels, ranks[number - 1], relayed, self.stage.inherited, self.stage.slots
            )
        self._outgoing: Outgoing | None = None
        if number < last:
            self._outgoing = (near.outgoing if near else None) or Sent(channels, ranks[number + 1])

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent to the stage behind."""
        return self._outgoing.bytes_sent if self._outgoing else 0

    def start(self, head: torch.Tensor) -> Handed:
        """A micro-batch of the first stage: its head [Ml, H], and a bank without valid rows."""
        bank = self._size.bank(head.shape[0], self.stage.slots)
        return Handed(head, bank, lambda: None, lambda: None)

    def expect(self, tokens: int) -> Handed:
        """The next micro-batch from the stage before, ``tokens`` rows of it on this rank; returns at once.

        On a GPU its rows are relayed from here on without the host; on a CPU, by ``wait``.
        """
        if self._incoming is None:
            raise InputError("the first stage receives nothing")
        arriving = self._incoming.expect(tokens)

        def relay() -> None:
            if self._outgoing is not None and self._relays:
                self._outgoing.relay(block(arriving.bank, 0, self._relays), tokens)

        if self._arrivals is None:

            def wait() -> None:
                arriving.rows()
                relay()
                arriving.rest()

            return Handed(arriving.head, arriving.bank, wait, arriving.release)
        with on_stream(self._arrivals):
            arriving.rows()
            rows = recorded_event()
            arriving.rest()
            everything = recorded_event()
        if self._relays:
            with on_stream(self._relaying):
                self._relaying.wait_event(rows)
                relay()
                self._relayed.append(recorded_event())
        return Handed(
            arriving.head,
            arriving.bank,
            lambda: torch.cuda.current_stream(self._size.device).wait_event(everything),
            lambda: self._depart(arriving.release),
        )

    def hand_over(self, head: torch.Tensor, bank: torch.Tensor) -> None:
        """Send a micro-batch on: its head [Ml, H], and of its bank the rows that the relay has not sent.

        Neither may be written to before ``flush``.
        """
        if self._outgoing is None:
            raise InputError("the last stage sends nothing")
        outgoing, rows = self._outgoing, block(bank, self._relays, self.stage.slots)
        head = head.contiguous()
        if self._relayed:  # what completes a micro-batch comes behind its relayed rows
            self._departures.wait_event(self._relayed.popleft())
        self._depart(lambda: outgoing.hand_over(rows, head))

    def flush(self) -> None:
        """Wait until everything handed over has left; on a GPU, for what runs next on the current stream."""
        if isinstance(self._outgoing, Sent):
            with on_stream(self._departures):
                self._outgoing.flush()
        if self._departures is not None:
            torch.cuda.current_stream(self._size.device).wait_stream(self._departures)

    def _depart(self, work: Callable[[], None]) -> None:
        """``work`` on the stream of departures, once the current stream has come here."""
        if self._departures is not None:
            self._departures.wait_stream(torch.cuda.current_stream(self._size.device))
        with on_stream(self._departures):
            work()
