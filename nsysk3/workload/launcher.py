"""A node's launcher: one process a rank, watched; on the first node the HTTP service too.  No torch in here."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shlex
import signal
import socket
import sys
from collections.abc import Sequence

from nsysk3.errors import RunFailedError
from nsysk3.workload.hub import TOKEN_VARIABLE
from nsysk3.workload.options import Options
from nsysk3.workload.server import Server

logger = logging.getLogger("nsysk3.workload")
# Ranks finish what they run, close their communicators and let Nsight read them; then they are killed.
STOP_S = 30.0
# After a failure they wait for each other: time only to say what they know.
LAST_WORDS_S = 1.0


def launch(options: Options, arguments: Sequence[str]) -> int:
    """Run this node's part of the server until it is told to stop (0).

    Raises RunFailedError when a rank dies, the port is taken or the ranks do not come up.
    """
    return asyncio.run(Launcher(options, arguments).run())


class Launcher:
    """The processes of one node."""

    def __init__(self, options: Options, arguments: Sequence[str]) -> None:
        self.options = options
        self.command = shlex.join([sys.executable, "-m", "nsysk3.workload", *arguments])
        self.server: Server | None = None
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._stop = asyncio.Event()
        self._failure: str | None = None
        self._signals = 0

    async def run(self) -> int:
        """Start, serve and clean up; see ``launch``."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(signum, self._signalled)
        starting: asyncio.Task[None] | None = None
        try:
            if self.options.node_rank == 0:
                self.server = Server(self.options, self.command, self._lost)
                try:
                    await self.server.open("127.0.0.1" if self.options.nnodes == 1 else "0.0.0.0")
                except OSError as error:
                    raise RunFailedError(str(error)) from None
                starting = asyncio.create_task(self.server.start())
                starting.add_done_callback(self._started)
            watching = await self._spawn()
            await self._stop.wait()
            await self._end(watching)
        finally:
            if starting is not None:
                starting.cancel()
            for process in self._processes.values():
                if process.returncode is None:
                    process.kill()
            if self.server is not None:
                self.server.close()
        if self._failure is not None:
            raise RunFailedError(self._failure)
        return 0

    @property
    def _meeting_host(self) -> str:
        """An address of the first node that all ranks can reach."""
        if self.options.nnodes == 1:
            return "127.0.0.1"
        return (self.options.dist_init_addr or "").rpartition(":")[0].strip("[]")

    async def _spawn(self) -> list[asyncio.Task[None]]:
        options = self.options
        hub = [self._meeting_host, self.server.hub.port] if self.server is not None else None
        environment = dict(os.environ)
        if self.server is not None:
            environment[TOKEN_VARIABLE] = self.server.hub.token
        watching = []
        with contextlib.ExitStack() as opened:
            store, listening = self._store(opened)
            first = options.node_rank * options.ranks_a_node
            for local in range(options.ranks_a_node):
                rank = first + local
                inherited = listening.fileno() if listening is not None and rank == 0 else None
                document = {
                    "options": options.document(), "rank": rank, "local": local, "launcher": os.getpid(),
                    "store": store, "store_fd": inherited, "hub": hub,
                }  # fmt: skip
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "nsysk3.workload.rank", json.dumps(document),
                    stdin=asyncio.subprocess.DEVNULL, env=environment,
                    pass_fds=() if inherited is None else (inherited,),
                )  # fmt: skip
                self._processes[rank] = process
                watching.append(asyncio.create_task(self._watch(rank, process)))
        return watching

    def _store(self, opened: contextlib.ExitStack) -> tuple[list[str | int], socket.socket | None]:
        """Where the ranks find each other; on one node at a free port that the first rank inherits."""
        if self.options.nnodes > 1:
            return [self._meeting_host, int((self.options.dist_init_addr or "").rpartition(":")[2])], None
        listening = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        return ["127.0.0.1", listening.getsockname()[1]], listening

    async def _watch(self, rank: int, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        if self._stop.is_set():
            return
        stage, tp = divmod(rank, self.options.tp_size)
        if code == 0:  # told to leave: by a signal of its own, or by the first node
            logger.info("rank %d has left", rank)
            self._stop.set()
            return
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        self._fail(f"rank {rank} (stage {stage}, TP rank {tp}, process {process.pid}) {how}")

    def _started(self, starting: asyncio.Task[None]) -> None:
        if not starting.cancelled() and (error := starting.exception()) is not None:
            self._fail(f"the server does not get ready ({error!r})")

    def _lost(self, rank: int) -> None:
        """A rank's connection ended; of one of this node's own the process usually tells more."""
        if self._stop.is_set():
            return
        if rank not in self._processes:
            self._fail(f"rank {rank}, on another node, is gone")
            return
        reason = f"rank {rank} no longer speaks to the server"
        asyncio.get_running_loop().call_later(LAST_WORDS_S, self._fail, reason)

    def _fail(self, reason: str) -> None:
        if self._stop.is_set():
            return
        logger.error("%s: the server ends", reason)
        self._failure = reason
        self._stop.set()

    def _signalled(self) -> None:
        self._signals += 1
        logger.info("told to stop%s", ": now" if self._signals > 1 else "")
        if self._signals > 1:
            for process in self._processes.values():
                if process.returncode is None:
                    process.kill()
        self._stop.set()

    async def _end(self, watching: list[asyncio.Task[None]]) -> None:
        """Let the ranks leave in order, or end them at once after a failure."""
        if self._failure is None:
            if self.server is not None:
                self.server.stop()
            if self.server is None or not self.server.has_all_ranks:
                self._signal(signal.SIGTERM)  # they tell the first node, or leave where they have not begun
            if await self._all_ended(watching, STOP_S):
                self._failure = self._unclean()
                return
            self._failure = f"ranks {self._left()} did not end and were killed"
        elif await self._all_ended(watching, LAST_WORDS_S):
            return
        self._signal(signal.SIGKILL)
        await self._all_ended(watching, STOP_S)

    def _unclean(self) -> str | None:
        """Which rank ended otherwise than it was told; one that had not begun ends by the signal itself."""
        codes = {rank: process.returncode for rank, process in self._processes.items()}
        return next(
            (f"rank {rank} ended with {code} when told to stop" for rank, code in codes.items()
             if code not in (0, -signal.SIGTERM)), None,
        )  # fmt: skip

    async def _all_ended(self, watching: list[asyncio.Task[None]], limit_s: float) -> bool:
        return not (await asyncio.wait(watching, timeout=limit_s))[1] if watching else True

    def _left(self) -> list[int]:
        return [rank for rank, process in self._processes.items() if process.returncode is None]

    def _signal(self, signum: signal.Signals) -> None:
        for rank in self._left():
            with contextlib.suppress(ProcessLookupError):
                self._processes[rank].send_signal(signum)
