"""The torch workload as a server on the CPU: its endpoints, and that nothing of it outlives it."""

from __future__ import annotations

import json
import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from workload_server import SMALL, Launched, alive, prompt, wait_for

pytest.importorskip("torch", reason="the workload needs PyTorch")

CAPTURE = {"activities": ["CUDA_PROFILER"], "num_steps": 2}


def names_what_only_sglang_knows(server: Launched) -> None:
    assert "not used by the torch workload: --mem-fraction-static 0.8" in server.log


def says_what_it_is(server: Launched) -> None:
    assert server.call("/health")[0] == server.call("/health_generate")[0] == 200
    info = server.json("/server_info")
    assert info == server.json("/get_server_info") | {"internal_states": info["internal_states"]}
    expected = {
        "tp_size": 1, "pp_size": 2, "ep_size": 1, "nnodes": 1, "chunked_prefill_size": 32, "disable_radix_cache": True,
        "moe_runner_backend": "torch", "pp_async_batch_depth": 1, "pp_max_micro_batch_size": 32, "random_seed": 3,
        "device": "cpu", "mem_fraction_static": None,
    }  # fmt: skip
    assert {key: info[key] for key in expected} == expected
    state = info["internal_states"][0]
    assert state["world_size"] == 2
    assert [(each["rank"], each["pp"], each["layers"]) for each in state["ranks"]] == [(0, 0, 1), (1, 1, 1)]
    assert sorted(each["pid"] for each in state["ranks"]) == sorted(server.ranks)
    assert state["memory_usage"]["weight"] > 0
    assert state["memory_usage"]["peak"] is None  # nobody can know it on a CPU
    assert server.json("/get_model_info")["is_generation"] is True
    assert server.call("/flush_cache")[0] == 200
    assert server.call("/no_such_thing")[0] == 404


def answers_the_same_alone_in_a_list_streamed_and_under_load(server: Launched) -> None:
    bodies = [prompt(length, first) for length, first in ((70, 5), (3, 9), (33, 2), (64, 4))]
    alone = [server.json("/generate", body)["output_ids"] for body in bodies]
    listed = server.json("/generate", {**bodies[0], "input_ids": [body["input_ids"] for body in bodies]})
    assert [answer["output_ids"] for answer in listed] == alone
    assert all(answer["meta_info"]["finish_reason"] == {"type": "length", "length": 2} for answer in listed)
    with ThreadPoolExecutor(len(bodies)) as pool:
        assert [each["output_ids"] for each in pool.map(lambda body: server.json("/generate", body), bodies)] == alone
    *parts, end = server.events(bodies[0])
    assert end == "[DONE]"
    assert [json.loads(part)["output_ids"] for part in parts] == [alone[0][:1], alone[0]]
    assert json.loads(parts[0])["text"] == str(alone[0][0])
    assert json.loads(parts[0])["meta_info"]["prompt_tokens"] == 70


def refuses_in_words(server: Launched) -> None:
    for document, said in (
        ({}, "input_ids or text is needed"),
        ({"input_ids": []}, "not empty"),
        ({"input_ids": [40_000]}, "from 0 to 32767"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens 0"),
        ({"input_ids": [1] * 65_536}, "context is 65536"),
        ([1], "must be a JSON object"),
    ):
        status, body = server.call("/generate", document)
        assert (status, said in body) == (400, True), body


def ends_a_capture_after_its_steps(server: Launched) -> None:
    assert server.call("/start_profile", {"activities": ["GPU"]})[0] == 400
    assert server.call("/stop_profile", {})[0] == 500  # none is open
    assert server.call("/start_profile", CAPTURE)[0] == 200
    assert server.call("/start_profile", CAPTURE)[0] == 500
    server.json("/generate", prompt(64))
    wait_for(lambda: server.call("/start_profile", CAPTURE)[0] == 200, "the capture of two steps is still open")
    assert server.call("/stop_profile", {})[0] == 200


def ends_in_order_when_told(server: Launched) -> None:
    ranks = server.ranks
    assert len(ranks) == 2
    server.process.send_signal(signal.SIGTERM)
    assert server.exit_code() == 0
    assert not any(alive(pid) for pid in ranks)
    assert "Traceback" not in server.log


STEPS = (
    names_what_only_sglang_knows,
    says_what_it_is,
    answers_the_same_alone_in_a_list_streamed_and_under_load,
    refuses_in_words,
    ends_a_capture_after_its_steps,
    ends_in_order_when_told,
)


def test_one_server_from_start_to_end(tmp_path: Path) -> None:
    """Two stages of one layer, one micro-batch more than stages, and an option that only SGLang has."""
    extra = ("--layers", "2", "--pp-size", "2", "--pp-async-batch-depth", "1", "--mem-fraction-static", "0.8")
    server = Launched(tmp_path, *SMALL, *extra)
    try:
        server.ready()
        for step in STEPS:
            step(server)
    finally:
        server.kill()


def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        launched = Launched(tmp_path, *SMALL, "--port", str(taken.getsockname()[1]))
        assert launched.exit_code() == 4
    assert "address already in use" in launched.log
    assert "Traceback" not in launched.log


def test_a_rank_that_dies_ends_all(tmp_path: Path) -> None:
    launched = Launched(tmp_path, *SMALL, "--layers", "1", "--tp-size", "2").ready()
    first, second = launched.ranks
    os.kill(second, signal.SIGKILL)
    assert launched.exit_code() == 4
    assert f"rank 1 (stage 0, TP rank 1, process {second}) was killed by SIGKILL" in launched.log
    assert not alive(first)


def test_two_nodes_and_a_stage_that_is_stuck(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        meet = f"127.0.0.1:{free.getsockname()[1]}"
    common = (*SMALL, "--layers", "2", "--pp-size", "2", "--nnodes", "2", "--dist-init-addr", meet)
    nodes = [Launched(tmp_path, *common, "--watchdog-timeout", "6", "--node-rank", str(node)) for node in (0, 1)]
    try:
        nodes[0].ready()
        (first,), (second,) = (node.ranks for node in nodes)
        assert len(nodes[0].json("/generate", prompt(40))["output_ids"]) == 2
        os.kill(second, signal.SIGSTOP)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(nodes[0].call, "/generate", prompt(40))  # never answered
            assert nodes[0].exit_code() == 4
        assert "watchdog timeout" in nodes[0].log
        assert "most recent call first" in nodes[0].log  # where every thread was
        assert not alive(first)
        # Nobody can tell a stopped process to end; the launcher's death takes it along.
        nodes[1].process.kill()
        wait_for(lambda: not alive(second), "a rank outlived its launcher")
    finally:
        for node in nodes:
            node.kill()
