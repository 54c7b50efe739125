"""Hand-over through shared memory: slots and flags, with a thread for each stage in place of a GPU."""

from __future__ import annotations

import random
import threading
import time

import pytest

torch = pytest.importorskip("torch", reason="the operations need PyTorch")

from ops_cases import BF16  # noqa: E402

from nsysk3.errors import InputError  # noqa: E402
from nsysk3.ops import put  # noqa: E402
from nsysk3.ops.boundary import Stage  # noqa: E402
from nsysk3.ops.links import Size, block  # noqa: E402

HIDDEN, CUTS, BLOCK = 8, [0, 4, 6, 10, 12], 3
SIZES = [5, 1, 9, 7, 3, 9, 2]
STAGES = [Stage.of(CUTS, number, BLOCK) for number in range(4)]
LIMIT_S = 60


class Wires:
    """What ranks share: buffers, and flags as (rank that is told, channel, rank that tells)."""

    def __init__(self, count: int) -> None:
        self.buffers = [torch.full((count,), float("nan"), dtype=BF16) for _ in STAGES]
        self.flags: set[tuple[int, int, int]] = set()
        self.changed, self.broken = threading.Condition(), False

    def turn(self, flag: tuple[int, int, int], up: bool) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.broken or (flag in self.flags) is not up, LIMIT_S)
            assert (flag in self.flags) is not up, "waited in vain"
            (self.flags.add if up else self.flags.remove)(flag)
            self.changed.notify_all()

    def give_up(self) -> None:
        with self.changed:
            self.broken = True
            self.changed.notify_all()


class Handle:
    """Torch's handle of symmetric memory, as one rank has it."""

    def __init__(self, me: int, wires: Wires) -> None:
        self.me, self.wires = me, wires

    def get_buffer(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, start: int) -> torch.Tensor:
        count = torch.Size(shape).numel()
        assert start + count <= self.wires.buffers[rank].numel()
        return self.wires.buffers[rank][start : start + count].view(shape)

    def put_signal(self, rank: int, channel: int, timeout_ms: int) -> None:
        self.wires.turn((rank, channel, self.me), up=True)

    def wait_signal(self, rank: int, channel: int, timeout_ms: int) -> None:
        self.wires.turn((self.me, channel, rank), up=False)


def memories(depth: int) -> list[put.Memory]:
    size, most = Size(HIDDEN, BF16, torch.device("cpu")), max(stage.slots for stage in STAGES)
    wires = Wires(put.Memory(None, None, size, max(SIZES), most, depth).slot_numbers * depth)
    return [put.Memory(Handle(me, wires), None, size, max(SIZES), most, depth) for me in range(4)]


def batch(index: int, stage: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Head and bank rows [R, T, H] that ``stage`` hands over."""
    g = torch.Generator().manual_seed(index)
    rows = torch.randn(4, SIZES[index], HIDDEN, generator=g).to(BF16)
    return (rows[0] + stage).to(BF16), rows[: STAGES[stage].slots]


def run_stage(me: int, links: put.Near, relay: bool, depth: int, jitter: random.Random) -> int:
    stage, coming = STAGES[me], []
    relays = stage.inherited if relay else 0
    for index, size in enumerate(SIZES):
        time.sleep(jitter.random() * 2e-3)
        bank = torch.empty(stage.slots, size, HIDDEN, dtype=BF16).transpose(0, 1)
        if links.incoming:
            while len(coming) < min(len(SIZES), index + depth):
                coming.append(links.incoming.expect(SIZES[len(coming)]))
            arrived = coming[index]
            arrived.rows()
            bank = arrived.bank
            if links.outgoing and relays:
                links.outgoing.relay(block(bank, 0, relays), size)
            arrived.rest()
            head, rows = batch(index, me - 1)
            time.sleep(jitter.random() * 2e-3)  # whoever wrote too early has done so by now
            assert torch.equal(arrived.head, head)
            assert torch.equal(block(bank, 0, stage.inherited), rows)
        head, rows = batch(index, me)
        bank[:, stage.inherited :] = rows[stage.inherited :].transpose(0, 1)
        if links.outgoing:
            links.outgoing.hand_over(block(bank, relays, stage.slots), head)
        if links.incoming:
            arrived.release()
    return links.outgoing.bytes_sent if links.outgoing else 0


def run_all(relay: bool, depth: int) -> list[object]:
    """What each stage has sent, or what went wrong there."""
    results: list[object] = [None] * 4
    shared = memories(depth)

    def stage(me: int) -> None:
        try:
            links = put.make_links(shared[me], me, STAGES, relay)
            results[me] = run_stage(me, links, relay, depth, random.Random(me))
        except BaseException as error:
            results[me] = error
            shared[me].handle.wires.give_up()

    threads = [threading.Thread(target=stage, args=(me,), daemon=True) for me in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    return results


@pytest.mark.parametrize("relay", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_what_arrives_is_what_was_sent(relay: bool, depth: int) -> None:
    row = HIDDEN * 2 * sum(SIZES)
    assert run_all(relay, depth) == [row * (stage.slots + 1) for stage in STAGES[:3]] + [0]


@pytest.mark.parametrize("flag", [put._READY, put._FREE])
def test_every_flag_is_needed(flag: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("hear", "tell"):
        does = getattr(put.Memory, name)
        monkeypatch.setattr(put.Memory, name, lambda *args, does=does: args[-1] == flag or does(*args))
    assert any(isinstance(each, AssertionError) for each in run_all(True, 2))


def test_no_more_are_expected_than_there_are_slots() -> None:
    landing = put.make_links(memories(2)[1], 1, STAGES, True).incoming
    assert landing is not None
    first, second = landing.expect(3), landing.expect(3)
    with pytest.raises(InputError):
        landing.expect(3)
    with pytest.raises(InputError):
        second.release()
    first.release()
    assert landing.expect(3).head.data_ptr() == first.head.data_ptr()


def test_stages_of_one_host() -> None:
    hosts = ["a", "b", "b", "b", "a", "a"]
    assert [put.run_of(number, hosts) for number in range(6)] == [(0, 1), (1, 4), (1, 4), (1, 4), (4, 6), (4, 6)]
