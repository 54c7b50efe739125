"""How the torch workload packs prompts into micro-batches, and what its command line takes."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsysk3.errors import InputError
from nsysk3.workload.options import Options, parse
from nsysk3.workload.scheduler import MicroBatch, Request, Scheduler
from nsysk3.workload.shape import SCALES


def packed(batch: MicroBatch | None) -> list[tuple[int, int, int]]:
    assert batch is not None
    return [(piece.rid, piece.start, piece.count) for piece in batch.pieces]


def scheduler_of(*lengths: int, depth: int = 2, requests: int = 8, new: int = 1) -> tuple[Scheduler, list[Request]]:
    scheduler = Scheduler(chunk=10, requests_a_batch=requests, running=8, depth=depth)
    made = [Request(rid, range(length), new) for rid, length in enumerate(lengths)]
    for request in made:
        scheduler.add(request)
    return scheduler, made


def test_a_cut_prompt_leads_the_next_micro_batch_and_need_not_have_come_back() -> None:
    scheduler, _ = scheduler_of(4, 13, 9, depth=4)
    batches = [scheduler.next() for _ in range(3)]
    assert [packed(batch) for batch in batches] == [[(0, 0, 4), (1, 0, 6)], [(1, 6, 7), (2, 0, 3)], [(2, 3, 6)]]
    assert [batch.slot for batch in batches if batch] == [0, 1, 2]
    assert list(batches[1].ids) == [*range(6, 13), 0, 1, 2]  # type: ignore[union-attr]
    assert scheduler.next() is None


def test_no_more_is_under_way_than_told() -> None:
    scheduler, (request,) = scheduler_of(50, depth=2)
    first, second = scheduler.next(), scheduler.next()
    assert first is not None
    assert second is not None
    assert scheduler.next() is None
    scheduler.done(1, [0])
    assert packed(scheduler.next()) == [(0, 20, 10)]
    assert request.output == []  # a cut prompt has no answer yet


def test_no_more_requests_share_a_micro_batch_than_told() -> None:
    scheduler, _ = scheduler_of(1, 1, 1, requests=2)
    assert packed(scheduler.next()) == [(0, 0, 1), (1, 0, 1)]
    assert packed(scheduler.next()) == [(2, 0, 1)]


def test_prefill_goes_before_decode_and_state_is_freed() -> None:
    scheduler, (first,) = scheduler_of(3, new=2)
    assert packed(scheduler.next()) == [(0, 0, 3)]
    scheduler.done(1, [77])
    assert first.output == [77]
    second = Request(5, range(4), 1)
    scheduler.add(second)
    assert packed(scheduler.next()) == [(5, 0, 4)]
    batch = scheduler.next()
    assert (packed(batch), batch.mode, list(batch.ids)) == ([(0, 3, 1)], "decode", [77])  # type: ignore[union-attr]
    assert batch.pieces[0].capacity == 4  # type: ignore[union-attr]
    scheduler.done(2, [1])
    scheduler.done(3, [2])
    assert (first.finished, second.finished) == (True, True)
    scheduler.add(Request(9, range(2), 1))
    assert sorted(scheduler.next().free) == [0, 5]  # type: ignore[union-attr]


def test_a_cancelled_request_gives_way_once_nothing_of_it_is_under_way() -> None:
    scheduler, (request, waiting) = scheduler_of(25, 5)
    assert packed(scheduler.next()) == [(0, 0, 10)]
    scheduler.cancel(request)
    batch = scheduler.next()
    assert (packed(batch), batch.free) == ([(1, 0, 5)], ())  # type: ignore[union-attr]
    scheduler.done(1, [1])
    scheduler.done(2, [1])
    assert (request.output, waiting.output) == ([], [1])
    scheduler.add(Request(7, range(2), 1))
    assert sorted(scheduler.next().free) == [0, 1]  # type: ignore[union-attr]


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 3)), min_size=1, max_size=12),
    st.integers(1, 12), st.integers(1, 4), st.integers(1, 5), st.integers(1, 4),
)  # fmt: skip
def test_every_token_is_run_once_in_order_and_limits_hold(
    wanted: list[tuple[int, int]], chunk: int, requests: int, running: int, depth: int
) -> None:
    scheduler = Scheduler(chunk=chunk, requests_a_batch=requests, running=running, depth=depth)
    made = [Request(rid, range(length), new) for rid, (length, new) in enumerate(wanted)]
    for request in made:
        scheduler.add(request)
    seen: dict[int, int] = {}
    under_way: list[MicroBatch] = []
    held: set[int] = set()
    while (batch := scheduler.next()) is not None or under_way:
        if batch is None:
            done = under_way.pop(0)
            scheduler.done(done.number, [1000 + piece.rid for piece in done.pieces])
            continue
        under_way.append(batch)
        held -= set(batch.free)
        for piece in batch.pieces:
            assert piece.start == seen.get(piece.rid, 0)
            seen[piece.rid] = piece.start + piece.count
            assert seen[piece.rid] <= piece.capacity
            held.add(piece.rid)
        assert batch.tokens == len(batch.ids) <= max(chunk, requests if batch.mode == "decode" else 0)
        assert len(batch.pieces) <= requests
        assert len(under_way) <= depth
        assert len(held) <= running
    assert [request.output for request in made] == [[1000 + rid] * new for rid, (_, new) in enumerate(wanted)]


def test_a_command_line_of_sglang_is_understood(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    given = "--tensor-parallel-size 4 --pp-size=2 --ep 2 --mem-fraction-static 0.8 --disable-radix-cache --scale small"
    options = parse(given.split())
    assert (options.tp_size, options.pp_size, options.ep_size, options.scale) == (4, 2, 2, "small")
    assert "--mem-fraction-static 0.8 --disable-radix-cache" in caplog.text
    assert Options(**options.document()) == options
    assert parse(["--imbalance", "1.5@0"]).imbalance_factor == 1.5


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--tp-size 3", "96 attention heads do not divide by --tp-size 3|shared experts|columns|vocabulary"),
        ("--tp-size 4 --ep-size 3", "--tp-size 4 do not divide by --ep-size 3"),
        ("--tp-size 2 --nnodes 4", "--tp-size 2 x --pp-size 1 ranks do not divide by --nnodes 4"),
        ("--pp-size 9", "--pp-size 9: more stages than the model's 8 layers"),
        ("--pp-size 2 --nnodes 2", "--dist-init-addr HOST:PORT"),
        ("--imbalance 2", "FACTOR@STAGE"),
        ("--imbalance 2@1", "a factor of at least 1 at a stage from 0 to 0"),
        ("--chunked-prefill-size 0", "must be at least 1"),
        ("--scale huge", "invalid choice"),
        ("--layers none", "invalid int value"),
    ],
)
def test_what_cannot_be_laid_out_is_refused(arguments: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        parse(arguments.split())


@given(st.sampled_from(list(SCALES)), st.integers(1, 93), st.integers(1, 16))
def test_stages_divide_the_layers_as_sglang_does(scale: str, layers: int, stages: int) -> None:
    shape = dataclasses.replace(SCALES[scale], layers=layers)
    held = [shape.stage(stage, stages) for stage in range(stages)]
    assert [layer for stage in held for layer in stage] == list(range(layers))
    sizes = [len(stage) for stage in held]
    assert sizes == sorted(sizes)  # what is left over goes to the last stages
    assert max(sizes) - min(sizes) <= 1


def test_k3_at_eight_stages() -> None:
    shape = SCALES["k3"]
    assert [shape.stage(stage, 8).stop for stage in range(8)] == [11, 22, 33, 45, 57, 69, 81, 93]
    assert [shape.bank_rows(shape.stage(stage, 8).stop) for stage in range(8)] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert sum(shape.is_mla(layer) for layer in range(93)) == 24
