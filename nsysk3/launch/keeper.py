"""Watches over a run on one host: starts its processes, follows them, and ends them whatever happens.

nsysk3 sends this file and the other ``keeper_*.py`` to the host's Python (3.8 or newer, standard library only) and
talks to it in lines of JSON: a request is ``{"id": 1, "op": "poll", ...}``, its answer ``{"id": 1, "ok": ...}`` or
``{"id": 1, "error": "..."}``, or ``{"id": 1, "raw": 9}`` and then that many bytes.  Requests are answered as they are
done, not in order.

Two processes run it.  The keeper does the work.  The guard, its parent, waits for it and ends the run when the keeper
is killed or stuck.  Both are child subreapers: what a process of the run starts stays their descendant, however it
detaches.
"""

from __future__ import annotations

import base64
import codecs
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from nsysk3.launch.keeper_children import Child, failure
from nsysk3.launch.keeper_guard import LEFT, become_subreaper, drain, guard, wakeup
from nsysk3.launch.keeper_possessions import Containers, Possessions, folders_of, make_folder, remove_tree
from nsysk3.launch.keeper_processes import Stat, ancestors, carries, describe, end, family

CHUNK = 1 << 20  # bytes of a file in one answer
TAIL = 256 << 10  # bytes of a log in one answer


class Started:
    """A process that was started under a name."""

    def __init__(self, child: Child, log: str, container: str | None) -> None:
        self.child = child
        self.log = log
        self.container = container


