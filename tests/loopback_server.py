"""A server that speaks SGLang's endpoints, simulates a prefill pipeline, and misbehaves on demand.

Run by path with SGLang's flags, in place of ``python -m sglang.launch_server``; standard library only.  Its own:

    --tps PP=TOKENS     tokens a second of a full pipeline of PP stages (default: 3300 x PP^0.48, PP 8 about 9000)
    --speed X           everything X times as fast (default 100)
    --fault NAME[=ARG][@NODE]  repeatable; see FAULTS; with @NODE only on the node of that rank
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import signal
import socket
import sys
import threading
import time
from http.server import ThreadingHTTPServer
from typing import Any, NoReturn

from death_logs import DEATHS
from loopback_endpoints import Handler, Server, log, tell_nsys, wait_until

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
