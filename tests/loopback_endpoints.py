"""What tests/loopback_server.py says and does at SGLang's endpoints; standard library only.

Nothing runs on a GPU: a chunk of a prompt occupies each stage in turn, for as long as the rate says.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import signal
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler
from typing import Any

from death_logs import DEATHS


def log(text: str, rank: str = "") -> None:
    print(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}{rank}] {text}", flush=True)


class Pipeline:
    """Chunks pass the stages in order, each as soon as the stage and the chunk are free; so many requests at once."""

    def __init__(self, given: argparse.Namespace) -> None:
        rates = {int(pp): float(tps) for pp, _, tps in (each.partition("=") for each in given.tps)}
        self.tps = rates.get(given.pp_size, 3300.0 * given.pp_size**0.48) * given.speed
        self.chunk = given.chunked_prefill_size
        self.free = [0.0] * given.pp_size
        self.micro = given.pp_max_micro_batch_size or max(given.max_running_requests // given.pp_size, 1)
        self.slots = self.micro * (given.pp_size + given.pp_async_batch_depth)
        self.slots = min(self.slots, given.max_running_requests)
        self.ends: list[float] = []
        self.lock = threading.Lock()

    def admit(self, tokens: int) -> tuple[list[float], float]:
        """When each chunk of a request that comes now is launched, and when the request ends."""
        with self.lock:
            at = time.monotonic()
            while len(self.ends) >= self.slots:
                at = max(at, heapq.heappop(self.ends))
            launches = []
            for begin in range(0, tokens, self.chunk):
                takes = min(self.chunk, tokens - begin) / self.tps
                done = at
                for stage in range(len(self.free)):
                    start = max(done, self.free[stage])
                    if stage == 0:
                        launches.append(start)
                    done = self.free[stage] = start + takes
            heapq.heappush(self.ends, done)
            return launches, done


class Server:
    """What the endpoints say and do."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.faults = given.faults
        self.pipeline = Pipeline(given)
        self.healthy = threading.Event()
        self.lock = threading.Lock()
        self.requests = 0
        self.forwards = 0
        self.capture_until: float | None = None
        self.children: list[int] = []
        self.peers: list[socket.socket] = []

    def info(self) -> dict[str, Any]:
        given = self.given
        names = "tp_size pp_size ep_size nnodes node_rank moe_runner_backend chunked_prefill_size disable_radix_cache"
        said = {name: getattr(given, name) for name in (*names.split(), "pp_max_micro_batch_size")}
        said |= {"model_path": given.model_path, "pp_async_batch_depth": given.pp_async_batch_depth}
        said |= {"version": "0.5.9" if "old-info" in self.faults else "0.5.23", "launch_command": " ".join(sys.argv)}
        running = {"pp_max_micro_batch_size": self.pipeline.micro, "world_size": given.tp_size * given.pp_size}
        said["internal_states"] = [running | {"effective_max_running_requests_per_dp": given.max_running_requests}]
        if "wrong-info" in self.faults:
            key, _, value = self.faults["wrong-info"].partition(":")
            said[key] = json.loads(value)
        return said

    def hit(self, fault: str, number: int) -> bool:
        return fault in self.faults and number % int(self.faults[fault] or 1) == 0

    def forward(self) -> None:
        """One micro-batch is launched; as SGLang, the capture ends before the one past its last."""
        with self.lock:
            self.forwards += 1
            if self.capture_until is not None and self.forwards >= self.capture_until:
                if "die-in-window" in self.faults:
                    os.kill(os.getpid(), signal.SIGKILL)
                self.stop_capture()

    def tell(self, what: str) -> None:
        """Each node's first process opens and closes its node's capture."""
        tell_nsys(what)
        for peer in self.peers:
            peer.sendall(what.encode() + b"\n")

    def start_capture(self, steps: int | None) -> str | None:
        with self.lock:
            if self.capture_until is not None:
                return "Profiling is already in progress. Call /stop_profile first."
            log("Profiling starts. Traces will be saved to: /tmp (with profile id: 1)")
            self.tell("start")
            if "die-in-window" in self.faults:
                steps = int(self.faults["die-in-window"] or 1)
            elif "endless-capture" in self.faults:
                steps = None
            self.capture_until = self.forwards + steps + 1 if steps else float("inf")
            return None

    def stop_capture(self) -> str | None:
        if self.capture_until is None:
            return "Profiling is not in progress. Call /start_profile first."
        log("Stop profiling...")
        self.tell("stop")
        log("Profiling done. Traces are saved to: /tmp")
        self.capture_until = None
        return None