class Keeper:
    """Answers requests until it is told to end, or nobody is there any more."""

    def __init__(self, settings: dict[str, Any], guard: int) -> None:
        self.settings = settings
        self.guard = guard
        self.own = Possessions(settings)
        self.children = self.own.children
        self.started: dict[str, Started] = {}
        self.heard = time.monotonic()
        self.grace_s: float | None = None  # set when the end has come
        self.hurry = False
        self.writing = threading.Lock()
        self.waker, self.wake = wakeup()

    def main(self) -> int:
        """Serve, end everything, and say what could not be ended."""
        threading.Thread(target=self._listen, daemon=True).start()
        self._say({"hello": self.settings["token"]})
        while self.grace_s is None:
            select.select([self.waker], [], [], 1.0)
            self._look()
            self.children.reap()
            if time.monotonic() > self.heard + self.settings["silence_s"]:
                self._finish(self.settings["grace_s"])
        self.children.close()
        left = self.own.end(self.grace_s, self._hurried)
        # Whoever should read this may be gone or stopped.
        last = threading.Thread(target=self._say, args=({"ended": left},), daemon=True)
        last.start()
        last.join(2.0)
        return LEFT if left else 0

    def _finish(self, grace_s: float, hurry: bool | None = None) -> None:
        """The end has come; unless told otherwise, a second time means that there is less time for it."""
        self.hurry |= self.grace_s is not None if hurry is None else hurry
        if self.grace_s is None:
            self.grace_s = grace_s

    def _look(self) -> None:
        """See which signals have come."""
        for signum in drain(self.waker):
            if signum in (signal.SIGTERM, signal.SIGHUP):
                self._finish(self.settings["grace_s"])

    def _hurried(self) -> bool:
        self._look()
        return self.hurry

    def _listen(self) -> None:
        """Read requests.  Nothing here may wait for anything else, so that the end of the input is always noticed."""
        for line in sys.stdin.buffer:
            arrived = time.time_ns()
            self.heard = time.monotonic()
            try:
                request = json.loads(line)
            except ValueError:
                break  # not ours any more
            if request["op"] == "ping":
                self._say({"id": request["id"], "ok": [arrived, time.time_ns()]})
            elif request["op"] == "end":
                self.own.kept = set(request["kept"])
                self._finish(request["grace_s"], request["grace_s"] <= 0)
                os.write(self.wake, b"\0")
            elif request["op"] != "beat":
                threading.Thread(target=self._answer, args=(request,), daemon=True).start()
        self._finish(self.settings["grace_s"])
        os.write(self.wake, b"\0")

    def _answer(self, request: dict[str, Any]) -> None:
        number, operation = request.pop("id"), request.pop("op")
        try:
            result = getattr(self, "do_" + operation)(**request)
        except OSError as error:
            self._say({"id": number, "error": failure([operation], error)})
        except Exception as error:  # an answer is owed whatever happens
            self._say({"id": number, "error": f"{operation}: {type(error).__name__}: {error}"})
        else:
            raw = result if isinstance(result, bytes) else b""
            self._say({"id": number, "raw": len(raw)} if result is raw else {"id": number, "ok": result}, raw)

    def _say(self, message: dict[str, Any], raw: bytes = b"") -> None:
        """Write a line and the bytes that it announces.  The first begins a new one: a shell may have left half."""
        data = ("\n" if "hello" in message else "") + json.dumps(message) + "\n"
        try:
            with self.writing:
                sys.stdout.buffer.write(data.encode() + raw)
                sys.stdout.buffer.flush()
        except OSError:
            pass  # the end of the input tells the rest

    def _tell_guard(self, kind: str, name: str) -> None:
        os.write(self.guard, json.dumps([kind, name]).encode() + b"\n")
        self.own.note(kind, name)

    def _environment(self, env: dict[str, str] | None, name: str = "") -> dict[str, str]:
        return {**os.environ, **(env or {}), "NSYSK3_RUN": self.own.run, "NSYSK3_KEEPER": self.own.mark(name)}

    def _members(self, name: str) -> dict[int, Stat]:
        """Processes of what was started as ``name``."""
        child, mark = self.started[name].child, f"NSYSK3_KEEPER={self.own.mark(name)}\0".encode()
        return family(
            lambda stat: (stat.pid == child.pid and child.code is None) or carries(stat.pid, mark),
            {os.getpid(), os.getppid()},
        )

    def do_run(
        self,
        argv: list[str],
        env: dict[str, str] | None,
        cwd: str | None,
        timeout_s: float,
        data: str,
        container: str | None,
    ) -> tuple[int, str, str]:
        """Run a command to its end."""
        if container is not None:
            self._tell_guard("container", container)
        done = self.children.run(argv, timeout_s, base64.b64decode(data), self._environment(env), cwd)
        if container is not None and done[0] == 124:
            self.own.containers.remove(container)  # only the command before it was killed
        return done

    def do_start(
        self, name: str, argv: list[str], env: dict[str, str] | None, cwd: str | None, log: str, container: str | None
    ) -> int:
        """Start a process that goes on; its output goes to ``log`` by itself, so it never waits for us."""
        before = self.started.get(name)
        if before is not None and before.child.code is None:
            raise OSError(f"{name} runs already")
        if container is not None:
            self._tell_guard("container", container)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        output = os.open(log, flags, 0o600)
        try:
            child = self.children.start(
                argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=self._environment(env, name), cwd=cwd
            )
        finally:
            os.close(output)
        self.started[name] = Started(child, log, container)
        return child.pid

    def do_poll(self, name: str) -> int | None:
        """Exit code, None while it runs."""
        self.children.reap()
        return self.started[name].child.code

    def do_tail(self, name: str, offset: int) -> tuple[str, int]:
        """The log from a byte on: text and where it ends.  A character that is half there waits."""
        with Path(self.started[name].log).open("rb") as file:
            file.seek(offset)
            data = file.read(TAIL)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(data)
        return text, offset + len(data) - len(decoder.getstate()[0])

    def do_stop(self, name: str, grace_s: float, report_s: float) -> int | None:
        """End what was started as ``name``."""
        started = self.started[name]
        if started.container is not None:
            self.own.containers.stop(started.container, grace_s, report_s, self._hurried)
        end(lambda: self._members(name), grace_s, report_s, self.children.pause, self._hurried)
        return self.do_poll(name)

    def do_folder(self, path: str) -> None:
        """Make the run's scratch folder."""
        self._tell_guard("folder", path)
        make_folder(Path(path), self.own.run, self.own.token)

    def do_keep(self, path: str, kept: bool) -> None:
        """Whether a file of the scratch folder stays when the run ends, however it ends."""
        self._tell_guard("keep" if kept else "drop", path)

    def do_read(self, path: str, offset: int) -> bytes:
        """A piece of a file, empty at its end."""
        with Path(path).open("rb") as file:
            file.seek(offset)
            return file.read(CHUNK)

    def do_write(self, path: str, data: str, first: bool, last: bool, mode: int) -> None:
        """Write a file piece by piece, beside its place until it is whole."""
        beside = f"{path}.{self.own.token}"
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | (os.O_CREAT | os.O_TRUNC if first else 0)
        with os.fdopen(os.open(beside, flags, 0o600), "wb") as file:
            file.write(base64.b64decode(data))
            os.fchmod(file.fileno(), mode)
        if last:
            Path(beside).rename(path)

    def do_size(self, path: str) -> int | None:
        """Bytes of a file, None where there is none."""
        place = Path(path)
        return place.stat().st_size if place.exists() else None

    def do_remove(self, path: str) -> None:
        """Remove a file or an empty folder."""
        place = Path(path)
        if place.is_dir() and not place.is_symlink():
            place.rmdir()
        else:
            place.unlink()

    def do_leftovers(self, run: str, scratch: str, ending: bool, grace_s: float) -> list[tuple[str, str]]:
        """What another keeper's run left here; with ``ending``, what is left after ending it."""
        containers = Containers(self.children, self.settings["cli"], run)
        spare, mark = ancestors(os.getpid()), f"NSYSK3_RUN={run}\0".encode()

        def processes() -> dict[int, Stat]:
            return family(lambda stat: carries(stat.pid, mark), spare)

        if ending:
            for name in sorted(containers.names() if containers.cli else ()):
                containers.stop(name, grace_s, grace_s, self._hurried)
            end(processes, grace_s, grace_s, self.children.pause, self._hurried)
            for name in sorted(containers.names() if containers.cli else ()):
                containers.remove(name)
            for folder in folders_of(scratch, run):
                remove_tree(folder)
        found = [("process", describe(stat)) for stat in processes().values()]
        found += [("container", name) for name in sorted(containers.names() if containers.cli else ())]
        return found + [("scratch", str(folder)) for folder in folders_of(scratch, run)]


def main() -> None:
    """Read the settings, split in two, and serve."""
    settings = json.loads(sys.stdin.buffer.readline())
    become_subreaper()
    notes, noted = os.pipe()
    os.set_blocking(notes, False)
    keeper = os.fork()
    if keeper:
        os.close(noted)
        os._exit(guard(keeper, notes, settings))
    os.close(notes)
    os.setsid()
    become_subreaper()
    try:
        code = Keeper(settings, noted).main()
    except BaseException:
        traceback.print_exc()
        code = 1
    os._exit(code)  # without waiting for the thread that reads
