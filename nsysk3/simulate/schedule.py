"""When everything runs: micro-batches through stages, each kernel of each rank, on true time.

A stage's forward is one stream of kernels.  Ranks of a TP group meet at every collective: each arrives when its own
work lets it, the last one starts the transfer, and all end together but for a few microseconds.  Between stages every
rank sends its slice to its counterpart; a receive is posted when the rank's previous forward is done and spins until
the sender has sent, a send spins until the receive is there.  The last stage's result (8 bytes) goes back to the first,
which may be only so many micro-batches ahead of it.  A rank's host is one thread: it makes one call after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from nsysk3.simulate.batch import API_NS, LATENCY_NS, Batch, behind_queue, message_batches
from nsysk3.simulate.config import MIB, Config, layer_split
from nsysk3.simulate.layers import (
    ALL_GATHER,
    ALLREDUCE,
    COPY,
    COPY_STREAM,
    GAP_NS,
    P2P,
    REDUCE_SCATTER,
    RESULT_STREAM,
    SCHEDULE_STREAM,
    Slot,
    Slots,
    boundary_bytes,
    columns,
    forward_slots,
)
from nsysk3.simulate.noise import spread

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

RESULT_BYTES = 8
_POSTED_AFTER_NS = 250_000
_SMALL_TRANSFER_NS = 4_000
# With the overlap scheduler (PP1) the host launches the next forward this long before the GPU is free.
_AHEAD_NS = 20_000_000
# The range around a forward outlasts its last launch by the first; an NCCL group opens before its launch by the second.
_RANGE_TAIL_NS, _GROUP_LEAD_NS = 40_000, 10_000


@dataclass
class _Stage:
    """Where a stage's ranks are: when stream, host and send stream are free, and the send that nobody took yet.

    ``host``: when the forward's launches are made, which decides what comes next; ``called``: when the last call of
    any kind returns, before which the thread can make no other.
    """

    free: Floats
    host: Floats
    called: Floats
    sending: Floats
    forward_end: Floats
    reductions: int = 0
    gathers: int = 0
    messages: int = 0


@dataclass
class Schedule:
    """Runs the pipeline of ``config`` and gives its kernels, batch by batch, in bounded memory."""

    config: Config
    rng: np.random.Generator
    stages: list[_Stage] = field(default_factory=list)
    # Per micro-batch: when the last stage's ranks sent its result, and when the first stage had it.
    sent: dict[int, Floats] = field(default_factory=dict)
    returned: dict[int, Floats] = field(default_factory=dict)
    result_free: Floats = field(default_factory=lambda: np.zeros(0))
    factors: Floats = field(default_factory=lambda: np.ones((0, 0)))

    def batches(self) -> Iterator[Batch]:
        """Every kernel of the run."""
        config = self.config
        begin = float(config.idle_before_ns)
        zero = np.full(config.tp, begin)
        self.stages = [
            _Stage(zero.copy(), zero.copy(), zero.copy(), zero.copy(), zero.copy()) for _ in range(config.pp)
        ]
        self.result_free = zero.copy()
        for forward in range(config.forwards):
            for stage in range(config.pp):
                if stage == 0:
                    ready, host = self._admit(forward)
                else:
                    ready, host, moved = self._hand_over(stage, forward)
                    yield from moved
                yield self._copies(stage, forward, host)
                yield self._forward(stage, forward, ready, host)
                if stage == config.pp - 1 and stage > 0:
                    yield self._send_result(forward)
                if stage == 0 and config.pp > 1:
                    yield from self._take_results(forward - config.window_of_results + 1, drain=False)
        if config.pp > 1:
            for forward in range(max(0, config.forwards - config.window_of_results + 1), config.forwards):
                yield from self._take_results(forward, drain=True)

    # --- one stage

    def _jitter(self, most_ns: float) -> Floats:
        return self.rng.uniform(0, most_ns, self.config.tp)

    def _admit(self, forward: int) -> tuple[Floats, Floats]:
        """When the first stage's GPUs are free for a micro-batch, and when its hosts begin to launch it."""
        state = self.stages[0]
        ahead = _AHEAD_NS if self.config.pp == 1 else -200_000
        host = np.maximum(state.host + 300_000, state.free - ahead)
        back = self.returned.pop(forward - self.config.window_of_results, None)
        if back is not None:
            host = np.maximum(host, back + 100_000)
        return state.free, _after_calls(state, host + self._jitter(40_000))

    def _forward(self, stage: int, forward: int, ready: Floats, host: Floats) -> Batch:
        """One micro-batch on one stage; the only place where compute gets its times."""
        config, state = self.config, self.stages[stage]
        slots = forward_slots(config, stage)
        meets = np.flatnonzero(np.isin(slots.role, (ALLREDUCE, REDUCE_SCATTER, ALL_GATHER)))
        edges = [0, *(int(at) + 1 for at in meets), len(slots)]
        segment = np.searchsorted(meets, np.arange(len(slots)))
        sigma = config.machine.compute_spread
        noise = np.clip(self.rng.normal(0, sigma, (config.tp, len(edges))), -3 * sigma, 3 * sigma)
        spent = slots.ns * (1 + noise[:, segment]) * self.factors[stage][:, None]
        transfer = self._transfers(slots, meets, forward)
        launch = host[:, None] + np.cumsum(slots.host_ns)
        start, end = np.empty_like(spent), np.empty_like(spent)
        base = ready.copy()
        for number, (first, stop) in enumerate(pairwise(edges)):
            here = slice(first, stop)
            before = np.cumsum(spent[:, here] + GAP_NS, axis=1) - spent[:, here]
            # A kernel runs when the one before it is done and its launch has come through.
            late = launch[:, here] + (API_NS + LATENCY_NS) - before
            begun = before + np.maximum(base[:, None], np.maximum.accumulate(late, axis=1))
            start[:, here], end[:, here] = begun, begun + spent[:, here]
            if number < len(meets):
                base = begun[:, -1].max() + transfer[number] + self._jitter(config.machine.end_spread_ns)
                end[:, stop - 1] = base
            elif stop > first:
                base = end[:, stop - 1]
        begun, done = np.rint(start).astype(np.int64), np.rint(end).astype(np.int64)
        wait = np.zeros_like(begun)
        wait[:, meets] = np.clip(begun[:, meets].max(axis=0) - begun[:, meets], 0, (done - begun)[:, meets])
        launched = behind_queue(launch, start, slots.host_ns)
        state.free = state.forward_end = base
        state.host = launched[:, -1] + API_NS
        state.called = state.host + _RANGE_TAIL_NS
        return Batch(stage, forward, slots, begun, done, np.rint(launched).astype(np.int64), wait,
                     self._instances(state, slots), body=True)  # fmt: skip

    def _instances(self, state: _Stage, slots: Slots) -> Ints:
        instance = np.full(len(slots), -1, np.int64)
        for role, name in ((ALLREDUCE, "reductions"), (ALL_GATHER, "gathers"), (REDUCE_SCATTER, "reductions")):
            mine = np.flatnonzero(slots.role == role)
            instance[mine] = getattr(state, name) + np.arange(len(mine))
            setattr(state, name, getattr(state, name) + len(mine))
        return instance

    def _transfers(self, slots: Slots, meets: Ints, forward: int) -> Floats:
        sizes = slots.bytes[meets].astype(np.float64)
        role = slots.role[meets]
        # A gather or a scatter states one rank's share and moves half of what a reduction of the whole does.
        sizes = np.where(role == ALLREDUCE, sizes, sizes * self.config.tp / 2)
        machine = self.config.machine
        wire = (machine.allreduce_128mib_ns - machine.latency_ns) / (128 * MIB)
        mean = machine.latency_ns + sizes * wire
        return mean * spread(slots.purpose[meets], machine.allreduce_spread, forward, self.rng)

    def _copies(self, stage: int, forward: int, host: Floats) -> Batch:
        """Token ids to the GPU, and a counter cleared: copies that run before the forward's first kernel."""
        slots = _COPIES
        launch = host[:, None] + np.array([0.0, 10_000.0])
        start = launch + API_NS + LATENCY_NS
        end = start + np.array([2_400.0, 800.0])
        zeros = np.zeros(start.shape, np.int64)
        begun, done, launched = (np.rint(times).astype(np.int64) for times in (start, end, launch))
        return Batch(stage, forward, slots, begun, done, launched, zeros, np.full(len(slots), -1, np.int64))

    # --- between stages

    def _hand_over(self, stage: int, forward: int) -> tuple[Floats, Floats, list[Batch]]:
        """Move a micro-batch's activations to ``stage``: when its GPUs can begin, its hosts too, and the kernels."""
        config, sender, state = self.config, self.stages[stage - 1], self.stages[stage]
        sizes = boundary_bytes(config, stage - 1)
        local = self._same_host(stage - 1, stage)
        speed = config.machine.local_bytes_per_ns if local else config.machine.wire_bytes_per_ns
        # The receiver learns of the message when the sender's host has launched its forward.
        posted = np.maximum(np.maximum(state.free, sender.host + 50_000) + _POSTED_AFTER_NS, state.host + 100_000)
        posted = _after_calls(state, posted + self._jitter(60_000))
        taken = posted + API_NS + LATENCY_NS
        # A send is launched behind one that still spins, and begins when that one is done.
        offered = _after_calls(sender, sender.forward_end + 20_000 - API_NS - LATENCY_NS)
        given = np.maximum(offered + API_NS + LATENCY_NS, sender.sending + 2_000)
        send, recv = [], []
        for size in sizes:
            moved = np.maximum(given, taken) + config.machine.latency_ns + size / speed
            done = [moved + self._jitter(config.machine.end_spread_ns) for _ in range(2)]
            send.append((given, done[0]))
            recv.append((taken, done[1]))
            given, taken = done[0] + 2_000, done[1] + 2_000
        sender.sending = send[-1][1]
        instance = sender.messages + np.arange(2)
        sender.messages += 2
        batches = message_batches(stage - 1, stage, forward, sizes, send, recv, offered, posted, instance, "activation")
        sender.called, state.called = ((batch.launch[:, -1] + API_NS).astype(np.float64) for batch in batches)
        ready = recv[-1][1]
        host = posted + 220_000
        if config.tp > 1:
            gathered = self._gather(stage, forward, ready + 10_000, posted + 200_000, sizes)
            batches.append(gathered)
            ready, host = gathered.end[:, -1].astype(np.float64), posted + 320_000
        return np.maximum(ready + 5_000, state.free), host, batches

    def _gather(self, stage: int, forward: int, ready: Floats, host: Floats, sizes: tuple[int, int]) -> Batch:
        """The receivers put the slices of their TP group together."""
        slots = columns([
            Slot("all_gather", 0, 0, SCHEDULE_STREAM, role=ALL_GATHER, purpose="pp_gather", bytes=size)
            for size in sizes
        ])  # fmt: skip
        transfer = self._transfers(slots, np.arange(2), forward)
        launch = host[:, None] + np.array([0.0, 30_000.0])
        start, end = np.empty(launch.shape), np.empty(launch.shape)
        for number in range(2):
            start[:, number] = np.maximum(ready, launch[:, number] + API_NS + LATENCY_NS)
            end[:, number] = start[:, number].max() + transfer[number] + self._jitter(self.config.machine.end_spread_ns)
            ready = end[:, number] + GAP_NS
        begun, done = np.rint(start).astype(np.int64), np.rint(end).astype(np.int64)
        wait = np.clip(begun.max(axis=0) - begun, 0, done - begun)
        return Batch(stage, forward, slots, begun, done, np.rint(launch).astype(np.int64), wait,
                     self._instances(self.stages[stage], slots))  # fmt: skip

    def _send_result(self, forward: int) -> Batch:
        """The last stage sends the sampled token to the first; so small that it need not wait for the receive."""
        state = self.stages[-1]
        launch = _after_calls(state, state.forward_end + 30_000 - API_NS - LATENCY_NS)
        given = launch + API_NS + LATENCY_NS
        self.sent[forward] = np.rint(given)
        done = given + _SMALL_TRANSFER_NS + 2_000
        state.called = launch + API_NS
        slots = columns([Slot("sendrecv", 0, 0, RESULT_STREAM, role=P2P, purpose="result", bytes=RESULT_BYTES)])
        begun, ended, launched = (np.rint(x).astype(np.int64)[:, None] for x in (given, done, launch))
        state.free = np.maximum(state.free, done)
        return Batch(self.config.pp - 1, forward, slots, begun, ended, launched, np.zeros_like(begun),
                     np.array([forward]), peer=0, sends=True)  # fmt: skip

    def _take_results(self, forward: int, drain: bool) -> Iterator[Batch]:
        """The first stage's receive of a result: posted early, it spins beside the next forwards."""
        if forward < 0 or forward not in self.sent:
            return
        state = self.stages[0]
        # With nothing left to launch the host waits for each result before it asks for the next.
        posted = np.maximum(state.free, self.result_free) + 300_000 if drain else state.host + 60_000
        posted = _after_calls(state, posted)
        state.called = posted + API_NS
        taken = np.maximum(posted + API_NS + LATENCY_NS, self.result_free + 2_000)
        sent = self.sent.pop(forward)
        done = np.maximum(taken, sent) + _SMALL_TRANSFER_NS + self._jitter(1_000)
        self.result_free = done
        self.returned[forward] = done
        state.host = np.maximum(state.host, posted + 40_000)
        slots = columns([Slot("sendrecv", 0, 0, RESULT_STREAM, role=P2P, purpose="result", bytes=RESULT_BYTES)])
        begun, ended, launched = (np.rint(x).astype(np.int64)[:, None] for x in (taken, done, posted))
        wait = np.clip(sent.astype(np.int64)[:, None] - begun, 0, ended - begun)
        yield Batch(0, forward, slots, begun, ended, launched, wait, np.array([forward]), peer=self.config.pp - 1)

    def _same_host(self, one: int, other: int) -> bool:
        size = self.config.gpus_per_node
        return one * self.config.tp // size == other * self.config.tp // size


def _after_calls(state: _Stage, wanted: Floats) -> Floats:
    """When the hosts of a stage make a call that they want to make then: not before their last one has returned."""
    return np.maximum(wanted, state.called + _GROUP_LEAD_NS)


_COPIES = columns(
    [
        Slot("htod", 0, 0, COPY_STREAM, role=COPY, bytes=8192 * 8),
        Slot("memset", 0, 0, COPY_STREAM, role=COPY, bytes=4),
    ]
)


def last_kept_layer(config: Config, stage: int) -> int:
    """The first layer of the last forward whose records are lost, on a stage of a cut capture."""
    return layer_split(config.model.layers, config.pp)[stage].stop - config.cut_layers
