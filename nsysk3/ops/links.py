"""One rank's links to the stages before and behind, through torch.distributed; nsysk3.ops.put has those of one node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from nsysk3.ops.pytorch import dist, torch


@dataclass(frozen=True)
class Size:
    """What one micro-batch is: rows of the bank and tokens, on this rank."""

    hidden: int
    dtype: torch.dtype
    device: torch.device

    def bank(self, tokens: int, slots: int) -> torch.Tensor:
        """An uninitialised bank [T, slots, H], each slot [T, H] contiguous in memory: what can be sent as it lies."""
        return torch.empty((slots, tokens, self.hidden), dtype=self.dtype, device=self.device).transpose(0, 1)

    def head(self, tokens: int) -> torch.Tensor:
        """An uninitialised head [T, H]."""
        return torch.empty((tokens, self.hidden), dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class Arriving:
    """A micro-batch on its way: ``rows`` waits for the bank's rows, then ``rest`` for the head.

    Both wait on the current stream of a GPU, on the host without one.  ``release``: its memory may be written again,
    once the current stream comes there.
    """

    head: torch.Tensor
    bank: torch.Tensor
    rows: Callable[[], None]
    rest: Callable[[], None]
    release: Callable[[], None]


class Incoming(Protocol):
    """From the stage before."""

    def expect(self, tokens: int) -> Arriving:
        """The next micro-batch."""


class Outgoing(Protocol):
    """To the stage behind.  Called on the stream of departures, where what is sent is ready."""

    bytes_sent: int

    def relay(self, rows: torch.Tensor, tokens: int) -> None:
        """Send the inherited bank rows [R, T, H] of the next micro-batch: first, where there are any."""

    def hand_over(self, rows: torch.Tensor, head: torch.Tensor) -> None:
        """Send the bank rows [R, T, H] that a stage wrote, and its head [T, H]: what completes a micro-batch."""


class Received:
    """Receives: relayed rows through one channel, a stage's own rows and head through the other."""

    def __init__(self, size: Size, channels: Channels, source: int, relayed: int, inherited: int, slots: int) -> None:
        self._size, self._channels, self._source = size, channels, source
        self._relayed, self._inherited, self._slots = relayed, inherited, slots

    def expect(self, tokens: int) -> Arriving:
        """Posts the receives, straight into the bank's slots."""
        bank, head = self._size.bank(tokens, self._slots), self._size.head(tokens)
        rows = self._channels.receive(block(bank, 0, self._relayed), self._source, relayed=True)
        rows += self._channels.receive(block(bank, self._relayed, self._inherited), self._source)
        rest = self._channels.receive(head, self._source)
        return Arriving(head, bank, lambda: _wait(rows), lambda: _wait(rest), lambda: None)


class Sent:
    """Sends.  What is sent is kept alive until it has left."""

    def __init__(self, channels: Channels, target: int) -> None:
        self._channels, self._target = channels, target
        self._leaving: list[tuple[Any, torch.Tensor]] = []
        self.bytes_sent = 0

    def relay(self, rows: torch.Tensor, tokens: int) -> None:
        """See Outgoing."""
        self._send(rows, relayed=True)

    def hand_over(self, rows: torch.Tensor, head: torch.Tensor) -> None:
        """See Outgoing."""
        self._send(rows)
        self._send(head)

    def flush(self) -> None:
        """Wait until all has left: on the current stream of a GPU."""
        _wait([work for work, _ in self._leaving])
        self._leaving.clear()

    def _send(self, what: torch.Tensor, relayed: bool = False) -> None:
        self._leaving = [each for each in self._leaving if not each[0].is_completed()]
        self._leaving += [(work, what) for work in self._channels.send(what, self._target, relayed)]
        self.bytes_sent += what.nbytes


class Channels:
    """Two orders of messages between the same ranks: relayed rows may pass what a stage is still computing.

    gloo tells them apart by tags.  NCCL has no tags; there each needs a communicator of its own.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: list[int], device: torch.device) -> None:
        second = dist.new_group(ranks, use_local_synchronization=True) if device.type == "cuda" else group
        self._groups = {False: group, True: second}
        self._tags = {False: 0, True: 0 if device.type == "cuda" else 1}

    def receive(self, into: torch.Tensor, source: int, relayed: bool = False) -> list[Any]:
        """A receive that is posted; none for nothing."""
        return [self._post(dist.irecv, into, source, relayed)] if into.numel() else []

    def send(self, what: torch.Tensor, target: int, relayed: bool = False) -> list[Any]:
        """A send that is posted; none of nothing."""
        return [self._post(dist.isend, what, target, relayed)] if what.numel() else []

    def _post(self, call: Callable[..., Any], what: torch.Tensor, peer: int, relayed: bool) -> Any:
        return call(what, peer, group=self._groups[relayed], tag=self._tags[relayed])


def block(bank: torch.Tensor, first: int, end: int) -> torch.Tensor:
    """Slots ``first`` to ``end`` of a bank [T, NB, H] as [R, T, H]: its own memory where a slot is contiguous."""
    return bank[:, first:end].transpose(0, 1).contiguous()


def new_stream(device: torch.device) -> Any:
    """A stream of a GPU, None for a CPU."""
    cuda: Any = torch.cuda
    return cuda.Stream(device) if device.type == "cuda" else None


def recorded_event() -> Any:
    """An event after everything on the current stream."""
    cuda: Any = torch.cuda
    event = cuda.Event()
    event.record()
    return event


@contextmanager
def on_stream(stream: Any) -> Iterator[None]:
    """Work inside goes to ``stream``; None: where it would go anyway."""
    if stream is None:
        yield
        return
    with torch.cuda.stream(stream):
        yield


def _wait(pending: list[Any]) -> None:
    for work in pending:
        work.wait()
