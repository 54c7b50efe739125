"""All that a run has on a host, and how it ends.  The keeper's: runs on hosts, Python 3.8, standard library only."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsysk3.launch.keeper_children import Children
from nsysk3.launch.keeper_processes import Stat, carries, describe, end, family

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

HELPER_S = 30.0  # longest that one command of docker or podman may take
MARK = ".nsysk3-run"  # in a scratch folder: the run and the keeper that made it
# Signals processes inside a container.  $1: the signal.  $2: "" for those directly below nsys, or PID 1 where there is
# no nsys; "all" for all but nsys.  Prints how many are nsys.  Needs no more than a shell.
INSIDE = r"""
signum=$1 which=$2 nsys=" "
look() {
  name= parent=
  while read -r key value rest; do
    case $key in Name:) name=$value ;; PPid:) parent=$value ;; esac
  done <"/proc/$1/status"
} 2>/dev/null
for pid in /proc/[0-9]*; do
  pid=${pid#/proc/}; look "$pid"
  case $name in nsys | nsys-* | QdstrmImporter) nsys="$nsys$pid " ;; esac
done
for pid in /proc/[0-9]*; do
  pid=${pid#/proc/}; look "$pid"
  [ -n "$name" ] && [ "$pid" != $$ ] && [ "$parent" != $$ ] || continue
  case $nsys in *" $pid "*) continue ;; esac
  case $which in
  "") case $nsys in *" $parent "*) ;; " ") [ "$pid" = 1 ] || continue ;; *) continue ;; esac ;;
  esac
  kill -"$signum" "$pid" 2>/dev/null
done
set -- $nsys
echo $#
"""


class Containers:
    """Containers through the command line of docker or podman."""

    def __init__(self, children: Children, cli: list[str], run: str) -> None:
        self.children = children
        self.cli = cli
        self.label = f"label=nsysk3.run={run}"

    def _run(self, *words: str) -> tuple[int, str, str]:
        return self.children.run([*self.cli, *words], HELPER_S, helper=True)

    def names(self) -> set[str]:
        """Names of the run's containers, running or not.  Raises OSError when they cannot be listed."""
        code, out, err = self._run("ps", "--all", "--filter", self.label, "--format", "{{.Names}}")
        if code:
            raise OSError(f"{' '.join(self.cli)} ps: {err.strip()[-300:] or f'exit {code}'}")
        return set(out.split())

    def signal(self, name: str, signum: int, which: str) -> int:
        """Signal processes inside (``INSIDE``): how many are nsys."""
        code, out, _ = self._run("exec", name, "sh", "-c", INSIDE, "sh", str(int(signum)), which)
        return int(out) if code == 0 and out.strip().isdecimal() else 0

    def stop(self, name: str, grace_s: float, report_s: float, hurried: Callable[[], bool]) -> None:
        """End the server in a container, then its profiler, then the container (see ``end``)."""
        if grace_s > 0 and not hurried() and name in self.names():
            self.signal(name, signal.SIGTERM, "")
            if self._wait(name, grace_s, hurried):
                return
            if self.signal(name, signal.SIGKILL, "all") and self._wait(name, report_s, hurried):
                return
        self._remove(name)

    def _wait(self, name: str, wait_s: float, hurried: Callable[[], bool]) -> bool:
        began = time.monotonic()
        while time.monotonic() < began + wait_s and not hurried():
            if name not in self.names():
                return True
            self.children.pause(min(0.5, 0.1 + (time.monotonic() - began) / 10))
        return False

    def _remove(self, name: str) -> None:
        # Podman waits ten seconds for what it removes, unless told not to; docker has no such option.
        self._run("kill", name)
        self._run("rm", "--force", *(["--time=0"] if self.cli[-1].endswith("podman") else []), name)

    def remove(self, name: str) -> bool:
        """Whether the container is gone.  One that was being made when its maker was killed may appear late."""
        absent = 0
        for _ in range(6):
            if name in self.names():
                absent = 0
                self._remove(name)
            else:
                absent += 1
                if absent == 2:
                    return True
                self.children.pause(0.1)
        return False


