"""Hand-over on one node: the copy engine writes into the next stage's memory, and a flag says that it is there.

No kernel moves the data and none of a receiver's multiprocessors waits for it but one warp.  Every stage lends the one
before it ``depth`` slots of symmetric memory, each of them a whole micro-batch: the bank, with room for the rows that
the stage will write itself, and the head.  The stage computes in its slot, so nothing is copied.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from nsysk3.errors import InputError
from nsysk3.ops.links import Arriving, Size, recorded_event
from nsysk3.ops.peers import Place, first_reason, gather, no_peer_access, place, symmetric_bytes
from nsysk3.ops.pytorch import dist, torch

if TYPE_CHECKING:
    from nsysk3.ops.boundary import Stage

logger = logging.getLogger("nsysk3.ops")

_READY, _FREE, _FLAGS = 0, 1, 2
# A stage may wait this long for another; longer, and torch's wait ends the process.
_PATIENCE_MS = 600_000


@dataclass(frozen=True)
class Memory:
    """Symmetric memory of consecutive stages on one node, as slots of micro-batches.

    ``handle`` is torch's: get_buffer, put_signal and wait_signal; ``buffer``, what it is the handle of, lives as long.
    ``places``: slots of the bank that a slot has room for, the most of any stage.
    """

    handle: Any
    buffer: torch.Tensor | None
    size: Size
    max_tokens: int
    places: int
    depth: int

    @property
    def slot_numbers(self) -> int:
        """Elements of a slot."""
        return (self.places + 1) * self.max_tokens * self.size.hidden

    def bank(self, rank: int, slot: int, tokens: int, slots: int) -> torch.Tensor:
        """The bank [T, slots, H] of ``rank``'s slot, its own slots contiguous."""
        shape = (slots, tokens, self.size.hidden)
        start = slot * self.slot_numbers
        found: torch.Tensor = self.handle.get_buffer(rank, shape, self.size.dtype, start)
        return found.transpose(0, 1)

    def head(self, rank: int, slot: int, tokens: int) -> torch.Tensor:
        """The head [T, H] of ``rank``'s slot."""
        start = slot * self.slot_numbers + self.places * self.max_tokens * self.size.hidden
        found: torch.Tensor = self.handle.get_buffer(rank, (tokens, self.size.hidden), self.size.dtype, start)
        return found

    def tell(self, rank: int, slot: int, flag: int) -> None:
        """Raise a flag at ``rank``, behind everything on this stream; waits where the last one was not taken."""
        self.handle.put_signal(rank, slot * _FLAGS + flag, _PATIENCE_MS)

    def hear(self, rank: int, slot: int, flag: int) -> None:
        """Wait on this stream for a flag from ``rank``, and take it."""
        self.handle.wait_signal(rank, slot * _FLAGS + flag, _PATIENCE_MS)


class Landing:
    """The receiver's side: the slots, in turn."""

    def __init__(self, memory: Memory, me: int, source: int, slots: int) -> None:
        self._memory, self._me, self._source, self._slots = memory, me, source, slots
        self._expected = self._released = 0

    def expect(self, tokens: int) -> Arriving:
        """See Incoming."""
        if self._expected - self._released >= self._memory.depth:
            # Waiting on the GPU for a slot whose release has not been launched could wait for ever.
            raise InputError(f"{self._memory.depth} micro-batches expected and none of them released")
        slot = self._expected % self._memory.depth
        self._expected += 1
        bank = self._memory.bank(self._me, slot, tokens, self._slots)
        head = self._memory.head(self._me, slot, tokens)
        # One flag for all: what was relayed was written before it.
        rows = partial(self._memory.hear, self._source, slot, _READY)
        return Arriving(head, bank, rows, lambda: None, partial(self._release, slot))

    def _release(self, slot: int) -> None:
        if slot != self._released % self._memory.depth:
            raise InputError("micro-batches are released in the order in which they came")
        self._released += 1
        self._memory.tell(self._source, slot, _FREE)


