"""A server on its hosts: started, watched, held against the plan, stopped so that its reports are written."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from nsysk3.errors import NsysK3Error, RunFailedError
from nsysk3.launch.failures import Failure, ServerFailedError, explain, relevant_lines
from nsysk3.launch.follow import DYING_S, Follower, Node
from nsysk3.launch.health import READY, Progress, answers, listens, minutes
from nsysk3.launch.parallel import each
from nsysk3.launch.plan import NodePlan, Plan
from nsysk3.launch.secrets import hiding
from nsysk3.launch.server_info import fetch_info, mismatches
from nsysk3.launch.shell import command_text
from nsysk3.run.files import write_text

if TYPE_CHECKING:
    from nsysk3.launch.hosts import Completed, Host

_GPU_COLUMNS = (
    "index,uuid,name,pci.bus_id,driver_version,memory.used,memory.total,utilization.gpu,temperature.gpu,power.draw,"
    "clocks.sm,clocks.mem"
)
# /health generates a token: asked seldom, and only as long as the log does not say that the server is ready.
_ASK_HEALTH_EVERY_S = 5.0
# One a micro-batch and stage; those of later stages say which.
_PREFILL = re.compile(r"^(?!.*\bPP[1-9]).*Prefill batch", re.MULTILINE)
# Enough for SGLang to end its processes; there is no report worth waiting for.
_LOST_GRACE_S = 10.0
_T = TypeVar("_T")


class Service:
    """One server over all nodes of a plan.

    As a context manager: entering starts it and waits until it is healthy, leaving stops it and brings its logs.
    What it prints is copied to ``nodes/<host>/server.log`` in ``folder`` while it runs.

    ``name`` tells it from another server that the same hosts, still open, had before; ``new_scratch``: its folders on
    the hosts are not there yet.
    """

    def __init__(
        self,
        plan: Plan,
        hosts: Sequence[Host],
        folder: Path,
        say: Callable[[str], None],
        *,
        name: str = "server",
        new_scratch: bool = True,
    ) -> None:
        self.plan = plan
        self.url = plan.url
        self.folder = folder
        self.info: dict[str, Any] = {}
        self.info_endpoint = ""
        self.healthy_after_s: float | None = None
        self._say = say
        self._hosts = list(hosts)
        self._progress = Progress(say)
        self._nodes = [
            Node(node, host, self._folder(node) / "server.log") for node, host in zip(plan.nodes, hosts, strict=True)
        ]
        self._began = time.monotonic()
        self._name = name
        self._new_scratch = new_scratch
        self._follower = Follower(name, self._nodes, self._line, hiding(plan))
        self._started: list[Node] = []
        self._stopped = False
        self._starting = True
        self._ready = False

    def __enter__(self) -> Self:
        try:
            self.start()
            self.wait_healthy()
        except BaseException:
            self.stop(self._short_grace())
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(self._short_grace() if kind else None)

    def start(self) -> None:
        """Start every node.  Raises RunFailedError when one cannot be started, or somebody else has its port."""
        if listens(self.url):
            port = self.plan.settings.cluster.port
            busy = Failure(
                "port-in-use",
                f"something already answers at {self.url}",
                f"`ss -ltnp 'sport = :{port}'` there says what; set [cluster] port to a free one, or end an earlier "
                "run with `nsysk3 cleanup RUN`",
            )
            raise ServerFailedError(busy, "the server was not started")
        for node in self._nodes:
            node.log.parent.mkdir(parents=True, exist_ok=True)
            write_text(node.log.parent / "command.txt", command_text(node.plan) + "\n")
            node.log.write_bytes(b"")
        self._progress = Progress(self._say)
        self._began = time.monotonic()
        each(self._nodes, self._start_node)
        self._follower.start()

    def wait_healthy(self) -> None:
        """Wait until the server answers, showing how far it is.  Raises ServerFailedError when it does not."""
        limit = self.plan.settings.server.start_timeout_s
        asked = self._began

        def ready() -> str | None:
            nonlocal asked
            self._progress.still()
            if self._ready:
                return "log"
            if time.monotonic() - asked > _ASK_HEALTH_EVERY_S:
                asked = time.monotonic()
                if answers(self.url):
                    return "health"
            return None

        if not self._follower.wait(ready, limit):
            failure = self._follower.failure or self._not_healthy(limit)
            raise self.failed(failure, "did not start")
        self._starting = False
        self.healthy_after_s = time.monotonic() - self._began
        self.info, self.info_endpoint = self._ask_info()
        self._say(f"healthy after {minutes(self.healthy_after_s)}")

    def check(self) -> list[str]:
        """What the server says of itself that is not what the plan asked for, a line each."""
        return mismatches(self.info, self.plan.expected)

    def snapshot(self, label: str) -> list[str]:
        """Write what nvidia-smi says to ``nodes/<host>/gpu_<label>.csv``; returns why not, for each host without."""
        command = ["nvidia-smi", f"--query-gpu={_GPU_COLUMNS}", "--format=csv"]

        def ask(node: Node) -> str | None:
            try:
                done = node.host.run(command, timeout_s=30)
            except NsysK3Error as error:
                return f"{node.plan.host}: no GPU snapshot ({error})"
            if done.code:
                said = (done.err or done.out).strip().splitlines()
                return f"{node.plan.host}: no GPU snapshot ({said[0] if said else f'exit code {done.code}'})"
            node.log.parent.mkdir(parents=True, exist_ok=True)
            write_text(node.log.parent / f"gpu_{label}.csv", done.out)
            return None

        return [reason for reason in each(self._nodes, ask) if reason]

    def failure(self) -> Failure | None:
        """Why the server failed, None while it is well (or was meant to end)."""
        return self._follower.failure

    def gone(self) -> Failure | None:
        """As ``failure``, for when requests fail, which is seen before the death of their server: waits for that."""
        if listens(self.url):
            return self.failure()
        self._follower.wait(lambda: None, DYING_S)
        return self.failure() or Failure("no-answer", f"nothing answers at {self.url} any more", "its log says more")

    def lost(self) -> str | None:
        """The failure as one line; for ``run_load``."""
        return failure.message if (failure := self._follower.failure) else None

    def alive(self) -> bool:
        """Whether every node still runs."""
        return not self._stopped and self._follower.failure is None and all(node.code is None for node in self._nodes)

    def failed(self, failure: Failure, what: str) -> ServerFailedError:
        """Show what is known of a failure, and return the error to raise: ``what`` it did not do, in a word or two."""
        node = self._follower.failed or self._nodes[0]
        self._say(f"the server on {node.plan.host} {what}, {minutes(time.monotonic() - self._began)} after its start")
        self._say(f"  cause:  {failure.message}")
        self._say(f"  advice: {failure.advice}")
        lines = relevant_lines(node.text(), failure)
        self._say(f"  log:    {node.log}" + (", where it says:" if lines else ", which is empty"))
        for line in lines:
            self._say(f"  | {line}")
        return ServerFailedError(failure, f"the server on {node.plan.host} {what}", node.log)

    def mark(self) -> list[int]:
        """How long each node's log is now, for ``said``."""
        return [node.size() for node in self._nodes]

    def said(self, text: str, since: Sequence[int]) -> list[bool]:
        """Which nodes have logged this text since ``mark``."""
        return [text in node.text(begin) for node, begin in zip(self._nodes, since, strict=True)]

    def holds(self, node: int, suffix: str) -> bool:
        """Whether the report of a node is there on its host, under this suffix and not empty."""
        plan, host = self.plan.nodes[node], self._hosts[node]
        with suppress(NsysK3Error):
            return plan.report is not None and bool(host.exists(plan.report + suffix))
        return False

    def wake(self) -> None:
        """Let ``wait`` ask again now: something has happened elsewhere."""
        self._follower.wake()

    @property
    def url_on_first_host(self) -> str:
        """The server's address for a program beside it."""
        return f"http://127.0.0.1:{self.plan.settings.cluster.port}"

    def run_beside(self, command: Sequence[str], timeout_s: float) -> Completed:
        """Run a command where the first node's server runs: on its host, or inside its container."""
        node, host = self.plan.nodes[0], self._hosts[0]
        cli = self.plan.settings.container.cli
        if cli and node.container:  # which has the server's environment
            return host.run([cli, "exec", node.container, *command], timeout_s=timeout_s)
        return host.run(command, env=node.env, timeout_s=timeout_s)

    def prefills(self, since: int) -> int:
        """Micro-batches of the first stage that SGLang has logged since ``mark()[0]``."""
        return len(_PREFILL.findall(self._nodes[0].text(since)))

    def logs(self) -> list[str]:
        """The logs of all nodes, of long ones the end."""
        return [node.text() for node in self._nodes]

    def wait(self, ready: Callable[[], _T | None], timeout_s: float, *, fail: bool = True) -> _T | None:
        """Wait until ``ready`` returns something; None after the time, or (``fail``) once the server has failed."""
        return self._follower.wait(ready, timeout_s, fail=fail)

    def stop(self, grace_s: float | None = None) -> list[int | None]:
        """Stop every node, give Nsight its time to write the reports, and bring the logs.  Returns the exit codes.

        ``grace_s``: seconds until what does not end is killed; default: the settings' stop_timeout_s.  Never raises for
        what a node does; a second call does nothing.
        """
        if self._stopped:
            return [node.code for node in self._nodes]
        self._stopped = True
        self._follower.stopping()
        grace = self.plan.settings.server.stop_timeout_s if grace_s is None else grace_s

        def end(node: Node) -> int | None:
            with suppress(NsysK3Error):
                return node.host.stop(self._name, grace)
            return None

        codes = each(self._started, end)
        if self._started:
            self._follower.stop()
        for node, code in zip(self._started, codes, strict=True):
            node.code = node.code if node.code is not None else code
            if node.unwritten:
                self._say(f"WARNING: {node.log}: is not whole ({node.unwritten})")
        return [node.code for node in self._nodes]

    def _short_grace(self) -> float:
        """For a server whose report nobody waits for."""
        return min(_LOST_GRACE_S, self.plan.settings.server.stop_timeout_s)

    def _folder(self, node: NodePlan) -> Path:
        return self.folder / "nodes" / node.host

    def _start_node(self, node: Node) -> None:
        plan = node.plan
        if self._new_scratch:
            node.host.make_scratch(plan.scratch)
        self._started.append(node)
        node.host.start(
            self._name,
            plan.argv,
            env=plan.env,
            cwd=plan.scratch,
            log=f"{plan.scratch}/{self._name}.log",
            container=plan.container,
        )

    def _line(self, node: Node, line: str) -> None:
        self._ready = self._ready or READY in line
        if self._starting:
            self._progress.line(node.plan.host, line)

    def _ask_info(self) -> tuple[dict[str, Any], str]:
        error: list[RunFailedError] = []

        def ask() -> tuple[dict[str, Any], str] | None:
            try:
                return fetch_info(self.url)
            except RunFailedError as reason:
                error[:] = [reason]
                return None

        # The log says ready a moment before the port answers, and a busy server may be slow to say what it is.
        if found := self._follower.wait(ask, 60):
            return found
        raise self.failed(self._follower.failure, "died") if self._follower.failure else error[0]

    def _not_healthy(self, limit: float) -> Failure:
        known = explain(self.logs())
        if known.kind != "unknown":
            return known
        latest = f" (its log ends with: {self._progress.latest})" if self._progress.latest else ""
        return Failure(
            "not-healthy",
            f"not healthy within {limit:g} s{latest}",
            "a first start that compiles or loads from a slow disk takes long: raise [server] start_timeout_s; "
            "else the log says where it hangs",
        )