def make_folder(path: Path, run: str, token: str) -> None:
    """Make a scratch folder that says from its first moment whose it is.  Raises OSError when something is there."""
    if os.path.lexists(path):
        raise FileExistsError(17, "is there already; `nsysk3 cleanup` removes what a run left", str(path))
    beside = path.with_name(f"{path.name}.{token}")
    beside.mkdir(0o700)
    (beside / MARK).write_text(f"{run}\n{token}\n", "utf-8")
    beside.rename(path)


def owner_of(path: Path) -> list[str]:
    """The run and the keeper that made a folder; empty where it is not one of ours."""
    try:
        if path.is_symlink() or path.lstat().st_uid != os.getuid():
            return []
        return (path / MARK).read_text("utf-8").split()
    except (OSError, UnicodeDecodeError):
        return []


def remove_folder(path: Path, token: str, kept: Collection[str] = ()) -> list[str]:
    """Remove what ``make_folder`` made, also when it was interrupted; gives what could not be removed.

    Of a folder that holds files of ``kept`` those stay, and its mark, by which `nsysk3 cleanup` finds it.
    """
    beside = path.with_name(f"{path.name}.{token}")
    if beside.is_dir() and not beside.is_symlink():
        shutil.rmtree(beside, ignore_errors=True)
    return remove_tree(path, kept) if owner_of(path)[1:] == [token] else []


def remove_tree(path: Path, kept: Collection[str] = ()) -> list[str]:
    """Remove a folder of ours but for ``kept``; gives a line when something else of it stays."""
    failed: list[str] = []
    places, staying = {Path(each) for each in kept}, False  # as paths: a folder may be named with two slashes
    try:
        # The mark goes last: what is interrupted here can be found again.
        for each in sorted(path.iterdir(), key=lambda entry: entry.name == MARK):
            if (failed or staying) and each.name == MARK:
                return failed[:1]
            if each in places:
                staying = True
            elif each.is_dir() and not each.is_symlink():
                shutil.rmtree(each, ignore_errors=True)
                failed += [f"{each}: cannot be removed"] if each.exists() else []
            else:
                each.unlink()
        path.rmdir()
    except OSError as error:
        failed.append(f"{error.filename}: cannot be removed ({error.strerror})")
    return failed[:1]


def folders_of(scratch: str, run: str) -> list[Path]:
    """Scratch folders in ``scratch`` that a run left."""
    return [path for path in sorted(Path(scratch).glob(f"nsysk3-{run}*")) if owner_of(path)[:1] == [run]]


class Possessions:
    """All that a run has on this host, as the keeper and its guard know it, and how it ends."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.run: str = settings["run"]
        self.token: str = settings["token"]
        self.children = Children()
        self.containers = Containers(self.children, settings["cli"], self.run)
        # Those of an earlier keeper, whose token this one then has too.
        self.named: set[str] = set(settings["containers"])
        self.folders: set[str] = set(settings["folders"])
        self.kept: set[str] = set(settings["kept"])

    def note(self, kind: str, name: str) -> None:
        """Remember a container or folder, before it is made, or which file is to stay when the run ends."""
        if kind == "drop":
            self.kept.discard(name)
        else:
            {"container": self.named, "folder": self.folders, "keep": self.kept}[kind].add(name)

    def mark(self, name: str = "") -> str:
        """In the environment of processes: which keeper's they are, and what they were started as."""
        return f"{self.token}/{name}"

    def processes(self) -> dict[int, Stat]:
        """All processes of this keeper's run."""
        own, mark = os.getpid(), f"NSYSK3_KEEPER={self.mark()}".encode()
        return family(lambda stat: stat.parent == own or carries(stat.pid, mark), {own, os.getppid()})

    def end(self, grace_s: float, hurried: Callable[[], bool]) -> list[str]:
        """End everything; gives what could not be ended."""
        left: list[str] = []
        try:
            for name in sorted(self.named):
                self.containers.stop(name, grace_s, grace_s, hurried)
        except OSError as error:
            left.append(str(error))
        left += [
            f"{describe(stat)} does not end"
            for stat in end(self.processes, grace_s, grace_s, self.children.pause, hurried).values()
        ]
        try:
            left += [
                f"container {name} does not end" for name in sorted(self.named) if not self.containers.remove(name)
            ]
        except OSError as error:
            left.append(str(error))
        for folder in sorted(self.folders):
            left += remove_folder(Path(folder), self.token, self.kept)
        return sorted(set(left))
