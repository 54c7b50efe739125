"""A Dask scheduler and workers as processes of their own, to be killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from processes import eventually


class DaskProcesses:
    """A scheduler at ``address`` and ``workers``, whose folders lie under ``folder``; nothing starts them again."""

    def __init__(self, folder: Path, workers: int) -> None:
        self._folder = folder
        self.scheduler = self._started("scheduler", "--port", "0", "--scheduler-file", folder / "file.json")
        assert eventually(lambda: self._log("scheduler").find("Scheduler at:") >= 0, 60), self._log("scheduler")
        self.address = self._log("scheduler").partition("Scheduler at:")[2].split()[0]
        self.workers: list[subprocess.Popen[bytes]] = []
        for _ in range(workers):
            self.join()

    def join(self) -> None:
        """One worker more."""
        self.workers.append(
            self._started("worker", self.address, "--nthreads", "1", "--no-nanny", "--local-directory", self._folder)
        )

    def lose_workers(self) -> None:
        """Kill all workers there are."""
        for each in self.workers:
            each.kill()
            each.wait()

    def stop_workers(self) -> None:
        """Let all workers there are hang, as long as they live."""
        for each in self.workers:
            each.send_signal(signal.SIGSTOP)

    def lose_scheduler(self) -> None:
        """Kill the scheduler."""
        self.scheduler.kill()
        self.scheduler.wait()

    def scratch(self) -> list[Path]:
        """What workers keep of runs."""
        return list(self._folder.rglob("nsysk3-*"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.lose_workers()
        self.lose_scheduler()

    def _started(self, what: str, *options: object) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", f"distributed.cli.dask_{what}", *map(str, options), "--no-dashboard"]
        if what == "scheduler":
            command += ["--host", "127.0.0.1"]
        with (self._folder / f"{what}.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def _log(self, what: str) -> str:
        return (self._folder / f"{what}.log").read_text()
