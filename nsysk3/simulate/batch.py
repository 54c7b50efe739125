"""Kernels of one step on the ranks of one stage, with their true times."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nsysk3.simulate.layers import NEXT_STREAM, P2P, PREVIOUS_STREAM, Slot, Slots, columns

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# Of one launch call, and from its return to the kernel's start.
API_NS, LATENCY_NS = 6_500, 3_000
# Launches that CUDA lets a stream be behind the host.
_QUEUE = 1_000


@dataclass
class Batch:
    """Kernels of one kind of step: ``slots`` on every rank of a stage, times [rank, slot] in true ns.

    ``wait``: how much of each kernel was spent waiting.  ``instance``: which instance of its communicator each slot is
    of (the same on all its ranks).  ``peer``: the stage at the other side of a hand-over, which this one ``sends`` or
    receives.  ``body``: the forward itself, not its boundary.
    """

    stage: int
    forward: int
    slots: Slots
    start: Ints
    end: Ints
    launch: Ints
    wait: Ints
    instance: Ints
    peer: int | None = None
    sends: bool = False
    body: bool = False


def message_batches(
    source: int, target: int, forward: int, sizes: tuple[int, int], send: list[tuple[Floats, Floats]],
    recv: list[tuple[Floats, Floats]], offered: Floats, posted: Floats, instance: Ints, purpose: str,
) -> list[Batch]:  # fmt: skip
    """Both sides of one hand-over as batches; ``offered``, ``posted``: when the first send and receive are launched."""
    (s0, s1), (r0, r1) = (
        [np.rint(np.stack(side, axis=1)).astype(np.int64) for side in zip(*half, strict=True)] for half in (send, recv)
    )
    send_wait = np.clip(r0 - s0, 0, s1 - s0)
    recv_wait = np.clip(s0 - r0, 0, r1 - r0)
    slots = [
        columns([Slot("sendrecv", 0, 0, stream, role=P2P, purpose=purpose, bytes=size) for size in sizes])
        for stream in (NEXT_STREAM, PREVIOUS_STREAM)
    ]
    send_launch, recv_launch = (
        np.stack([first, np.minimum(first + 60_000, start[:, 1] - API_NS - LATENCY_NS)], axis=1)
        for first, start in ((np.rint(offered).astype(np.int64), s0), (np.rint(posted).astype(np.int64), r0))
    )
    return [
        Batch(source, forward, slots[0], s0, s1, send_launch, send_wait, instance, peer=target, sends=True),
        Batch(target, forward, slots[1], r0, r1, recv_launch, recv_wait, instance, peer=source),
    ]


def behind_queue(launch: Floats, start: Floats, host_ns: Floats) -> Floats:
    """Launch times, held back where the stream is so far behind that CUDA makes the host wait."""
    count = launch.shape[1]
    if count <= _QUEUE:
        return launch
    held = launch.copy()
    held[:, _QUEUE:] = np.maximum(held[:, _QUEUE:], start[:, :-_QUEUE])
    pace = np.cumsum(host_ns)
    return np.maximum.accumulate(held - pace, axis=1) + pace
