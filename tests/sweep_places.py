"""Folders in which sweeps of tests/loopback_server.py run."""

from __future__ import annotations

import csv
import json
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from command import Ran, run
from loopback import SERVER, free_port

REQUESTS = 4


@dataclass(frozen=True)
class Place:
    """A folder for sweeps, its settings, and how to run them."""

    path: Path
    port: int

    @property
    def settings(self) -> Path:
        return self.path / "nsysk3.toml"

    def words(self, *words: object, out: str = "out") -> list[str]:
        fixed = ["--config", self.settings, "--out", self.path / out, "--requests", REQUESTS]
        return ["sweep", *map(str, words), *map(str, fixed)]

    def sweep(self, *words: object, out: str = "out") -> Ran:
        return run(*self.words(*words, out=out))

    def rows(self, out: str = "out", name: str = "results.csv") -> list[dict[str, str]]:
        file = self.path / out / name
        return list(csv.DictReader(file.read_text("utf-8").splitlines())) if file.is_file() else []

    def record(self, out: str = "out") -> dict[str, Any]:
        document: dict[str, Any] = json.loads((self.path / out / "metadata" / "sweep.json").read_text("utf-8"))
        return document

    def layout(self, pp: int, out: str = "out") -> dict[str, Any]:
        found: dict[str, Any] = next(each for each in self.record(out)["layouts"] if each["pp"] == pp)
        return found


def place(path: Path, *, args: str = "", load: str = "") -> Place:
    """Settings of four GPUs whose server is the loopback one, with more of its arguments or of ``[load]``."""
    made = Place(path, free_port())
    made.settings.write_text(f"""
[cluster]
gpus_per_host = 4
port = {made.port}
dist_port = {free_port()}
[server]
command = [{json.dumps(sys.executable)}, {json.dumps(str(SERVER))}]
args = ["--speed", "400"{args}]
start_timeout_s = 60
stop_timeout_s = 5
[load]
input_len = 512
chunk = 256
warmup = 1
request_timeout_s = 20
{load}
""")
    return made


def keys(rows: list[dict[str, str]]) -> list[tuple[int, ...]]:
    """Stages, concurrency and repeat of every row."""
    return [tuple(int(row[name]) for name in ("pp", "concurrency", "repeat")) for row in rows]


def busy(port: int) -> bool:
    """Whether somebody listens there."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
