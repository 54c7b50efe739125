"""The built-in load: a closed loop of prefill requests that measures the first token of each.

Requests are token ids drawn from a seed, so a load is the same on every server and needs no tokenizer.  What comes back
has the field names of SGLang's own serving benchmark, so that whatever reads the one reads the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import threading
import time
from array import array
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from nsysk3.launch.load_record import LoadResult, Outcome, make_record

# Small enough for any vocabulary, past the special tokens at its beginning.
TOKEN_IDS = (10, 32_000)
# The first token of a request that waits in a queue can take minutes.
REQUEST_TIMEOUT_S = 1800.0
WATCH_S = 0.2
JSON = {"Content-Type": "application/json"}


def token_ids(seed: int, index: int, length: int) -> list[int]:
    """The prompt of request ``index`` of a load with this seed: always the same, and unlike any other's."""
    low, high = TOKEN_IDS
    numbers = array("H", random.Random(f"{seed}/{index}").randbytes(2 * length))  # many times faster than one by one
    return [low + number % (high - low) for number in numbers]


def run_load(
    url: str,
    *,
    input_len: int,
    output_len: int,
    concurrency: int,
    requests: int,
    seed: int,
    timeout_s: float = REQUEST_TIMEOUT_S,
    stop: Callable[[], object] | None = None,
    on_done: Callable[[int], None] | None = None,
    lost: Callable[[], str | None] | None = None,
    request_rate: float | None = None,
) -> LoadResult:
    """Send ``requests`` requests, ``concurrency`` at a time, and return what each one took.

    A request that fails is kept with its reason and never repeated.  The call returns when all sent requests have
    ended, and may be made from any thread; an exception raised in the waiting thread (Ctrl-C) ends the load at once.

    Args:
        url: the server, such as ``http://host:30000``; its ``/generate`` gets token ids and streams.
        input_len: tokens of each prompt.
        output_len: tokens to generate, end-of-sequence ignored.
        concurrency: requests in flight; a new one is sent when one ends.
        requests: how many in all.
        seed: of the prompts.
        timeout_s: limit of one request, from its sending to its last byte.
        stop: asked before each request; once it says true no more are sent.
        on_done: called (in another thread) with the number of requests that have ended.
        lost: asked a few times a second; once it names a reason, requests in flight are given up and none is sent.
        request_rate: requests a second at most, evenly spaced; None sends as fast as ``concurrency`` allows.
    """
    load = _Load(
        url.rstrip("/") + "/generate", input_len, output_len, seed, timeout_s, stop or (lambda: False), on_done, lost
    )
    _in_thread(lambda: load.run(concurrency, requests, request_rate))
    return LoadResult(
        make_record(
            load.outcomes,
            input_len=input_len,
            output_len=output_len,
            concurrency=concurrency,
            request_rate=request_rate,
            seed=seed,
            began_ns=load.began_ns,
        )
    )


