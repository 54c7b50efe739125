"""The load: what it sends, what it measures, and what it keeps of requests that fail."""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loopback import loopback

from nsysk3.launch import load as load_module
from nsysk3.launch.load import run_load, token_ids
from nsysk3.launch.load_record import Outcome, make_record, percentile

# As SGLang 0.5.17 to 0.5.23 write them with --output-details.
FIELDS = [
    *"""
tag backend dataset_name request_rate max_concurrency sharegpt_output_len random_input_len random_output_len
random_range_ratio server_info duration completed total_input_tokens total_output_tokens request_throughput
input_throughput output_throughput total_throughput concurrency max_concurrent_requests max_output_tokens_per_s
input_lens output_lens ttfts itls generated_texts errors
""".split(),  # noqa: SIM905 - as the facts have them
    *(
        f"{kind}_{what}_ms"
        for kind in ("mean", "median", "std", "p90", "p95", "p99")
        for what in ("e2e_latency", "ttft", "tpot", "itl")
    ),
]
SMALL: dict[str, Any] = {"input_len": 64, "output_len": 1, "seed": 3, "timeout_s": 20}


def outcomes() -> st.SearchStrategy[list[Outcome]]:
    seconds = st.floats(0.001, 1000)
    one = st.builds(
        Outcome,
        sent_s=seconds,
        input_len=st.integers(1, 20_000),
        ttft_s=seconds,
        latency_s=seconds,
        output_len=st.integers(1, 5),
        error=st.sampled_from(["", "", "", "HTTP 500"]),
    )
    return st.lists(one, min_size=1, max_size=30)


def record_of(requests: list[Outcome]) -> dict[str, Any]:
    return make_record(requests, input_len=64, output_len=1, concurrency=4, request_rate=None, seed=1, began_ns=0)


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=40), st.floats(0, 1))
def test_percentiles_are_numpys(values: list[float], share: float) -> None:
    assert math.isclose(percentile(values, share), np.quantile(values, share), rel_tol=1e-9, abs_tol=1e-6)


@given(outcomes())
def test_a_record_adds_up(requests: list[Outcome]) -> None:
    record = record_of(requests)
    good = [each for each in requests if not each.error]
    assert record["completed"] == len(good) == sum(not error for error in record["errors"])
    assert record["total_input_tokens"] == sum(each.input_len for each in good)
    if record["duration"]:
        assert math.isclose(record["input_throughput"] * record["duration"], record["total_input_tokens"])
        assert math.isclose(
            record["total_throughput"], record["input_throughput"] + record["output_throughput"], abs_tol=1e-9
        )
    assert 1 <= record["max_concurrent_requests"] <= len(requests)
    if good:
        ttfts = [1000 * each.ttft_s for each in good if each.ttft_s is not None]
        assert math.isclose(record["mean_ttft_ms"], statistics.fmean(ttfts), rel_tol=1e-9)
        assert math.isclose(record["std_ttft_ms"], statistics.pstdev(ttfts), rel_tol=1e-6, abs_tol=1e-6)
    else:  # nobody can know it: null, not 0
        assert record["mean_ttft_ms"] is None is record["p95_e2e_latency_ms"]


def test_a_prompt_is_the_same_every_time_and_like_no_other() -> None:
    prompts = [tuple(token_ids(seed, index, 200)) for seed in range(3) for index in range(20)]
    assert len(set(prompts)) == len(prompts)
    assert prompts == [tuple(token_ids(seed, index, 200)) for seed in range(3) for index in range(20)]
    assert all(10 <= token < 32_000 for prompt in prompts for token in prompt)


