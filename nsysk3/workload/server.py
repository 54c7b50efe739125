"""SGLang's endpoints on the first node: requests in, micro-batches out to the ranks, tokens back."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any

from nsysk3.errors import InputError
from nsysk3.workload.http import Answer, Call, serve
from nsysk3.workload.hub import Hub, Message, pack
from nsysk3.workload.information import model_information, server_information
from nsysk3.workload.options import Options
from nsysk3.workload.scheduler import Request, Scheduler

logger = logging.getLogger("nsysk3.workload")
# Answers of ranks that only say how they are; a rank busy on the host may take a forward.
ANSWER_S = 30.0
CAPTURE = "CUDA_PROFILER"


class Server:
    """The service: one event loop, no threads."""

    def __init__(self, options: Options, launch_command: str, on_lost: Callable[[int], None]) -> None:
        self.options, self.shape = options, options.shape()
        self.launch_command = launch_command
        self.hub = Hub(self._on_message, lambda rank: None if self._stopping else on_lost(rank))
        self.ready = asyncio.Event()
        self.began = time.time()
        self.startup_s: float | None = None
        self.scheduler = Scheduler(
            chunk=options.chunked_prefill_size,
            requests_a_batch=options.micro_batch_requests,
            running=options.max_running_requests,
            depth=options.depth,
        )
        self._rids = itertools.count(1)
        self._ranks: dict[int, Message] = {}
        self._all_ready = asyncio.Event()
        self._stopping = False
        self._capturing: set[int] = set()  # ranks whose part of a capture is not over
        self._told: dict[str, asyncio.Queue[tuple[int, Message]]] = {}
        self._asking = asyncio.Lock()
        self._http: asyncio.Server | None = None

    async def open(self, hub_host: str) -> None:
        """Listen for clients, and for ranks at ``hub_host``.  OSError when the port is taken."""
        self._http = await serve(self._handle, self.options.host, self.options.port)
        await self.hub.open(hub_host)
        logger.info("listens on http://%s:%d", self.options.host, self._http.sockets[0].getsockname()[1])

    async def start(self) -> None:
        """Wait for the ranks and let them run something; then the server is ready."""
        await self._all_ready.wait()
        if not self.options.skip_server_warmup:
            await self._warm_up()
        self.startup_s = time.time() - self.began
        self.ready.set()
        logger.info("The server is fired up and ready to roll!")

    @property
    def has_all_ranks(self) -> bool:
        """Whether every rank has told that it is there."""
        return self._all_ready.is_set()

    def stop(self) -> None:
        """Take nothing more and tell the ranks to end after what they have."""
        self._stopping = True
        self.ready.clear()
        self.hub.send({"kind": "exit"})

    def close(self) -> None:
        """End all connections."""
        if self._http is not None:
            self._http.close()
        self.hub.close()

    # -- ranks ---------------------------------------------------------------------------------------------------------

    def _on_message(self, rank: int, message: Message) -> None:
        match message["kind"]:
            case "ready":
                self._ranks[rank] = message
                if len(self._ranks) == self.options.world_size:
                    self._all_ready.set()
            case "done":
                self.scheduler.done(message["number"], message["tokens"])
                self._pump()
            case "leaving":
                logger.info("rank %d was told to stop: so does the server", rank)
                self.stop()
            case kind:
                if kind == "capture" and message["state"] == "stopped":
                    self._capturing.discard(rank)
                if kind in self._told:
                    self._told[kind].put_nowait((rank, message))

    def _pump(self) -> None:
        """Launch what can be launched; only the first stage reads token ids."""
        while not self._stopping and (batch := self.scheduler.next()) is not None:
            message = batch.message()
            self.hub.send({**message, "ids": pack(batch.ids)}, range(self.options.tp_size))
            self.hub.send(message, range(self.options.tp_size, self.options.world_size))

    async def _ask(self, question: Message, kind: str, ranks: Iterable[int]) -> dict[int, Message]:
        """Tell all ranks something and wait for the answers of some; those that come too late are left out."""
        waiting, answers = set(ranks), dict[int, Message]()
        async with self._asking:
            told = self._told[kind] = asyncio.Queue()
            self.hub.send(question)
            try:
                async with asyncio.timeout(ANSWER_S):
                    while waiting:
                        rank, message = await told.get()
                        answers[rank] = message
                        waiting.discard(rank)
            except TimeoutError:
                logger.warning("%s: no answer from ranks %s", kind, sorted(waiting))
            finally:
                del self._told[kind]
        return answers

    async def _warm_up(self) -> None:
        """Prompts of two chunks, as many as there are stages: libraries, connections and memory are then there."""
        chunk = self.options.chunked_prefill_size
        length = min(2 * chunk if self._on_gpus else 16, self.shape.context - 1)
        ids = [1 + number % 1000 for number in range(length)]
        await asyncio.gather(*(self._finished(ids, 1) for _ in range(self.options.depth)))

    @property
    def _on_gpus(self) -> bool:
        return any(message["device"].startswith("cuda") for message in self._ranks.values())

    # -- requests ------------------------------------------------------------------------------------------------------

    def _submit(self, ids: list[int], new: int) -> tuple[Request, asyncio.Queue[int]]:
        """Queue a prompt; the queue gets the number of tokens so far, after each."""
        arrived: asyncio.Queue[int] = asyncio.Queue()
        request = Request(next(self._rids), ids, new, on_token=lambda request: arrived.put_nowait(len(request.output)))
        self.scheduler.add(request)
        self._pump()
        return request, arrived

    async def _finished(self, ids: list[int], new: int) -> Request:
        request, arrived = self._submit(ids, new)
        try:
            while await arrived.get() < new:
                pass
        finally:
            self._give_up(request)
        return request

    def _give_up(self, request: Request) -> None:
        if not request.finished:
            self.scheduler.cancel(request)

    async def _handle(self, call: Call) -> Answer:
        match call.path:
            case "/health":
                return Answer(200 if self.ready.is_set() else 503)
            case "/health_generate":
                if self.ready.is_set():
                    await self._finished([1], 1)
                return Answer(200 if self.ready.is_set() else 503)
            case "/generate" if call.method in ("POST", "PUT"):
                return await self._generate(call)
            case "/server_info" | "/get_server_info":
                return Answer(body=await self._information())
            case "/model_info" | "/get_model_info":
                return Answer(body=model_information(self.options, self.shape))
            case "/start_profile":
                return await self._start_profile(call.document)
            case "/stop_profile":
                return await self._stop_profile()
            case "/flush_cache":
                return Answer(body="Cache flushed.\n")  # nothing outlives its request
        return Answer(404, {"detail": "Not Found"})

    async def _generate(self, call: Call) -> Answer:
        if not self.ready.is_set():
            return Answer(503, "the server is not ready")
        prompts, new, several = self._read(call.document)
        if call.document.get("stream"):
            return Answer(stream=self._streamed(prompts, new, several))
        everything = asyncio.gather(*(self._answered(ids, new) for ids in prompts))
        try:
            answers = await call.result_of(everything)
        finally:
            everything.cancel()
        return Answer(body=answers if several else answers[0])

    async def _answered(self, ids: list[int], new: int) -> dict[str, Any]:
        began = time.perf_counter()
        return _document(await self._finished(ids, new), began)

    async def _streamed(self, prompts: list[list[int]], new: int, several: bool) -> AsyncGenerator[Any, None]:
        began = time.perf_counter()
        parts: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

        async def follow(index: int, ids: list[int]) -> None:
            request, arrived = self._submit(ids, new)
            try:
                while not request.finished:
                    await arrived.get()
                    document = _document(request, began)
                    parts.put_nowait(document | {"index": index} if several else document)
            finally:
                self._give_up(request)

        following = [asyncio.create_task(follow(index, ids)) for index, ids in enumerate(prompts)]
        try:
            left = len(prompts)
            while left:
                part = await parts.get()
                left -= part["meta_info"]["finish_reason"] is not None
                yield part
        finally:
            for task in following:
                task.cancel()
        yield "[DONE]"

    def _read(self, document: Any) -> tuple[list[list[int]], int, bool]:
        """Prompts, tokens to generate, and whether a list of answers is wanted."""
        if not isinstance(document, dict):
            raise InputError("the body must be a JSON object")
        given = document.get("input_ids")
        if given is None:
            text = document.get("text")
            several = isinstance(text, list)
            texts: list[Any] = text if isinstance(text, list) else [text]
            if not texts or not all(isinstance(each, str) for each in texts):
                raise InputError("input_ids or text is needed")
            prompts = [list(each.encode()) for each in texts]  # no tokenizer: a text is its bytes
        else:
            several = isinstance(given, list) and bool(given) and isinstance(given[0], list)
            prompts = given if several else [given]
        new = (document.get("sampling_params") or {}).get("max_new_tokens", 128)
        if type(new) is not int or new < 1:
            raise InputError(f"max_new_tokens {new!r}: must be a whole number of at least 1")
        for ids in prompts:
            self._check_prompt(ids, new)
        return prompts, new, several

    def _check_prompt(self, ids: Any, new: int) -> None:
        if not isinstance(ids, list) or not ids or not all(type(each) is int for each in ids):
            raise InputError("input_ids must be a list of whole numbers, not empty")
        if min(ids) < 0 or max(ids) >= self.shape.vocab:
            raise InputError(f"input_ids must be from 0 to {self.shape.vocab - 1}")
        if len(ids) + new > self.shape.context:
            raise InputError(f"{len(ids)} tokens and {new} new ones: the model's context is {self.shape.context}")

    # -- capture and information ---------------------------------------------------------------------------------------

    async def _start_profile(self, document: Any) -> Answer:
        given = document if isinstance(document, dict) else {}
        if given.get("activities") != [CAPTURE]:
            raise InputError(f'activities must be ["{CAPTURE}"]: the torch workload is profiled by Nsight Systems')
        if self._capturing:
            return Answer(500, "Profiling is already in progress. Call /stop_profile first.")
        steps = given.get("num_steps")
        if steps is not None and (type(steps) is not int or steps < 1):
            raise InputError(f"num_steps {steps!r}: must be a whole number of at least 1")
        self._capturing = set(range(self.options.world_size))
        # The capture is open once each node's first rank has opened it; later stages get there with their work.
        first = range(0, self.options.world_size, self.options.ranks_a_node)
        await self._ask({"kind": "capture", "do": "start", "steps": steps}, "capture", first)
        return Answer(body="Start profiling.\n")

    async def _stop_profile(self) -> Answer:
        if not self._capturing:
            return Answer(500, "Profiling is not in progress. Call /start_profile first.")
        await self._ask({"kind": "capture", "do": "stop"}, "capture", self._capturing)
        self._capturing.clear()
        return Answer(body="Stop profiling. This will take some time.\n")

    async def _information(self) -> dict[str, Any]:
        state = await self._ask({"kind": "state"}, "state", self._ranks)
        ranks = [self._ranks[rank] | answer for rank, answer in sorted(state.items())]
        return server_information(self.options, self.shape, ranks, self.launch_command, self.startup_s)


def _document(request: Request, began: float) -> dict[str, Any]:
    """What SGLang answers; without a tokenizer the text is the ids' numbers."""
    meta = {
        "id": str(request.rid),
        "finish_reason": {"type": "length", "length": request.max_new_tokens} if request.finished else None,
        "prompt_tokens": len(request.prompt),
        "completion_tokens": len(request.output),
        "cached_tokens": 0,
        "e2e_latency": time.perf_counter() - began,
    }
    return {"text": " ".join(map(str, request.output)), "output_ids": list(request.output), "meta_info": meta}
