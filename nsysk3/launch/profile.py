"""One command from a plan to an analysed run directory: start, load, capture, stop, collect, clean up."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nsysk3.errors import InputError, InterruptedRunError, NsysK3Error, RunFailedError
from nsysk3.launch.analysis import analyze_run
from nsysk3.launch.collect import collect, keep_capture
from nsysk3.launch.collected import Collected, raise_if_useless
from nsysk3.launch.features import told
from nsysk3.launch.interrupts import Presses, interrupts
from nsysk3.launch.journal import Journal
from nsysk3.launch.loads import Loads
from nsysk3.launch.open_hosts import open_hosts
from nsysk3.launch.overhead import overhead, sentence
from nsysk3.launch.parallel import apart
from nsysk3.launch.plan import Plan, make_plan
from nsysk3.launch.preflight import Preflight
from nsysk3.launch.preflight import preflight as look
from nsysk3.launch.record import planned_manifest
from nsysk3.launch.server_info import admission, redacted, unreported
from nsysk3.launch.service import Service
from nsysk3.launch.window import Window, capture, captures_by_range, wait_written
from nsysk3.run.files import write_text
from nsysk3.run.manifest import HostClock
from nsysk3.run.redact import redact_argv

if TYPE_CHECKING:
    from nsysk3.launch.hosts import Host

Say = Callable[[str], None]
# Steps at which the capture is whole on the hosts and not here yet.
CAPTURED = ("draining", "stopping", "collecting")


def run_profile(
    plan: Plan,
    out: Path,
    *,
    say: Say,
    analyze: bool = True,
    report: bool = True,
    summary: bool = True,
    preflight: Literal["stop", "go on", "skip"] = "stop",
    show: Callable[[Preflight], None] | None = None,
) -> Path:
    """Run a plan into the directory ``out`` and return it; whatever happens, nothing of the run is left running.

    Args:
        plan: a profiled plan (``make_plan``).
        out: a directory to make, or an empty one.
        say: told what happens, a line each.
        analyze: analyse the traces afterwards.
        report: and write report.html.
        summary: and print what was found.
        preflight: what to do about a fatal problem of a host: stop, go on all the same, or not to look at all.
        show: gets what preflight found.

    Raises:
        InputError: the directory cannot be made, or holds something.
        MissingToolError, RunFailedError: with the reason and the way out; ``run.json`` has both, too.
        InterruptedRunError: Ctrl-C, SIGTERM or SIGHUP.
    """
    with interrupts() as presses:
        journal: Journal | None = None
        try:
            manifest = planned_manifest(plan)
            _claim(out)
            journal = Journal(out, manifest)
            run = _Run(plan, out, _unbreakable(say), journal, presses)
            run.measure(preflight, show)
            if analyze:
                analyze_run(out, journal, run.say, report=report, expect_kernels=run.has_gpus, summary=summary)
            journal.step("done")
        except KeyboardInterrupt:
            presses.ignore()
            left = _what_is_left(journal)
            error = InterruptedRunError(f"interrupted by {presses.name or 'Ctrl-C'}; {left}; see {out}")
            if journal:
                journal.fail(error)
            raise error from None
        except BaseException as error:
            presses.ignore()
            if journal:
                journal.fail(error)
            raise
    return out


class _Run:
    """The steps, in order."""

    def __init__(self, plan: Plan, out: Path, say: Say, journal: Journal, presses: Presses) -> None:
        self.plan = plan
        self.out = out
        self.say = say
        self.journal = journal
        self.presses = presses
        self.has_gpus = any("--capture-range" in word for node in plan.nodes for word in node.argv)
        self.loads = Loads(plan, out, say)

    def measure(self, preflight: str, show: Callable[[Preflight], None] | None) -> None:
        """Everything that needs the hosts; when it returns or raises, nothing of the run is left on them."""
        plan, journal = self.plan, self.journal
        cluster = plan.settings.cluster
        reach = cluster.model_dump(include={"launcher", "scratch", "python", "port", "dist_port"})
        journal.update(cluster=reach | {"ssh_options": redact_argv(cluster.ssh_options)})  # for `nsysk3 cleanup`
        journal.step("preflight")
        opened: list[Host] = []
        try:
            with open_hosts(plan.settings, plan.run_id, [node.host for node in plan.nodes]) as hosts:
                opened += hosts
                try:
                    if preflight != "skip":
                        self.look_at(hosts, stop=preflight == "stop", show=show)
                    self.profile(hosts)
                except BaseException as error:
                    captured = journal.status in CAPTURED
                    journal.fail(error if not isinstance(error, KeyboardInterrupt) else self.interrupted())
                    for node, host in zip(plan.nodes, hosts, strict=True):
                        if not isinstance(error, Exception):  # whoever ends a run wants nothing of it
                            host.keep_nothing()
                        elif captured:
                            keep_capture(node, host, self.out)
                    if self.presses.now:
                        for host in hosts:
                            host.close(now=True)
                    raise
        except KeyboardInterrupt:
            journal.fail(self.interrupted())
            raise
        finally:
            with self.presses.held():
                self.closed(opened)

    def closed(self, hosts: Sequence[Host]) -> None:
        """Say and write down what is left on hosts that are closed."""
        left = [line for host in hosts for line in host.close(now=self.presses.now)]  # it only tells how that went
        for line in left:
            self.say(f"WARNING: could not be ended: {line}")
        kept = [f"{host.name}:{path}" for host in hosts for path in host.kept]
        for line in kept:
            self.say(f"WARNING: kept, for it did not come: {line}; `nsysk3 cleanup {self.out}` removes it")
        self.journal.cleaned(left, kept)

    def look_at(self, hosts: Sequence[Host], *, stop: bool, show: Callable[[Preflight], None] | None) -> None:
        found = apart(lambda: look(self.plan, hosts, say=self.say))
        if show:
            show(found)
        self.journal.update(versions=found.versions(), clocks=found.clocks)
        if stop:
            found.raise_if_fatal()

    def profile(self, hosts: Sequence[Host]) -> None:
        plan, journal = self.plan, self.journal
        journal.step("starting")
        self.say(
            f"starting PP{plan.pp} TP{plan.tp} EP{plan.ep} on {', '.join(node.host for node in plan.nodes)}; "
            f"limit {plan.settings.server.start_timeout_s:g} s, logs in {self.out}/nodes/"
        )
        service = Service(plan, hosts, self.out, self.say)
        no_gpus = service.snapshot("before")
        with service:
            journal.step("healthy")
            self.healthy(service)
            service.snapshot("healthy")
            record, window, mark = self.load(service)
            service.snapshot("after")
            clocks = self.clocks(hosts)
            written = wait_written(service, mark, self.say) if captures_by_range(service) and window.closed_by else True
            journal.step("stopping")
            self.say("stopping the server")
        journal.update(features=told(journal.features, service.logs(), pp=plan.pp), clocks=clocks)
        journal.step("collecting")
        notes = list(window.notes)
        if not written:
            how = "ended before it had written its report" if service.failure() else "was still writing when stopped"
            notes.append(f"nsys {how}")
        collected = collect(plan, hosts, self.out, self.say, expect_kernels=self.has_gpus)
        try:
            self.collected(collected, [*notes, *no_gpus])
        finally:  # what could not be written for a full disk is told first
            with suppress(NsysK3Error):
                service.snapshot("cleaned")
        journal.step("exported")
        self.cost(hosts, record, window)

    def healthy(self, service: Service) -> None:
        """Is this the server that was asked for?  Raises RunFailedError when it is another."""
        plan, info = self.plan, service.info
        write_text(self.out / "server_info.json", json.dumps(redacted(info), indent=1, default=str) + "\n")
        # An engine that brings its own model has no path in the plan.
        named = info.get("model_path") if plan.settings.model.path is None else None
        server: dict[str, Any] = {"model_path": named} if named else {}
        notes = []
        admits = admission(info)
        if admits:
            server["pp_max_micro_batch_size"] = admits.micro_batch
            meaning = admits.meaning(plan.settings.load.concurrency)
            self.say(meaning)
            notes.append(meaning)
        if silent := unreported(info, plan.expected):
            notes.append(f"this server's {service.info_endpoint} does not tell {', '.join(silent)}: not checked")
        self.journal.update(
            server=server,
            versions={"server": info.get("version")},
            measured={"healthy_after_s": service.healthy_after_s},
            notes=notes,
        )
        if wrong := service.check():
            raise RunFailedError(
                f"the server is not the one that was asked for: {'; '.join(wrong)}; SGLang may have replaced an option "
                f"(its log says why), or another server answers at {service.url}"
            )

    def load(self, service: Service) -> tuple[dict[str, Any], Window, list[int]]:
        """Warm up, measure without the capture, then with it; the record of the latter."""
        journal, loads, settings = self.journal, self.loads, self.plan.settings
        if settings.load.warmup:
            journal.step("warming")
            loads.warm_up(service)
        journal.step("loading")
        if settings.window.overhead != "off":
            loads.run(service, "baseline")
            journal.update(measured={"loads": loads.summary()})
        mark = service.mark()
        result, window = capture(
            service, loads.profiled(service), steady_after=loads.steady_after, on_step=self.reached, say=self.say
        )
        loads.keep("window", result)
        measured = {"loads": loads.summary(), "window": window.record()}
        journal.update(measured=measured, notes=[*window.notes, *loads.notes()])
        return result.record, window, mark

    def reached(self, step: str) -> None:
        if step == "window":
            self.journal.step("window")
        elif step == "draining":
            self.journal.step("draining")

    def clocks(self, hosts: Sequence[Host]) -> list[HostClock]:
        """The clocks again, after the window: with those of preflight they tell the drift."""
        known = []
        for host in hosts if len(hosts) > 1 else ():
            clock = host.clock()
            known.append(
                HostClock(
                    host=host.name,
                    offset_ns=clock.offset_ns,
                    uncertainty_ns=clock.uncertainty_ns,
                    when="after the window",
                )
            )
        return known

    def collected(self, nodes: Sequence[Collected], notes: Sequence[str]) -> None:
        problems = [problem for node in nodes for problem in node.problems]
        for problem in problems:
            self.say(f"WARNING: {problem}")
        self.journal.update(reports=[node.record(self.out) for node in nodes], notes=[*notes, *problems])
        raise_if_useless(nodes, {rank.world_rank for node in self.plan.nodes for rank in node.ranks}, self.out)

    def cost(self, hosts: Sequence[Host], record: dict[str, Any], window: Window) -> None:
        """What the profiler cost, told and kept; runs the load on a plain server where that was asked for."""
        settings = self.plan.settings
        if settings.window.overhead == "server":
            self.say("the same load on a server without nsys")
            plan = self.plan
            plain = make_plan(
                settings, pp=plan.pp, tp=plan.tp, ep=plan.ep, run_id=plan.run_id, profiled=False,
                extra_args=plan.extra_args,
            )  # fmt: skip
            with Service(plain, hosts, self.out / "plain", self.say, name="plain", new_scratch=False) as service:
                self.loads.warm_up(service)
                self.loads.run(service, "plain")
        baseline, plain_load = self.loads.record("baseline"), self.loads.record("plain")
        found = overhead(record, window, baseline, plain_load, ranged=self.has_gpus)
        self.say(sentence(found))
        self.journal.update(measured={"overhead": found, "loads": self.loads.summary()})

    def interrupted(self) -> InterruptedRunError:
        return InterruptedRunError(f"ended by {self.presses.name or 'Ctrl-C'} while {self.journal.status}")


def _claim(out: Path) -> None:
    """Make a run's directory; of two runs that want the same, one gets it.  Raises InputError."""
    try:
        out.mkdir(parents=True)
    except FileExistsError as error:
        if not out.is_dir() or any(out.iterdir()):
            raise InputError(f"{out}: is no empty directory; give another --out") from error
    except OSError as error:
        raise InputError(f"{out}: cannot be made ({error.strerror}); give another --out") from error


def _what_is_left(journal: Journal | None) -> str:
    left = journal.left if journal else []
    return f"could not be ended: {', '.join(left)}" if left else "nothing of the run is left running"


def _unbreakable(say: Say) -> Say:
    """A terminal that went away must not keep a run from cleaning up."""

    def told(text: str) -> None:
        with suppress(OSError):
            say(text)

    return told
