"""This machine as the reader of traces: libraries, nsys, memory, room for results."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from nsysk3.doctor.lines import HERE, Line, State
from nsysk3.launch import probe
from nsysk3.launch.checks import GIB
from nsysk3.run.files import cache_folder

# What analyze and its reports are: each imports all that it needs.
_OURS = ("nsysk3.trace.load", "nsysk3.analysis.analyze", "nsysk3.compare", "nsysk3.report.html")
_IMPORT_S = 120
_MEMORY = 3 * GIB  # of 3 million kernels (docs/speed.md)
_ROOM = 2 * GIB
# Each module is named before it is imported: what a crash leaves last is what crashed.
_IMPORT = """
import importlib, json, sys
failed = {}
for name in sys.argv[1:]:
    print(name, flush=True)
    try:
        importlib.import_module(name)
    except BaseException as error:
        failed[name] = [getattr(error, "name", None) or name, f"{type(error).__name__}: {error}"]
print(json.dumps(failed))
"""


def look_here() -> Iterator[Line]:
    """A line for each thing that reading traces needs."""
    yield _packages()
    yield _export()
    yield _memory()
    yield from _room()


def _packages() -> Line:
    """Do the libraries of the analysis import, in a process of their own?"""
    wanted = _requirements()
    modules = [name.lower().replace("-", "_") for name in wanted]
    try:
        done = subprocess.run(
            [sys.executable, "-c", _IMPORT, *modules, *_OURS],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_IMPORT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return Line(HERE, "packages", "cannot", f"could not be imported: {error}")
    last = (done.stdout.strip() or "nothing").splitlines()[-1]
    if done.returncode:
        how = signal.Signals(-done.returncode).name if done.returncode < 0 else f"exit code {done.returncode}"
        fix = "install a build for this CPU, such as `pip install polars[rtcompat]`" if "ILL" in how else None
        return Line(HERE, "packages", "cannot", f"importing {last} ends Python ({how})", fix)
    failed: dict[str, tuple[str, str]] = json.loads(last)
    if failed:
        return _failed(failed, wanted)
    old = [f"{name} {metadata.version(name)} (needs {least})" for name, least in wanted.items() if _is_old(name, least)]
    if old:
        return Line(HERE, "packages", "warning", f"older than nsysk3 asks for: {', '.join(old)}", _install(wanted))
    return Line(HERE, "packages", "ok", f"all {len(wanted)} libraries of analyze and reports import")


def _failed(failed: dict[str, tuple[str, str]], wanted: dict[str, str]) -> Line:
    """What is missing, else what is there and broken."""
    absent = sorted({what for what, why in failed.values() if why.startswith("ModuleNotFoundError")})
    broken = [why for _, why in failed.values() if not why.startswith("ModuleNotFoundError")]
    text = f"missing: {', '.join(absent)}" if absent else broken[0].splitlines()[0][:200]
    again = {name: least for name, least in wanted.items() if name.lower().replace("-", "_") in failed}
    return Line(HERE, "packages", "cannot", text, _install(again or {"nsysk3": ""}))


def _install(packages: dict[str, str]) -> str:
    words = " ".join(shlex.quote(name + least) for name, least in packages.items())
    return f"{sys.executable} -m pip install {words}"


def _requirements() -> dict[str, str]:
    """What the installed nsysk3 asks for, with the least version; empty where it is not installed as a package."""
    try:
        lines = metadata.requires("nsysk3") or []
    except metadata.PackageNotFoundError:
        return {}
    found = (re.match(r"([A-Za-z0-9._-]+)\s*([^;]*)$", line) for line in lines)  # extras have a marker behind ";"
    return {each[1]: each[2].strip() for each in found if each}


def _is_old(name: str, least: str) -> bool:
    wanted = re.search(r">=\s*([\d.]+)", least)
    return bool(wanted) and _numbers(metadata.version(name)) < _numbers(wanted[1] if wanted else "")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _export() -> Line:
    """The nsys that analyze and export would use for a .nsys-rep."""
    named = os.environ.get("NSYSK3_NSYS")
    found = probe.answer({"nsys": named or "nsys"})["nsys"]
    if "error" in found:
        fix = "install Nsight Systems, or set NSYSK3_NSYS to one; exports (.sqlite, _pqtdir) are read without"
        return Line(HERE, "nsys export", "cannot", found["error"], fix)
    can = probe.answer({"nsys_features": found["path"]})["nsys_features"]
    text = f"{found['version'] or 'unknown version'}, {found['path']}: {features_text(can)}"
    brief = f"nsys {found['version']}, {'with' if can.get('blobs') else 'without'} NCCL payloads"
    if can.get("blobs"):
        return Line(HERE, "nsys export", "ok", text, brief=brief)
    fix = "for payloads a newer nsys, whose export has --include-blobs (2026.1)"
    return Line(HERE, "nsys export", "warning", text, fix, brief)


def features_text(can: dict[str, object]) -> str:
    """What an nsys can export, in words."""
    has: list[str] = []
    lacks: list[str] = []
    for name, meaning in (("blobs", "NCCL payloads"), ("parquetdir", "parquetdir"), ("recipes", "recipes")):
        (has if can.get(name) else lacks).append(meaning)
    return "; ".join(part for part in (", ".join(has), f"no {', no '.join(lacks)}" if lacks else "") if part)


def _memory() -> Line:
    try:
        text = Path("/proc/meminfo").read_text("utf-8")
    except OSError:
        return Line(HERE, "memory", "ok", "unknown")
    total, free = (int(re.findall(rf"^{name}:\s*(\d+)", text, re.MULTILINE)[0]) * 1024
                   for name in ("MemTotal", "MemAvailable"))  # fmt: skip
    said = f"{free / GIB:.1f} of {total / GIB:.1f} GiB available, {os.cpu_count()} CPUs"
    if free < _MEMORY:
        return Line(
            HERE, "memory", "warning", said, "3 million kernels take 3 GiB: analyse a shorter --window, or elsewhere"
        )
    return Line(HERE, "memory", "ok", said)


def _room() -> Iterator[Line]:
    """Where results and exports go."""
    cache = str(cache_folder())
    for name, folder, setting in (("this folder", str(Path.cwd()), "--out"), ("cache", cache, "NSYSK3_CACHE")):
        found = probe.answer({"disk": folder})["disk"]
        if "error" in found:
            yield Line(HERE, name, "warning", found["error"], f"set {setting} to another")
            continue
        state: State = "ok" if found["writable"] and found["free"] > _ROOM else "warning"
        text = f"{found['free'] / GIB:,.0f} GiB free in {folder}" + ("" if found["writable"] else ", but not writable")
        yield Line(HERE, name, state, text, None if state == "ok" else f"set {setting} to a folder with room")
