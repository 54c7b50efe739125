"""What goes into each micro-batch: chunked prefill as SGLang packs it, and one token a request to decode."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Request:
    """A prompt, and what has become of it."""

    rid: int
    prompt: Sequence[int]
    max_new_tokens: int
    on_token: Callable[[Request], None] = lambda request: None  # after every token
    launched: int = 0  # tokens of the prompt that are in micro-batches already launched
    output: list[int] = field(default_factory=list)
    busy: int = 0  # its micro-batches under way
    cancelled: bool = False

    @property
    def finished(self) -> bool:
        """All tokens asked for are there."""
        return len(self.output) >= self.max_new_tokens


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of one request in a micro-batch."""

    rid: int
    start: int  # tokens of the request before these
    count: int
    capacity: int  # tokens the request will ever have: what to reserve for it


@dataclass(frozen=True)
class MicroBatch:
    """What every rank runs as one forward."""

    number: int  # counts forwards from 1, as SGLang's forward_ct does
    slot: int
    mode: str  # extend or decode
    pieces: tuple[Piece, ...]
    free: tuple[int, ...]  # requests whose state is no longer needed
    ids: array[int]  # the pieces' tokens, one after the other

    @property
    def tokens(self) -> int:
        """Tokens of all pieces."""
        return sum(piece.count for piece in self.pieces)

    def message(self) -> dict[str, Any]:
        """As it goes to the ranks, but for the tokens' ids."""
        pieces = [[piece.rid, piece.start, piece.count, piece.capacity] for piece in self.pieces]
        return {
            "kind": "batch", "number": self.number, "slot": self.slot, "mode": self.mode, "pieces": pieces,
            "free": list(self.free),
        }  # fmt: skip


class Scheduler:
    """Decides what to run next; knows nothing of processes or clocks.

    A micro-batch holds at most ``chunk`` tokens of at most ``requests_a_batch`` requests.  A request that does not fit
    gives its first tokens, and what is left leads the next micro-batch: the stages work in order, so it need not wait
    for its beginning to come back.  Prefill goes before decode.  ``depth`` micro-batches are under way at most, and
    ``running`` requests have state on the ranks at most.
    """

    def __init__(self, *, chunk: int, requests_a_batch: int, running: int, depth: int) -> None:
        self.chunk, self.requests_a_batch, self.running, self.depth = chunk, requests_a_batch, running, depth
        self.waiting: deque[Request] = deque()
        self.admitted: dict[int, Request] = {}
        self.under_way: dict[int, tuple[MicroBatch, list[Request]]] = {}
        self.forwards = 0
        self._cut: Request | None = None  # the request whose prompt was cut by the last micro-batch
        self._free: list[int] = []

    def add(self, request: Request) -> None:
        """Queue a request behind all others."""
        self.waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Do nothing more for a request than is already under way."""
        request.cancelled = True
        if request in self.waiting:
            self.waiting.remove(request)
        if request is self._cut:
            self._cut = None
        self._release(request)

    def next(self) -> MicroBatch | None:
        """The next micro-batch; None when enough are under way or there is nothing to run."""
        if len(self.under_way) >= self.depth:
            return None
        taken = self._prefill()
        mode = "extend" if taken else "decode"
        taken = taken or self._decode()
        if not taken:
            return None
        self.forwards += 1
        pieces, ids = [], array("i")
        for request, count in taken:
            start = request.launched if mode == "extend" else len(request.prompt) + len(request.output) - 1
            # The last token generated is never read, so it needs no room.
            capacity = len(request.prompt) + request.max_new_tokens - 1
            pieces.append(Piece(request.rid, start, count, capacity))
            if mode == "extend":
                ids.extend(request.prompt[start : start + count])
                request.launched += count
            else:
                ids.append(request.output[-1])
            request.busy += 1
        free, self._free = tuple(self._free), []
        slot = (self.forwards - 1) % self.depth
        batch = MicroBatch(self.forwards, slot, mode, tuple(pieces), free, ids)
        self.under_way[batch.number] = (batch, [request for request, _ in taken])
        return batch

    def done(self, number: int, tokens: Sequence[int]) -> None:
        """A micro-batch came back with the token that follows each piece; those of cut prompts mean nothing."""
        batch, requests = self.under_way.pop(number)
        for piece, request, token in zip(batch.pieces, requests, tokens, strict=True):
            request.busy -= 1
            answers = piece.start + piece.count >= len(request.prompt)
            if answers and not request.cancelled:
                request.output.append(token)
                request.on_token(request)
            if request.cancelled or request.finished:
                self._release(request)

    def _prefill(self) -> list[tuple[Request, int]]:
        """Requests and how many tokens of each: the cut one first, then in the order they came."""
        taken: list[tuple[Request, int]] = []
        budget = self.chunk
        while budget and len(taken) < self.requests_a_batch:
            request = self._cut or self._admit()
            if request is None:
                break
            self._cut = None
            count = min(budget, len(request.prompt) - request.launched)
            budget -= count
            taken.append((request, count))
            if request.launched + count < len(request.prompt):
                self._cut = request
                break
        return taken

    def _admit(self) -> Request | None:
        if not self.waiting or len(self.admitted) >= self.running:
            return None
        request = self.waiting.popleft()
        self.admitted[request.rid] = request
        return request

    def _decode(self) -> list[tuple[Request, int]]:
        ready = (each for each in self.admitted.values() if each.output and not each.busy and not each.cancelled)
        return [(request, 1) for request, _ in zip(ready, range(self.requests_a_batch), strict=False)]

    def _release(self, request: Request) -> None:
        if not request.busy and self.admitted.pop(request.rid, None) is not None:
            self._free.append(request.rid)
