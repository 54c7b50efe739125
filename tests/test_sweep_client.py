"""The built-in load against SGLang's own serving benchmark: the same fields, the same times for the same stream.

The fields were read in SGLang 0.5.17 to 0.5.23, where they are the same.  With wheels in $NSYSK3_SGLANG_WHEELS both
are checked against the source of every version there: its function is run, on a stream and a clock of the test's.
"""

from __future__ import annotations
import __future__

import ast
import asyncio
import contextlib
import json
import os
import sys
import time
import traceback
import types
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from command import run
from loopback import SERVER, free_port

from nsysk3.launch.load import _Load
from nsysk3.launch.load_record import Outcome, make_record
from nsysk3.run.config import Load
from nsysk3.sweep.folder import Folder
from nsysk3.sweep.matrix import Cell, Layout
from nsysk3.sweep.repeat import repeat_row

FIELDS = [
    *("tag", "backend", "dataset_name", "request_rate", "max_concurrency", "sharegpt_output_len", "random_input_len"),
    *("random_output_len", "random_range_ratio", "server_info", "duration", "completed", "total_input_tokens"),
    *("total_input_text_tokens", "total_input_vision_tokens", "total_output_tokens", "total_output_tokens_retokenized"),
    *("request_throughput", "input_throughput", "output_throughput", "total_throughput", "concurrency"),
    *("accept_length", "max_output_tokens_per_s", "max_concurrent_requests", "input_lens", "output_lens", "ttfts"),
    *("itls", "generated_texts", "errors"),
    *(
        f"{share}_{what}_ms"
        for share in ("mean", "median", "std", "p90", "p95", "p99")
        for what in ("e2e_latency", "ttft", "tpot", "itl")
    ),
]
WHEELS = sorted(Path(os.environ.get("NSYSK3_SGLANG_WHEELS", "/nowhere")).glob("sglang-*.whl"))
# A prefill of 16k tokens, a reused connection; three tokens, two of them in one chunk.
STREAMS: dict[str, list[tuple[float, dict[str, Any] | None]]] = {
    "one token": [(13.47, {"text": "a", "meta_info": {"completion_tokens": 1, "prompt_tokens": 16384}})],
    "three tokens": [
        (0.25, {"text": "a", "meta_info": {"completion_tokens": 1, "prompt_tokens": 5}}),
        (0.5, {"text": "abc", "meta_info": {"completion_tokens": 3, "prompt_tokens": 5}}),
        (0.125, {"text": "abc", "meta_info": {"completion_tokens": 3, "prompt_tokens": 5}}),
    ],
}


def record_of(outcomes: list[Outcome]) -> dict[str, Any]:
    return make_record(
        outcomes, input_len=8, output_len=1, concurrency=2, request_rate=None, seed=1, began_ns=1
    )  # fmt: skip


@pytest.mark.parametrize("outcomes", [[], [Outcome(0.0, 8, 0.5, 0.6, 1)], [Outcome(0.0, 8, error="gone")]])
def test_built_in_record_has_every_field(outcomes: list[Outcome]) -> None:
    record = record_of(outcomes)
    assert [name for name in FIELDS if name not in record] == []
    json.dumps(record, allow_nan=False)


def test_a_row_is_made_of_either_record() -> None:
    """What SGLang's client adds nothing to and ours does makes no difference to results.csv."""
    ours = record_of([Outcome(0.0, 8, 0.5, 0.6, 1), Outcome(0.1, 8, 0.7, 0.9, 1)])
    theirs = {name: ours[name] for name in FIELDS}
    older = {name: value for name, value in theirs.items() if not name.startswith("p95")}
    cell = Cell(Layout(2, 1, 1), 2, 1)
    rows = [repeat_row(each, cell, requests=2, load=Load(client="sglang")) for each in (ours, theirs, older)]
    for row in rows:
        assert (row.status, row.completed, row.errors) == ("done", 2, 0)
        assert row.input_tps == rows[0].input_tps
        assert row.ttft_p95_ms == pytest.approx(rows[0].ttft_p95_ms)
    assert repeat_row(theirs, cell, requests=3, load=Load()).cause == "1 request did not complete"
    assert repeat_row({**theirs, "errors": ["", "boom"]}, cell, requests=2, load=Load()).cause == "boom"


@pytest.fixture(params=WHEELS or [None], ids=lambda wheel: wheel.name.split("-")[1] if wheel else "none")
def source(request: pytest.FixtureRequest) -> ast.Module:
    if request.param is None:
        pytest.skip("no wheel of SGLang in NSYSK3_SGLANG_WHEELS (pip download --no-deps sglang==0.5.23)")
    with zipfile.ZipFile(request.param) as wheel:
        return ast.parse(wheel.read("sglang/benchmark/serving.py"))