def _in_thread(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine in a loop of its own, in a thread.

    A signal handler that raises would otherwise raise inside the event loop, which swallows it.
    """
    failure: list[BaseException] = []
    loop = asyncio.new_event_loop()

    def body() -> None:
        try:
            loop.run_until_complete(work())
        except BaseException as error:  # handed to the caller
            failure.append(error)
        finally:
            loop.close()

    def cancel() -> None:
        for task in asyncio.all_tasks(loop):
            task.cancel()

    thread = threading.Thread(target=body, name="nsysk3-load", daemon=True)
    try:
        thread.start()
        thread.join()
    except BaseException:
        with contextlib.suppress(RuntimeError):  # it may just have closed
            loop.call_soon_threadsafe(cancel)
        if thread.is_alive():
            thread.join(5)
        raise
    if failure:
        raise failure[0]


class _Load:
    """The state of one load."""

    def __init__(
        self,
        url: str,
        input_len: int,
        output_len: int,
        seed: int,
        timeout_s: float,
        stop: Callable[[], object],
        on_done: Callable[[int], None] | None,
        lost: Callable[[], str | None] | None,
    ) -> None:
        self.url = url
        self.input_len = input_len
        self.output_len = output_len
        self.seed = seed
        self.timeout_s = timeout_s
        self.stop = stop
        self.on_done = on_done
        self.lost = lost
        self.given_up = ""
        self.limits: set[asyncio.Timeout] = set()
        self.outcomes: list[Outcome] = []
        self.began_ns = 0
        self.ended = 0

    def body(self, index: int) -> bytes:
        sampling = {"temperature": 0.0, "max_new_tokens": self.output_len, "ignore_eos": True}
        prompt = token_ids(self.seed, index, self.input_len)
        document = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
        return json.dumps(document, separators=(",", ":")).encode()

    async def run(self, concurrency: int, requests: int, request_rate: float | None) -> None:
        import httpx

        # Bodies are made before the clock starts and, past those, while the server is busy: making one of 16k tokens
        # takes milliseconds that belong to no request.
        bodies: asyncio.Queue[bytes | None] = asyncio.Queue(maxsize=2 * concurrency)
        for index in range(min(requests, bodies.maxsize)):
            bodies.put_nowait(self.body(index))

        async def refill() -> None:
            for index in range(bodies.maxsize, requests):
                await bodies.put(self.body(index))
            for _ in range(concurrency):
                await bodies.put(None)

        turns = itertools.count()

        async def worker() -> None:
            while (body := await bodies.get()) is not None and not self.stop() and not self.given_up:
                turn = next(turns)
                if request_rate:
                    await asyncio.sleep(began + turn / request_rate - time.perf_counter())
                outcome = Outcome(sent_s=time.perf_counter() - began, input_len=self.input_len)
                self.outcomes.append(outcome)
                await self.request(client, body, outcome)
                self.ended += 1
                if self.on_done:
                    self.on_done(self.ended)

        limits = httpx.Limits(max_connections=None, max_keepalive_connections=concurrency)
        async with httpx.AsyncClient(timeout=None, limits=limits, trust_env=False) as client:
            self.began_ns, began = time.time_ns(), time.perf_counter()
            helpers = [asyncio.create_task(refill()), asyncio.create_task(self.watch())]
            try:
                async with asyncio.TaskGroup() as workers:
                    for _ in range(min(concurrency, requests)):
                        workers.create_task(worker())
            finally:
                for helper in helpers:
                    helper.cancel()

    async def watch(self) -> None:
        """Give up the requests in flight once their server is lost."""
        while self.lost is not None and not self.given_up:
            if reason := self.lost():
                self.given_up = reason
                for limit in self.limits:
                    limit.reschedule(0)
            await asyncio.sleep(WATCH_S)

    async def request(self, client: Any, body: bytes, outcome: Outcome) -> None:
        """Send one request; whatever goes wrong with it becomes its ``error``."""
        import httpx

        sent = time.perf_counter()
        limit = asyncio.timeout(self.timeout_s)
        try:
            async with limit:
                self.limits.add(limit)
                async with client.stream("POST", self.url, content=body, headers=JSON) as response:
                    if response.status_code != 200:
                        text = (await response.aread()).decode("utf-8", "replace")
                        outcome.error = f"HTTP {response.status_code}: {' '.join(text.split())[:500]}"
                        return
                    await self.chunks(events(response), outcome, sent)
        except TimeoutError:
            outcome.error = self.given_up or f"not answered within {self.timeout_s:g} s"
        except (httpx.HTTPError, httpx.StreamError, OSError, ValueError) as error:
            outcome.error = f"{type(error).__name__}: {error}".rstrip(": ")
        finally:
            self.limits.discard(limit)
            outcome.latency_s = time.perf_counter() - sent

    async def chunks(self, stream: AsyncIterator[dict[str, Any]], outcome: Outcome, sent: float) -> None:
        last, tokens = sent, 0
        async for chunk in stream:
            now = time.perf_counter()
            if error := failed(chunk):
                outcome.error = error
                return
            meta = chunk.get("meta_info") or {}
            outcome.input_len = int(meta.get("prompt_tokens") or outcome.input_len)
            outcome.cached_tokens = meta.get("cached_tokens", outcome.cached_tokens)
            generated = int(meta.get("completion_tokens") or tokens + 1)
            if outcome.ttft_s is None:
                outcome.ttft_s = now - sent
            elif generated > tokens:
                outcome.itl_s += [(now - last) / (generated - tokens)] * (generated - tokens)
            if generated > tokens:
                last, tokens = now, generated
            outcome.output_len = tokens
            outcome.text = str(chunk.get("text") or "")
        if outcome.ttft_s is None:
            outcome.error = "the server ended its answer before the first token"


async def events(response: Any) -> AsyncIterator[dict[str, Any]]:
    """The JSON documents of a stream of server-sent events.  Raises ValueError when one is none."""
    async for line in response.aiter_lines():
        if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
            document = json.loads(data)
            if not isinstance(document, dict):
                raise ValueError(f"not a JSON object in the stream: {data[:100]}")
            yield document


def failed(chunk: dict[str, Any]) -> str | None:
    """What SGLang says went wrong with a request whose HTTP status was 200: an error document, or an abort."""
    if error := chunk.get("error"):
        return str(error.get("message", error) if isinstance(error, dict) else error)[:500]
    reason = (chunk.get("meta_info") or {}).get("finish_reason")
    if isinstance(reason, dict) and reason.get("type") == "abort":
        return f"aborted by the server: {reason.get('message') or 'no reason given'}"[:500]
    return None