class Putting:
    """The sender's side."""

    def __init__(self, memory: Memory, target: int, relays: int, slots: int) -> None:
        self._memory, self._target, self._relays, self._slots = memory, target, relays, slots
        self._relayed = self._handed = 0
        self._leaving: list[tuple[Any, tuple[torch.Tensor, ...]]] = []
        self.bytes_sent = 0

    def relay(self, rows: torch.Tensor, tokens: int) -> None:
        """See Outgoing."""
        slot = self._claim(self._relayed)
        self._relayed += 1
        self._put(self._bank(slot, tokens)[: self._relays], rows)
        self._keep(rows)

    def hand_over(self, rows: torch.Tensor, head: torch.Tensor) -> None:
        """See Outgoing."""
        slot, tokens = self._handed % self._memory.depth, head.shape[0]
        if not self._relays:
            self._claim(self._handed)
        self._handed += 1
        self._put(self._bank(slot, tokens)[self._relays : self._relays + rows.shape[0]], rows)
        self._put(self._memory.head(self._target, slot, tokens), head)
        self._memory.tell(self._target, slot, _READY)
        self._keep(rows, head)

    def _claim(self, number: int) -> int:
        """The slot of micro-batch ``number``, once it is free."""
        slot = number % self._memory.depth
        if number >= self._memory.depth:
            self._memory.hear(self._target, slot, _FREE)
        return slot

    def _bank(self, slot: int, tokens: int) -> torch.Tensor:
        return self._memory.bank(self._target, slot, tokens, self._slots).transpose(0, 1)

    def _put(self, there: torch.Tensor, here: torch.Tensor) -> None:
        there.copy_(here)
        self.bytes_sent += here.nbytes

    def _keep(self, *tensors: torch.Tensor) -> None:
        """Keep what is being sent until it has left this GPU."""
        if not tensors[0].is_cuda:
            return
        gone = recorded_event()
        self._leaving = [each for each in self._leaving if not each[0].query()]
        self._leaving.append((gone, tensors))


@dataclass(frozen=True)
class Near:
    """Links to neighbours on the same node; None where the neighbour is elsewhere or absent."""

    incoming: Landing | None
    outgoing: Putting | None

    def describe(self) -> str:
        """For people."""
        return " and ".join(
            f"{side} by copy engine" for side, link in (("in", self.incoming), ("out", self.outgoing)) if link
        )


def put_links(
    group: dist.ProcessGroup,
    ranks: list[int],
    stages: Sequence[Stage],
    size: Size,
    max_tokens: int,
    depth: int,
    relay: bool,
) -> Near | None:
    """Links through the copy engine to the neighbours that this rank can reach, None without any.  Collective."""
    if size.device.type != "cuda":
        return None
    number = ranks.index(dist.get_rank())
    places: list[Place] = gather(place(size.device), group, size.device)
    first, end = run_of(number, [each.host for each in places])
    if end - first < 2:
        return None
    # Only to meet and to name the memory: a group that needs no communicator, for which all ranks would have to come.
    near = dist.new_group(ranks[first:end], backend="gloo", use_local_synchronization=True)
    reason = first_reason(gather(no_peer_access(places[first:end], size.device), near, size.device))
    if reason is None:
        most = max(stage.slots for stage in stages[first:end])
        count = Memory(None, None, size, max_tokens, most, depth).slot_numbers * depth
        try:
            buffer, handle = symmetric_bytes(count * size.dtype.itemsize, near, size.device)
        except (RuntimeError, ImportError) as error:
            reason = f"no symmetric memory ({(str(error) or type(error).__name__).splitlines()[0]})"
    if reason is not None:
        logger.warning("k3.boundary: NCCL (%s)", reason)
        return None
    memory = Memory(handle, buffer, size, max_tokens, most, depth)
    return make_links(memory, number - first, stages[first:end], relay)


def make_links(memory: Memory, me: int, stages: Sequence[Stage], relay: bool) -> Near:
    """Links of stage ``me`` among the consecutive ``stages`` that share ``memory``, by their order."""
    mine = stages[me]
    incoming = outgoing = None
    if me:
        incoming = Landing(memory, me, me - 1, mine.slots)
    if me + 1 < len(stages):
        outgoing = Putting(memory, me + 1, mine.inherited if relay else 0, stages[me + 1].slots)
    return Near(incoming, outgoing)


def run_of(number: int, hosts: Sequence[str]) -> tuple[int, int]:
    """First and end of the consecutive stages around ``number`` that share its host."""
    first = end = number
    while first > 0 and hosts[first - 1] == hosts[number]:
        first -= 1
    while end < len(hosts) and hosts[end] == hosts[number]:
        end += 1
    return first, end
