"""Processes of tests: how to find them, and a zoo of those that are hard to end."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from secrets import token_hex

from nsysk3.launch.hosts import Host
from nsysk3.launch.keeper_processes import read_stat

# A server that ends when asked, one that does not, and ways to get away: a session of its own, a lost parent, an empty
# environment, and all of that.  Each says its number; the log is flooded meanwhile.
ZOO = """
python=$1 seen=$2
note() { echo "$1" >>"$seen"; }
note $$
sleep 1000 & note $!
sh -c 'trap "" TERM INT HUP; echo $$ >>"$1"; while :; do sleep 1000; done' sh "$seen" &
setsid sh -c 'echo $$ >>"$1"; exec sleep 1000' sh "$seen" &
(setsid sh -c 'echo $$ >>"$1"; exec sleep 1000' sh "$seen" &)
(env -i "$python" -c 'import os, sys
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
open(sys.argv[1], "a").write("%d\\n" % os.getpid())
os.execv("/bin/sleep", ["sleep", "1000"])' "$seen" &)
head -c 30000000 /dev/zero
echo flooded
wait
"""
ZOO_SIZE = 6


def eventually(condition: Callable[[], object], timeout_s: float = 30.0) -> bool:
    """Whether something comes true within a time that is only there to end a test that fails."""
    until = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def all_pids() -> list[int]:
    """Every process there is."""
    return [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()]


def parent_of(pid: int) -> int | None:
    """The parent of a process."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    return None


def environment(pid: int) -> dict[str, str]:
    """The environment that a process was started with; empty where it cannot be read or is overwritten."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
        return dict(line.partition("=")[::2] for line in text.split("\0") if "=" in line)
    return {}


def command_line(pid: int) -> str:
    """A process's command line; empty where it has none, as a zombie."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        return " ".join(words).strip()
    return ""


def of_run(run_id: str) -> dict[int, str]:
    """Command lines of the living processes with a run's mark, keepers and connections too."""
    found = {pid: command_line(pid) for pid in all_pids() if environment(pid).get("NSYSK3_RUN") == run_id}
    return {pid: line for pid, line in found.items() if line}


def naming(text: str) -> dict[int, str]:
    """Command lines with a text in them."""
    found = {pid: command_line(pid) for pid in all_pids()}
    return {pid: line for pid, line in found.items() if text in line}


def is_gone(pid: int) -> bool:
    """Whether a process has ended."""
    return read_stat(pid) is None


def start_zoo(host: Host, folder: Path) -> list[int]:
    """The zoo, running; numbers of its processes."""
    seen = folder / f"zoo-{token_hex(4)}"
    seen.touch()
    host.start("zoo", ["sh", "-c", ZOO, "sh", sys.executable, str(seen)], log=f"{seen}.log")
    assert eventually(lambda: len(seen.read_text().split()) == ZOO_SIZE and host.tail("zoo", 30_000_000)[0])
    return [int(word) for word in seen.read_text().split()]


def keepers_of(run_id: str) -> tuple[int, int]:
    """The guard and the keeper, its child."""
    found = [pid for pid, line in of_run(run_id).items() if f"nsysk3-keeper {run_id}" in line and "ssh" not in line]
    inner = next(pid for pid in found if parent_of(pid) in found)
    guard = parent_of(inner)
    assert guard is not None
    return guard, inner
