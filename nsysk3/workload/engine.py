"""A rank's part of every micro-batch: receive, run the stage, hand on, and know when it is done."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from nsysk3.ops.pytorch import torch
from nsysk3.plugin.rank import Facts
from nsysk3.workload.boundary import Boundary, Results
from nsysk3.workload.delays import Delay, delay_ms
from nsysk3.workload.devices import cuda, to_device
from nsysk3.workload.groups import Groups
from nsysk3.workload.marks import Marks
from nsysk3.workload.model import Stage
from nsysk3.workload.options import Options
from nsysk3.workload.paths import Path, Stream
from nsysk3.workload.requests import Requests
from nsysk3.workload.scheduler import MicroBatch


@dataclass
class Pending:
    """A micro-batch that was launched, and what must live until it is done."""

    number: int
    launched: float = 0.0
    works: list[Any] = field(default_factory=list)
    tokens: torch.Tensor | None = None  # on the host once done, in the first stage
    event: Any = None
    kept: list[Any] = field(default_factory=list)


class Engine:
    """Runs micro-batches in the order given.

    ``on_done`` hears of each, in another thread, with the token after each piece where these are known: in the first
    stage and the last; else None.  ``on_failure`` hears what ended that thread.
    """

    def __init__(
        self, options: Options, facts: Facts, stage: Stage, path: Path, boundary: Boundary, groups: Groups,
        device: torch.device, marks: Marks, on_done: Callable[[int, list[int] | None], None],
        on_failure: Callable[[Exception], None],
    ) -> None:  # fmt: skip
        self.options, self.facts, self.stage, self.path = options, facts, stage, path
        self.requests = Requests()
        self.logits: torch.Tensor | None = None  # of the last micro-batch, in the last stage
        self._device, self._marks, self._on_done = device, marks, on_done
        self._on_failure = on_failure
        self._boundary = boundary
        self._results = Results(facts, groups)
        self._delay = Delay(device)
        self._tail = cuda.Stream(device) if device.type == "cuda" else None
        self._launched: queue.SimpleQueue[Pending | None] = queue.SimpleQueue()
        self._under_way: deque[Pending] = deque()
        self._finisher = threading.Thread(target=self._finish, name="finisher", daemon=True)
        self._finisher.start()

    @property
    def oldest(self) -> float | None:
        """When the oldest micro-batch that is not done was launched (time.monotonic); None without one."""
        try:
            return self._under_way[0].launched
        except IndexError:
            return None

    def run(self, batch: MicroBatch) -> None:
        """Launch a micro-batch.  On CPUs it has run, but for its last sends, when this returns."""
        for rid in batch.free:
            self.requests.free(rid)
        pending = Pending(batch.number, time.monotonic())
        self._under_way.append(pending)
        with torch.inference_mode():
            received = None
            if self.facts.pp > 0:
                received = self._marks.receive(batch, lambda: self._receive(batch.tokens))
            stream, tokens = self._marks.forward(batch, lambda: self._forward(batch, received))
            self._hand_on(batch, stream, tokens, pending)
        self._launched.put(pending)
        self._marks.after_forward()

    def close(self) -> None:
        """Wait for everything that was launched."""
        self._launched.put(None)
        self._finisher.join()
        self._boundary.close()

    def _receive(self, tokens: int) -> Stream:
        owned = self.path.owned(tokens)
        return self._boundary.receive(tokens, owned.stop - owned.start)

    def _forward(self, batch: MicroBatch, received: Stream | None) -> tuple[Stream, torch.Tensor | None]:
        self._delay(delay_ms(self.options.random_seed, self.options.jitter, batch.number, self.facts.world))
        stream = received or self._embed(batch)
        self.stage.run_layers(stream, batch, self.requests, self.path)
        if self.facts.pp < self.facts.pp_size - 1:
            return stream, None
        self.logits = self.stage.logits_processor(stream, batch, self.path)
        return stream, self.logits.argmax(-1)

    def _embed(self, batch: MicroBatch) -> Stream:
        ids = torch.frombuffer(batch.ids, dtype=torch.int32).long()
        return self._boundary.start(self.stage.embed_tokens(to_device(ids, self._device), self.path), batch.tokens)

    def _hand_on(self, batch: MicroBatch, stream: Stream, tokens: torch.Tensor | None, pending: Pending) -> None:
        """Send what the next stage, or the first, waits for; and let ``pending`` tell when all is done."""
        first, last = self.facts.pp == 0, self.facts.pp == self.facts.pp_size - 1
        if not last:
            tensors = self._boundary.outgoing(stream)
            pending.works += self._marks.send("proxy", tensors, lambda: self._boundary.send(stream))
            pending.kept.append(stream)
        elif not first and tokens is not None:
            sent = tokens
            pending.works += self._marks.send("output", {"ids": sent}, lambda: self._results.send(sent))
        self._boundary.done()
        with self._after_compute():
            if first and not last:
                coming = tokens = torch.empty(len(batch.pieces), dtype=torch.int64, device=self._device)
                pending.works += self._marks.receive_results(lambda: self._results.receive(coming))
            if self._tail is not None:
                for work in pending.works:
                    work.wait()  # lets the stream wait, not the host
            if tokens is not None and (first or last):
                pending.kept.append(tokens)
                pending.tokens = tokens
                if self._tail is not None:
                    pending.tokens = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
                    pending.tokens.copy_(tokens, non_blocking=True)
            if self._tail is not None:
                pending.event = cuda.Event(blocking=True)
                pending.event.record()

    def _after_compute(self) -> AbstractContextManager[Any]:
        """On a GPU the stream in which results come in and the end of a micro-batch is recorded."""
        if self._tail is None:
            return nullcontext()
        self._tail.wait_stream(cuda.current_stream(self._device))
        on_tail: AbstractContextManager[Any] = cuda.stream(self._tail)
        return on_tail

    def _finish(self) -> None:
        """The finisher's thread: wait for each micro-batch in turn."""
        try:
            if self._device.type == "cuda":
                cuda.set_device(self._device)
            while (pending := self._launched.get()) is not None:
                if pending.event is not None:
                    pending.event.synchronize()
                else:
                    for work in pending.works:
                        work.wait()
                tokens = None if pending.tokens is None else pending.tokens.tolist()
                self._under_way.popleft()
                self._on_done(pending.number, tokens)
        except Exception as error:
            self._on_failure(error)
