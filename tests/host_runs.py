"""Runs on hosts: how they are reached, driven by another nsysk3, and over."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

from processes import eventually, is_gone, of_run
from sshd import SshHosts

from nsysk3.launch.hosts import Host
from nsysk3.run.config import Settings


def over_ssh(found: SshHosts) -> Settings:
    """Settings that reach those."""
    cluster = {"hosts": list(found.names), "ssh_options": list(found.options), "python": "/usr/bin/python3"}
    return Settings.model_validate({"cluster": cluster})


def is_over(host: Host, run_id: str, zoo: list[int], folder: Path) -> None:
    """Nothing of a run is left."""
    assert eventually(lambda: all(is_gone(pid) for pid in zoo)), [pid for pid in zoo if not is_gone(pid)]
    assert eventually(lambda: not (folder / "scratch").exists())
    host.close()
    assert eventually(lambda: not of_run(run_id)), of_run(run_id)


DRIVER = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from nsysk3.launch import channel, hosts
from nsysk3.launch.open_hosts import open_hosts
from nsysk3.run.config import Settings
from processes import start_zoo
channel.LOST_GRACE_S, hosts.GRACE_S = 0.2, float(sys.argv[5])
settings, run, folder = Settings.model_validate_json(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
print("opening", flush=True)
with open_hosts(settings, run, settings.cluster.hosts) as opened:
    zoo = []
    for number, host in enumerate(opened):
        host.make_scratch(f"{folder}/scratch-{number}")
        zoo += start_zoo(host, folder)
    print(json.dumps(zoo), flush=True)
    opened[0].run(["sleep", "1000"], timeout_s=1000)
"""


def drive(settings: Settings, run_id: str, folder: Path, grace_s: float = 0.2) -> subprocess.Popen[str]:
    """Another nsysk3 with a zoo on every host."""
    tests = str(Path(__file__).parent)
    words = [sys.executable, "-c", DRIVER, tests, settings.model_dump_json(), run_id, str(folder), str(grace_s)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def zoo_of(driver: subprocess.Popen[str]) -> list[int]:
    """The process ids of its zoo, once it runs."""
    assert driver.stdout is not None
    driver.stdout.readline()
    found: list[int] = ast.literal_eval(driver.stdout.readline())
    return found