def test_a_closed_loop_keeps_its_concurrency_and_measures_the_first_token(tmp_path: Path) -> None:
    counts: list[int] = []
    with loopback("--speed", "2000") as server:
        result = run_load(server.url, **SMALL | {"output_len": 3}, concurrency=4, requests=30, on_done=counts.append)
    record = result.record
    assert set(FIELDS) <= set(record)
    assert (result.completed, result.errors) == (30, [])
    assert counts == list(range(1, 31))
    assert record["max_concurrent_requests"] == 4
    assert record["input_lens"] == [64] * 30
    assert record["output_lens"] == [3] * 30
    assert all(0 < ttft <= latency for ttft, latency in zip(record["ttfts"], record["latencies"], strict=True))
    assert all(len(gaps) == 2 for gaps in record["itls"])
    assert record["start_times"] == sorted(record["start_times"])
    result.write(tmp_path / "load.jsonl")
    (line,) = (tmp_path / "load.jsonl").read_text().splitlines()
    assert json.loads(line) == record


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("http-500", "HTTP 500: Internal Server Error"),
        ("disconnect", "RemoteProtocolError"),
        ("sse-error", "the input is too long"),
        ("abort", "aborted by the server: queue full"),
    ],
)
def test_what_fails_is_kept_with_its_reason_and_the_others_go_on(fault: str, said: str) -> None:
    with loopback("--speed", "2000", "--fault", f"{fault}=3") as server:
        result = run_load(server.url, **SMALL, concurrency=2, requests=12)
    record = result.record
    assert (result.completed, len(result.errors)) == (8, 4)
    assert all(said in error for error in result.errors)
    failed = [index for index, error in enumerate(record["errors"]) if error]
    assert all(record["ttfts"][index] is None and record["output_lens"][index] == 0 for index in failed)
    assert record["total_input_tokens"] == 8 * 64


def test_a_request_without_an_answer_ends_at_its_limit() -> None:
    with loopback("--speed", "2000", "--fault", "no-answer=4") as server:
        result = run_load(server.url, **SMALL | {"timeout_s": 0.3}, concurrency=4, requests=4)
    assert result.errors == ["not answered within 0.3 s"]


def test_a_server_that_is_not_there_fails_every_request() -> None:
    result = run_load("http://127.0.0.1:9", **SMALL, concurrency=2, requests=4)
    assert (result.completed, result.input_tps) == (0, None)
    assert len(result.errors) == 4
    assert all("Connect" in error for error in result.errors)


def test_requests_under_way_are_given_up_once_their_server_is_lost() -> None:
    lost: list[str] = []
    with loopback("--speed", "2000", "--fault", "no-answer=5") as server:
        result = run_load(
            server.url,
            **SMALL,
            concurrency=1,
            requests=20,
            on_done=lambda count: lost.append("node2 died") if count == 4 else None,
            lost=lambda: lost[0] if lost else None,
        )
    assert result.completed >= 4  # it may have been noticed before the fifth was sent
    assert result.errors in ([], ["node2 died"])
    assert len(result.record["errors"]) <= 5


def test_it_can_be_told_to_send_no_more() -> None:
    enough = threading.Event()
    with loopback("--speed", "2000") as server:
        result = run_load(
            server.url,
            **SMALL,
            concurrency=3,
            requests=500,
            stop=enough.is_set,
            on_done=lambda count: enough.set() if count == 10 else None,
        )
    assert 10 <= result.completed <= 12
    assert result.errors == []


class Pressed(BaseException):
    """What a handler of Ctrl-C raises."""


def test_an_interruption_ends_a_load_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def handler(*_: object) -> None:
        raise Pressed

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with loopback("--speed", "2000", "--fault", "no-answer=1") as server:
            sent = load_module._Load.request

            async def request(self: Any, *given: Any) -> None:
                os.kill(os.getpid(), signal.SIGUSR1)  # the server has it and will never answer
                await sent(self, *given)

            monkeypatch.setattr(load_module._Load, "request", request)
            with pytest.raises(Pressed):
                run_load(server.url, **SMALL, concurrency=1, requests=1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not [thread for thread in threading.enumerate() if thread.name == "nsysk3-load" and thread.is_alive()]


def test_a_rate_spreads_the_requests() -> None:
    with loopback("--speed", "2000") as server:
        result = run_load(server.url, **SMALL, concurrency=8, requests=6, request_rate=50)
    starts = result.record["start_times"]
    assert all(start >= index / 50 for index, start in enumerate(starts))
    assert result.record["request_rate"] == 50