def tell_nsys(what: str) -> None:
    """What cudaProfilerStart and Stop tell Nsight: here, a line in a file that a stand-in for nsys names."""
    if name := os.environ.get("LOOPBACK_CAPTURE_FILE"):
        with open(name, "a") as file:  # noqa: PTH123 - starts faster without pathlib
            file.write(what + "\n")


class Handler(BaseHTTPRequestHandler):
    """SGLang's endpoints."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    state: Server

    def log_message(self, format: str, *args: object) -> None:
        if "generate" not in self.path:
            log(f'INFO:     {self.client_address[0]}:{self.client_address[1]} - "{self.requestline}" {args[1]}')

    def answer(self, code: int, body: str = "", kind: str = "text/plain") -> None:
        data = body.encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        state, path = self.state, self.path.partition("?")[0]
        old = "old-info" in state.faults
        if path in ("/health", "/health_generate"):
            well = state.healthy.is_set() and "never-healthy" not in state.faults
            self.answer(200 if well else 503)
        elif path == ("/get_server_info" if old else "/server_info") and "no-info" not in state.faults:
            self.answer(200, json.dumps(state.info()), "application/json")
        elif path in ("/get_model_info", "/model_info"):
            document = {"model_path": state.given.model_path, "is_generation": True}
            self.answer(200, json.dumps(document), "application/json")
        else:
            self.answer(404, '{"detail":"Not Found"}', "application/json")

    def do_POST(self) -> None:
        state, path = self.state, self.path.partition("?")[0]
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        document = json.loads(body) if body else {}
        if path == "/generate":
            self.generate(document)
        elif path == "/flush_cache":
            self.answer(200, "Cache flushed.\n")
        elif path in ("/start_profile", "/stop_profile") and "no-profile" not in state.faults:
            starts = path == "/start_profile"
            if "refuse-profile" in state.faults:
                error: str | None = "refused"
            elif starts:
                error = state.start_capture(document.get("num_steps"))
            else:
                with state.lock:
                    error = state.stop_capture()
            said = "Start profiling.\n" if starts else "Stop profiling. This will take some time.\n"
            self.answer(500 if error else 200, "Internal Server Error" if error else said)
        else:
            self.answer(404, '{"detail":"Not Found"}', "application/json")

    def generate(self, document: dict[str, Any]) -> None:
        state = self.state
        with state.lock:
            state.requests += 1
            number = state.requests
        if state.hit("die-after", number):
            os.kill(os.getpid(), signal.SIGKILL)
        if "print-after" in state.faults and number == 3:
            print(DEATHS[state.faults["print-after"]], flush=True)
        if state.hit("http-500", number):
            return self.answer(500, "Internal Server Error")
        prompt = document.get("input_ids") or [0] * len(str(document.get("text", "")).split())
        generated = int(document.get("sampling_params", {}).get("max_new_tokens", 1))
        launches, done = state.pipeline.admit(len(prompt))
        stream = bool(document.get("stream"))
        if stream:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
        if state.hit("no-answer", number):
            threading.Event().wait()
        if state.hit("disconnect", number):
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return None
        for launch in launches:
            wait_until(launch)
            state.forward()
        wait_until(done)
        if state.hit("sse-error", number):
            return self.finish_stream([{"error": {"message": "the input is too long", "code": 400}}])
        reason = {"type": "abort", "message": "queue full"} if state.hit("abort", number) else {"type": "length"}
        answers = []
        for token in range(1, generated + 1):
            meta = {"prompt_tokens": len(prompt), "completion_tokens": token, "cached_tokens": 0}
            meta["finish_reason"] = reason if token == generated else None
            answers.append({"text": "x" * token, "output_ids": [7] * token, "meta_info": meta})
        if stream:
            return self.finish_stream(answers)
        return self.answer(200, json.dumps(answers[-1]), "application/json")

    def finish_stream(self, documents: list[dict[str, Any]]) -> None:
        for text in (*map(json.dumps, documents), "[DONE]"):
            data = f"data: {text}\n\n".encode()
            self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.wfile.write(b"0\r\n\r\n")


def wait_until(at: float) -> None:
    if (left := at - time.monotonic()) > 0:
        time.sleep(left)
