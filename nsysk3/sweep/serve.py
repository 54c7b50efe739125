"""One start of one layout's service: checked, loaded, looked at, stopped."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from nsysk3.errors import MissingToolError, NsysK3Error, RunFailedError
from nsysk3.run.files import write_text
from nsysk3.run.manifest import Cause
from nsysk3.run.words import counted
from nsysk3.sweep.advice import further
from nsysk3.sweep.facts import drift, facts_of, unlike
from nsysk3.sweep.folder import DONE, Folder
from nsysk3.sweep.job import Job, now
from nsysk3.sweep.matrix import Cell, Layout
from nsysk3.sweep.memory import AFTER, read_snapshot
from nsysk3.sweep.record import LayoutRecord, Record, Start, make_room
from nsysk3.sweep.repeat import run_repeat

if TYPE_CHECKING:
    from nsysk3.launch.hosts import Host
    from nsysk3.launch.interrupts import Presses
    from nsysk3.launch.load_record import LoadResult
    from nsysk3.launch.plan import Plan
    from nsysk3.launch.service import Service

# Prompts differ between the loads of a start, or a prefix cache would answer some; layouts get the same ones.
_WARMUP_SEED = 999_983
_DEATH_S = 2.0
# What a GPU may hold more after a service than before it: other processes come and go.
_RELEASED_MIB = 1024


class LayoutFailedError(RunFailedError):
    """A layout's service is up, but there is nothing to measure; ``kind`` says why, as those of failures.toml do."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class LayoutRun:
    """One start of one layout's service."""

    def __init__(self, job: Job, layout: Layout, plan: Plan, presses: Presses) -> None:
        self.job = job
        self.presses = presses
        self.layout = layout
        self.plan = plan
        self.known = _known(job.record, layout)
        attempt = max((start.attempt for start in self.known.starts), default=0) + 1
        self.start = Start(attempt=attempt, run_id=plan.run_id, started=now())
        self.failed_cells = 0

    def say(self, text: str) -> None:
        """One line of progress, with the layout it is about."""
        self.job.say(f"{self.layout.label}: {text}" if not text.startswith(" ") else text)

    def run(self, cells: Sequence[Cell]) -> Cause | None:
        """Start, measure, stop; the cause where that failed."""
        self.known.args = list(self.layout.args)
        self.known.starts.append(self.start)
        self.job.save()
        try:
            self._serve(cells)
            if self.failed_cells:
                do = "does" if self.failed_cells == 1 else "do"
                message = f"{self.failed_cells} of {counted(len(cells), 'repeat')} {do} not count"
                self.start.cause = Cause(step="loading", kind="requests", message=message, advice="see results.csv")
            self.start.status = "failed" if self.failed_cells else "done"
        except NsysK3Error as error:
            self.start.status, self.start.cause = "failed", self._cause(error)
            self.say(f"failed: {self.start.cause.message}")
            if self.start.cause.advice:
                self.say(f"advice: {self.start.cause.advice}")
        except BaseException:
            self.start.status = "interrupted"
            raise
        finally:
            with self.presses.held():
                self.start.ended = now()
                self.job.save()
        return self.start.cause

    def _serve(self, cells: Sequence[Cell]) -> None:
        """Everything that needs the hosts; when it returns or raises, nothing of the service is left on them."""
        from nsysk3.launch.open_hosts import open_hosts

        for text in self.plan.warnings:
            self.say(f"warning: {text}")
        self.say(f"start {self.start.attempt}, {counted(len(cells), 'repeat')} to measure")
        opened: list[Host] = []
        try:
            with open_hosts(self.plan.settings, self.plan.run_id, [node.host for node in self.plan.nodes]) as hosts:
                opened += hosts
                try:
                    self._on_hosts(hosts, cells)
                except BaseException:
                    for host in hosts if self.presses.now else ():
                        host.close(now=True)
                    raise
        finally:
            with self.presses.held():
                closed = [host.close(now=self.presses.now) for host in opened]  # already: this tells how that went
            for line in (line for lines in closed for line in lines):
                self.say(f"WARNING: could not be ended: {line}")
        self._released()

    def _on_hosts(self, hosts: Sequence[Host], cells: Sequence[Cell]) -> None:
        from nsysk3.launch.preflight import preflight
        from nsysk3.launch.service import Service

        found = preflight(self.plan, hosts)
        for check in found.problems:
            self.say(f"{check.level}: {check.host}: {check.problem}")
        found.raise_if_fatal()
        service = Service(self.plan, hosts, self.job.folder.service(self.layout, self.start.attempt), self.say)
        self._snapshot(service, "before")
        try:
            with service:
                self.start.startup_s = service.healthy_after_s
                self._checked(service, found.versions())
                self._snapshot(service, "healthy")
                self._measure(service, cells)
                self._snapshot(service, AFTER)
        finally:
            with suppress(NsysK3Error):
                self._snapshot(service, "cleaned")

    def _checked(self, service: Service, versions: dict[str, str]) -> None:
        """Keep what the server says of itself; raises RunFailedError where that is not what was asked for."""
        from nsysk3.launch.server_info import admission, redacted

        folder = self.job.folder
        _write_json(folder, self.layout, "server_info.json", redacted(service.info))
        _write_json(folder, self.layout, "service.json", _service(self.plan))
        if wrong := service.check():
            raise LayoutFailedError("not-as-asked", f"the server is not what was asked for: {'; '.join(wrong)}")
        facts = facts_of(service.info, versions)
        self._drifted(facts)
        self.known.facts = facts
        self.start.notes += [f"{self.layout.label}: {text}" for text in unlike(self.known, self.job.record.layouts)]
        admitted = admission(service.info)
        if admitted:
            self.known.micro_batch = {
                "resolved": admitted.micro_batch,
                "slots": admitted.slots,
                "admits": admitted.admits,
            }
            for concurrency in self.job.matrix.concurrency:
                meaning = admitted.meaning(concurrency)
                self.say(meaning)
                if admitted.admits < concurrency:
                    self.start.notes.append(f"{self.layout.label}: {meaning}")
        for note in self.start.notes:
            self.say(f"note: {note}")
        self.job.save()

    def _drifted(self, facts: dict[str, Any]) -> None:
        """Repeats of two servers stand in one median: every report says so."""
        done = {row.layout.key for row in self.job.folder.results() if row.status == DONE}
        if self.layout.key not in done:
            return
        for text in drift(self.known.facts, facts):
            note = f"{self.layout.label}: {text}: its repeats are of different servers"
            self.say(f"WARNING: {note}")
            self.job.record.notes = list(dict.fromkeys([*self.job.record.notes, note]))

    def _measure(self, service: Service, cells: Sequence[Cell]) -> None:
        """Warm up, then every repeat; raises ServerFailedError when the server dies."""
        load, requests = self.plan.settings.load, self.job.matrix.requests
        if load.warmup:
            self.say(f"warming up with {counted(load.warmup, 'request')}")
            first = self._send(service, cells[0].concurrency, load.warmup, load.seed + _WARMUP_SEED, None)
            if not first.completed:
                if failure := service.wait(service.failure, _DEATH_S, fail=False):
                    raise service.failed(failure, "died in the warm-up")
                why = (first.errors or ["no reason given"])[0]
                raise LayoutFailedError("requests", f"no request of the warm-up completed: {why}")
        for cell in cells:
            seed = load.seed + 1000 * cell.concurrency + cell.repeat
            row = run_repeat(
                self.job.folder,
                cell,
                partial(self._send, service, cell.concurrency, requests, seed),
                requests=requests,
                load=load,
                attempt=self.start.attempt,
                say=self.say,
            )
            # Requests fail a moment before the death of their server is seen.
            failure = service.failure() if row.status == DONE else service.wait(service.failure, _DEATH_S, fail=False)
            if failure:
                raise service.failed(failure, "died under load")
            self.failed_cells += row.status != DONE
            if not row.completed:
                raise LayoutFailedError("requests", f"no request completed at C={cell.concurrency}: {row.cause}")

    def _send(
        self, service: Service, concurrency: int, requests: int, seed: int, done: Callable[[int], None] | None
    ) -> LoadResult:
        from nsysk3.launch.load import run_load
        from nsysk3.launch.sglang_bench import run_sglang_bench

        load = self.plan.settings.load
        if load.client == "sglang" and done is not None:
            return run_sglang_bench(service, requests=requests, concurrency=concurrency, seed=seed)
        return run_load(
            service.url, input_len=load.input_len, output_len=load.output_len, concurrency=concurrency,
            requests=requests, seed=seed, timeout_s=load.request_timeout_s, on_done=done, lost=service.lost,
        )  # fmt: skip

    def _snapshot(self, service: Service, label: str) -> None:
        """What nvidia-smi says now, in ``gpu/``; hosts without one are written down once."""
        for reason in service.snapshot(label):
            self.known.not_measured.setdefault("peak_memory_mib", reason)
        for node in self.plan.nodes:
            taken = service.folder / "nodes" / node.host / f"gpu_{label}.csv"
            if taken.is_file():
                target = self.job.folder.gpu(self.layout, label, node.host)
                make_room(target)
                shutil.move(taken, target)

    def _released(self) -> None:
        """Whether the GPUs are as empty as before."""
        for node in self.plan.nodes:
            before, after = (
                {index: used for index, used, _ in read_snapshot(self.job.folder.gpu(self.layout, label, node.host))}
                for label in ("before", "cleaned")
            )
            kept = {index: after[index] - used for index, used in before.items() if index in after}
            if left := {index: more for index, more in kept.items() if more > _RELEASED_MIB}:
                worst = max(left, key=lambda index: left[index])
                self.say(f"note: GPU {worst} of {node.host} holds {left[worst]:,} MiB more than before the service")

    def _cause(self, error: NsysK3Error) -> Cause:
        from nsysk3.launch.failures import ServerFailedError

        step = "loading" if self.start.startup_s is not None else "starting"
        if isinstance(error, ServerFailedError):
            failure = error.failure
            return Cause(
                step=step, kind=failure.kind, message=failure.message,
                advice=further(failure.kind, failure.advice, self.layout), line=failure.line,
            )  # fmt: skip
        if isinstance(error, MissingToolError):  # of a host that cannot be reached, or lacks something
            return Cause(step="preflight", kind="preflight", message=str(error))
        return Cause(step=step, kind=getattr(error, "kind", "unknown"), message=str(error))


def _known(record: Record, layout: Layout) -> LayoutRecord:
    known = record.of(layout)
    if known is None:
        known = LayoutRecord(pp=layout.pp, tp=layout.tp, ep=layout.ep, args=list(layout.args))
        record.layouts.append(known)
    return known


def _service(plan: Plan) -> dict[str, Any]:
    """The configuration of a service as it may be kept."""
    from nsysk3.run.redact import redact, redact_argv

    nodes = [
        {
            "host": node.host, "node_rank": node.node_rank, "argv": redact_argv(node.argv), "container": node.container,
            "env": {name: redact(name, value) for name, value in node.env.items()},
            "ranks": [rank.model_dump(exclude_none=True) for rank in node.ranks],
        }
        for node in plan.nodes
    ]  # fmt: skip
    return {"pp": plan.pp, "tp": plan.tp, "ep": plan.ep, "url": plan.url, "expected": plan.expected, "nodes": nodes}


def _write_json(folder: Folder, layout: Layout, name: str, document: object) -> None:
    path = folder.metadata(layout, name)
    make_room(path)
    write_text(path, json.dumps(document, indent=1, default=str) + "\n")
