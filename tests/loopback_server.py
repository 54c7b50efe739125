"""A server that speaks SGLang's endpoints, simulates a prefill pipeline, and misbehaves on demand.

Run by path with SGLang's flags, in place of ``python -m sglang.launch_server``; standard library only.  Its own:

    --tps PP=TOKENS     tokens a second of a full pipeline of PP stages (default: 3300 x PP^0.48, PP 8 about 9000)
    --speed X           everything X times as fast (default 100)
    --fault NAME[=ARG][@NODE]  repeatable; see FAULTS; with @NODE only on the node of that rank

Nothing runs on a GPU: a chunk of a prompt occupies each stage in turn, for as long as the rate says.
"""

from __future__ import annotations

import argparse
import ctypes
import heapq
import itertools
import json
import os
import signal
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NoReturn

from death_logs import DEATHS

FAULTS = {
    "slow-start": "healthy only after ARG seconds, or once the file ARG exists",
    "never-healthy": "answers 503 to every health check",
    "never-listens": "starts, logs, and opens no port",
    "http-500": "every ARG-th request to /generate gets 500",
    "disconnect": "every ARG-th request is cut after the headers",
    "sse-error": "every ARG-th request gets an error document with status 200",
    "abort": "every ARG-th request is aborted (finish_reason)",
    "no-answer": "every ARG-th request is never answered",
    "wrong-info": "/server_info says ARG (KEY:JSON) instead of the truth",
    "old-info": "only /get_server_info and /get_model_info, as before the rename",
    "no-info": "no information endpoint at all",
    "hang-on-stop": "ignores SIGTERM and SIGINT, children too",
    "slow-stop": "takes ARG seconds to end",
    "orphans": "children in sessions of their own that outlive this process",
    "die-at-start": "prints the log of ARG (a key of DEATHS) and ends with 1",
    "die-in-window": "killed by a signal ARG forwards after /start_profile",
    "die-after": "killed by a signal at the ARG-th request",
    "print-after": "prints the log of ARG (a key of DEATHS) at the third request and goes on",
    "no-profile": "/start_profile is not there",
    "refuse-profile": "/start_profile answers 500",
    "endless-capture": "num_steps is not honoured",
}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add = parser.add_argument
    add("--model-path", default="none")
    add("--tp-size", "--tensor-parallel-size", type=int, default=1)
    add("--pp-size", "--pipeline-parallel-size", type=int, default=1)
    add("--ep-size", "--expert-parallel-size", "--ep", type=int, default=1)
    add("--nnodes", type=int, default=1)
    add("--node-rank", type=int, default=0)
    add("--dist-init-addr", "--nccl-init-addr")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=30000)
    add("--moe-runner-backend", default="auto")
    add("--chunked-prefill-size", type=int, default=8192)
    add("--max-running-requests", type=int, default=64)
    add("--pp-max-micro-batch-size", type=int)
    add("--pp-async-batch-depth", type=int, default=0)
    add("--disable-radix-cache", action="store_true")
    add("--tps", action="append", default=[])
    add("--speed", type=float, default=100.0)
    add("--fault", action="append", default=[])
    given, rest = parser.parse_known_args()
    given.rest = rest
    given.faults = {}
    for fault in given.fault:
        fault, _, node = fault.partition("@")
        if node and int(node) != given.node_rank:
            continue
        name, _, argument = fault.partition("=")
        if name not in FAULTS:
            parser.error(f"no such fault: {name}")
        given.faults[name] = argument
    return given


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


def spawn_schedulers(given: argparse.Namespace) -> list[int]:
    """One child a rank of this node, named as SGLang names them; they die with their parent, unless told not to."""
    libc = ctypes.CDLL(None)
    a_node = given.tp_size * given.pp_size // given.nnodes
    children = []
    for rank in range(given.node_rank * a_node, (given.node_rank + 1) * a_node):
        if child := os.fork():
            children.append(child)
            continue
        stage, tp = divmod(rank, given.tp_size)
        libc.prctl(15, f"sglang::scheduler_PP{stage}_TP{tp}".encode(), 0, 0, 0)  # PR_SET_NAME
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if "orphans" in given.faults:
            os.setsid()
        else:
            libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
        if "hang-on-stop" in given.faults:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            signal.pause()
    return children


def meet(given: argparse.Namespace) -> list[socket.socket]:
    """The nodes of a server wait for each other at --dist-init-addr."""
    if given.nnodes == 1 or not given.dist_init_addr:
        return []
    host, _, port = given.dist_init_addr.rpartition(":")
    if given.node_rank == 0:
        listener = socket.create_server((host, int(port)), backlog=64)
        return [listener, *(listener.accept()[0] for _ in range(given.nnodes - 1))]
    for _ in itertools.count():
        try:
            return [socket.create_connection((host, int(port)))]
        except ConnectionRefusedError:
            time.sleep(0.05)
    return []


def end(server: Server) -> NoReturn:
    if "slow-stop" in server.faults:
        time.sleep(float(server.faults["slow-stop"]))
    if "orphans" not in server.faults:
        for child in server.children:
            os.kill(child, signal.SIGKILL)
    os._exit(0)


def main() -> None:
    given = options()
    faults = given.faults
    log(f"server_args=ServerArgs(model_path={given.model_path!r}, tp_size={given.tp_size}, pp_size={given.pp_size})")
    log(f"launch_command={sys.argv} HF_TOKEN={os.environ.get('HF_TOKEN')}")
    if given.rest:
        log(f"loopback: ignored {' '.join(given.rest)}")
    server = Server(given)
    Handler.state = server
    server.children = spawn_schedulers(given)
    handle: Any = signal.SIG_IGN if "hang-on-stop" in faults else lambda *_: end(server)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
    if "die-at-start" in faults:
        print(DEATHS[faults["die-at-start"]], flush=True)
        for child in server.children:
            os.kill(child, signal.SIGKILL)
        os._exit(1)
    sockets = meet(given)
    log("Load weight begin. avail mem=83.06 GB", " PP0 TP0")
    if given.node_rank:  # as SGLang's other nodes: no requests come here
        for mark in sockets[0].makefile() if sockets else ():
            tell_nsys(mark.strip())
    while given.node_rank or "never-listens" in faults:
        signal.pause()
    server.peers = sockets[1:]
    ThreadingHTTPServer.daemon_threads = True
    ThreadingHTTPServer.request_queue_size = 128
    try:
        http = ThreadingHTTPServer((given.host, given.port), Handler)
    except OSError as error:
        print(
            f"ERROR:    [Errno {error.errno}] error while attempting to bind on address "
            f"('{given.host}', {given.port}): address already in use",
            flush=True,
        )
        end(server)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    log(f"INFO:     Uvicorn running on http://{given.host}:{http.server_address[1]} (Press CTRL+C to quit)")
    slow = faults.get("slow-start", "0")
    try:
        wait_until(time.monotonic() + float(slow))
    except ValueError:
        while not os.path.exists(slow):  # noqa: PTH110
            time.sleep(0.02)
    log("Load weight end. type=KimiK3ForConditionalGeneration, avail mem=22.10 GB", " PP0 TP0")
    server.healthy.set()
    if "never-healthy" not in faults:
        log("The server is fired up and ready to roll!")
    while sockets is not None:
        signal.pause()


if __name__ == "__main__":
    main()
