"""Plans whose server is tests/loopback_server.py and whose nsys is tests/fake_nsys.py."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from loopback import SERVER, free_port

from nsysk3.errors import NsysK3Error
from nsysk3.launch.plan import Plan, make_plan
from nsysk3.launch.profile import run_profile
from nsysk3.run.config import Settings

TESTS = Path(__file__).parent
FAKE_NSYS = TESTS / "fake_nsys.py"
# Of two GPUs, one a stage.
REPORT = TESTS.parent / "fixtures" / "h200" / "pp2.sqlite"
# Small requests, so that a load takes a fraction of a second: 2 forwards a request.
LOAD = {"input_len": 256, "chunk": 128, "concurrency": 2, "requests": 40, "warmup": 2, "request_timeout_s": 20}


def fake_nsys(folder: Path) -> Path:
    """The stand-in under the name that a profiler has."""
    nsys = folder / "nsys"
    if not nsys.exists():
        nsys.symlink_to(FAKE_NSYS)
    return nsys


def settings(scratch: Path, *server_args: str, **sections: dict[str, Any]) -> Settings:
    """Settings of a run on this machine that ends what hangs within seconds; its traces are those of ``REPORT``."""
    server = {"command": [sys.executable, str(SERVER)], "start_timeout_s": 30, "stop_timeout_s": 4}
    document: dict[str, Any] = {
        "cluster": {"port": free_port(), "dist_port": free_port(), "scratch": str(scratch), "python": sys.executable},
        "server": {**server, "args": ["--disable-radix-cache", "--speed", "20", *server_args]},
        "load": LOAD,
        "nsys": {"path": str(fake_nsys(scratch))},
        "env": {"FAKE_NSYS_REPORT": str(REPORT)},
    }
    for name, values in sections.items():
        document[name] = {**document.get(name, {}), **values}
    return Settings.model_validate(document)


def plan_of(given: Settings, run_id: str, *, pp: int = 2, tp: int = 1, profiled: bool = True) -> Plan:
    """A plan of them."""
    return make_plan(given, pp=pp, tp=tp, run_id=run_id, profiled=profiled)


def processes_of(run_id: str) -> list[tuple[int, str]]:
    """Processes that carry a run's mark or have its id on their command line; this one and zombies apart."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        with suppress(OSError):
            words = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
            marked = f"NSYSK3_RUN={run_id}\0".encode() in (folder / "environ").read_bytes() + b"\0"
            if words and (marked or run_id.encode() in words):
                found.append((int(folder.name), words.decode("utf-8", "replace").strip()))
    return found


def faults(*names: str) -> Sequence[str]:
    """Server arguments that make it misbehave."""
    return [word for name in names for word in ("--fault", name)]


class Run:
    """A run that has ended, well or not: what it said, its manifest, its error."""

    def __init__(self, plan: Plan, out: Path, **options: Any) -> None:
        self.out = out
        self.said: list[str] = []
        self.error: NsysK3Error | None = None
        options.setdefault("preflight", "skip")
        options.setdefault("analyze", False)
        try:
            run_profile(plan, out, say=self.said.append, **options)
        except NsysK3Error as error:
            self.error = error
        self.json: dict[str, Any] = json.loads((out / "run.json").read_text())
        assert processes_of(plan.run_id) == []
        for node in plan.nodes:
            kept = [path.partition(":")[2] for path in self.json.get("kept", ()) if path.startswith(f"{node.host}:")]
            there = [str(path) for path in Path(node.scratch).glob("*") if path.name != ".nsysk3-run"]
            assert sorted(there) == sorted(kept)
            assert Path(node.scratch).exists() == bool(kept)
        with socket.socket() as port:
            port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            port.bind(("127.0.0.1", plan.settings.cluster.port))

    def notes(self) -> str:
        return "\n".join(self.json.get("notes", ()))