def test_fields_are_those_that_sglang_writes(source: ast.Module) -> None:
    found: set[str] = set()
    for node in ast.walk(source):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            names = {target.id for target in node.targets if isinstance(target, ast.Name)}
            if names & {"result", "result_details"}:
                found |= {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
    assert found == set(FIELDS)


class Clock:
    """A clock that only the stream moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


async def stream(clock: Clock, chunks: list[tuple[float, dict[str, Any] | None]]) -> AsyncIterator[dict[str, Any]]:
    for gap, document in chunks:
        clock.now += gap
        if document is not None:
            yield document


def ours(clock: Clock, chunks: list[tuple[float, dict[str, Any] | None]]) -> Outcome:
    outcome = Outcome(0.0, 1)
    load = _Load("http://x", 1, 1, 1, 60.0, lambda: False, None, None)
    asyncio.run(load.chunks(stream(clock, chunks), outcome, clock.now))
    return outcome


def theirs(source: ast.Module, clock: Clock, chunks: list[tuple[float, dict[str, Any] | None]]) -> Any:
    """What SGLang's own function makes of the stream, everything around it replaced."""
    wanted = ("async_request_sglang_generate", "_record_server_prompt_len")
    body = [node for node in source.body if getattr(node, "name", None) in wanted]
    assert any(getattr(node, "name", None) == wanted[0] for node in body)

    class Response:
        status, reason = 200, "OK"

        @property
        async def content(self) -> AsyncIterator[bytes]:
            async for document in stream(clock, chunks):
                yield b"data: " + json.dumps(document).encode()
                yield b"\n"
            yield b"data: [DONE]"

    @contextlib.asynccontextmanager
    async def post(**_: object) -> AsyncIterator[Response]:
        yield Response()

    @contextlib.asynccontextmanager
    async def session() -> AsyncIterator[types.SimpleNamespace]:
        yield types.SimpleNamespace(post=post)

    output = types.SimpleNamespace(itl=[], ttft=0.0, error="", prompt_len=0, latency=0.0)
    space: dict[str, Any] = {
        "time": types.SimpleNamespace(perf_counter=clock), "orjson": json, "sys": sys, "traceback": traceback,
        "_create_bench_client_session": session, "get_request_headers": dict, "_ROUTING_KEY_HEADER": "x",
        "RequestFuncOutput": types.SimpleNamespace(init_new=lambda _: output),
        "args": types.SimpleNamespace(
            temperature=0.0, disable_ignore_eos=False, top_p=1.0, disable_stream=False, return_logprob=False,
            return_routed_experts=False, logprob_start_len=-1, top_logprobs_num=0, token_ids_logprob=None,
        ),
    }  # fmt: skip
    flags = __future__.annotations.compiler_flag
    exec(compile(ast.Module(body, []), "serving.py", "exec", flags=flags), space)
    asked = types.SimpleNamespace(
        api_url="", prompt=[1], output_len=1, lora_name=None, extra_request_body={}, image_data=None, routing_key=None
    )
    asyncio.run(space["async_request_sglang_generate"](asked))
    assert output.error == ""
    return output


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "perf_counter", made)
    return made


@pytest.mark.parametrize("name", STREAMS)
def test_built_in_client_times_the_stream_as_told(name: str, clock: Clock) -> None:
    outcome = ours(clock, STREAMS[name])
    gaps = [gap for gap, _ in STREAMS[name]]
    assert outcome.ttft_s == pytest.approx(gaps[0])
    assert outcome.itl_s == pytest.approx([] if len(gaps) == 1 else [gaps[1] / 2] * 2)


@pytest.mark.parametrize("name", STREAMS)
def test_both_clients_time_a_stream_alike(source: ast.Module, name: str, clock: Clock) -> None:
    one, other = ours(clock, STREAMS[name]), theirs(source, clock, STREAMS[name])
    assert one.ttft_s == pytest.approx(other.ttft)
    assert one.itl_s == pytest.approx(other.itl)
    assert (one.output_len, one.text) == (other.output_len, other.generated_text)


STAND_IN = """
import json, sys
from nsysk3.launch.load import run_load
given = dict(zip(sys.argv[3:-1], sys.argv[4:]))
if sys.argv[2] != "sglang.bench_serving":
    sys.exit("No module named " + sys.argv[2])
result = run_load(
    given["--base-url"], input_len=int(given["--random-input-len"]), output_len=int(given["--random-output-len"]),
    concurrency=int(given["--max-concurrency"]), requests=int(given["--num-prompts"]), seed=int(given["--seed"]),
)
print("============ Serving Benchmark Result ============")
print(json.dumps({name: result.record.get(name) for name in FIELDS}))
"""


def test_sweep_with_the_other_client(tmp_path: Path) -> None:
    """SGLang's benchmark, under its older name, is a stand-in that writes SGLang's fields and no other."""
    program = tmp_path / "stand_in.py"
    program.write_text(f"FIELDS = {FIELDS!r}\n{STAND_IN}")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {program} "$@"\n')
    python.chmod(0o755)
    settings = tmp_path / "nsysk3.toml"
    settings.write_text(f"""
[cluster]
gpus_per_host = 2
port = {free_port()}
[server]
python = {json.dumps(str(python))}
command = {json.dumps([sys.executable, str(SERVER)])}
[load]
input_len = 64
chunk = 32
client = "sglang"
""")
    out = tmp_path / "out"
    ran = run(
        "sweep", "--config", settings, "--out", out, "--pp", 2, "--concurrency", 2, "--repeats", 2, "--requests", 3
    )
    assert ran.code == 0, ran.err
    rows = Folder(out).results()
    assert [(row.status, row.completed, row.client) for row in rows] == [("done", 3, "sglang.bench_serving")] * 2
    record = json.loads((out / str(rows[0].raw)).read_text())
    assert set(FIELDS) < set(record)
    assert rows[0].input_tps == pytest.approx(record["input_throughput"])
    assert "Serving Benchmark Result" in (out / "bench" / "pp2_tp1_ep1_c2_r1.txt").read_text()
