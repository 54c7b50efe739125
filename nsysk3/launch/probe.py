"""What a host has of what a run needs: sent to each host as text, asked in JSON, answers in JSON.

Standard library only, Python 3.8 or newer, and it changes nothing on the host.  The question is the first argument: an
object whose keys name what is asked (the functions ``ask_*`` below) and whose values say about what.  Every answer is
an object; what could not be found out has ``error`` with the reason, so one broken tool hides nothing else.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

# A tool that hangs (nvidia-smi with a lost GPU) must not hang the run.
_TIMEOUT_S = 25
_OPTIONS = ("--trace-fork-before-exec", "--capture-range-end", "--cuda-graph-trace", "--cpuctxsw")
# Where NVIDIA's installers put nsys; the better place last.
_PLACES = ("nsight-compute/*/host/target-linux-x64/nsys", "nsight-systems*/*/bin/nsys")
# CAP_SYS_ADMIN and CAP_PERFMON: what lets a process count and sample where others may not.
_POWERS = 1 << 21 | 1 << 38
_PACKAGES = """
import importlib.metadata as m, importlib.util as u, json, platform, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = m.version(name)
    except m.PackageNotFoundError:
        found[name] = "unknown" if u.find_spec(name) else None
print(json.dumps({"python": platform.python_version(), "packages": found}))
"""
# NCCL as PyTorch's wheels bring it.
_NCCL = """
import importlib.metadata as m
names = [each.metadata["Name"] for each in m.distributions()]
print(*(name + " " + m.version(name) for name in names if name and name.startswith("nvidia-nccl-")))
"""
_KERNELS = """
import json
from nsysk3.ops.cuda_build import built_path, find_nvcc
print(json.dumps({"nvcc": find_nvcc(), "built": built_path().is_file()}))
"""


class ToolError(Exception):
    """A command that could not be run or failed; the text says which and why."""


def command(argv: Sequence[str]) -> str:
    """Output of a command that must succeed."""
    try:
        done = subprocess.run(list(argv), stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S)
    except FileNotFoundError:
        raise ToolError(f"{argv[0]}: not found") from None
    except PermissionError:
        raise ToolError(f"{argv[0]}: not executable") from None
    except subprocess.TimeoutExpired:
        raise ToolError(f"{argv[0]}: no answer in {_TIMEOUT_S} s") from None
    out, err = done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")
    if done.returncode:
        last = (err.strip() or out.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise ToolError(f"{argv[0]}: {last[:300]}")
    return out


def ask_host(_: Any) -> dict[str, Any]:
    """Who answers."""
    return {
        "hostname": socket.gethostname(),
        "user": os.environ.get("USER") or str(os.getuid()),
        "cpus": os.cpu_count(),
    }


def ask_nsys(path: str) -> dict[str, Any]:
    """Nsight Systems: where, which version, and the options of `nsys profile` that it lacks of those used."""
    found = shutil.which(path)
    if found is None:
        there = [str(each) for place in _PLACES for each in sorted(Path("/opt/nvidia").glob(place))]
        raise ToolError(f"{path}: not found{', but there is ' + there[-1] if there else ''}")
    version = re.search(r"\d{4}\.\d+(\.\d+)*", command([found, "--version"]))
    text = command([found, "profile", "--help"])
    missing = [option for option in _OPTIONS if option not in text]
    return {"path": found, "version": version.group() if version else None, "lacks": missing}


def ask_nsys_features(path: str) -> dict[str, Any]:
    """What the export of an nsys can do, and whether it has recipes."""
    text = command([path, "export", "--help"])
    try:
        recipes = "recipes are available" in command([path, "recipe", "--help"])
    except ToolError:
        recipes = False
    return {"blobs": "--include-blobs" in text, "parquetdir": "parquetdir" in text, "recipes": recipes}


def ask_permissions(_: Any) -> dict[str, Any]:
    """What sampling of CPUs and counters of GPUs need: ``powers`` when we may do either whatever the system says."""
    paranoid = _read("/proc/sys/kernel/perf_event_paranoid")
    powers = re.search(r"^CapEff:\s*([0-9a-f]+)", _read("/proc/self/status"), re.MULTILINE)
    admin = re.search(r"^RmProfilingAdminOnly:\s*(\d)", _read("/proc/driver/nvidia/params"), re.MULTILINE)
    return {
        "paranoid": int(paranoid) if paranoid.lstrip("-").isdigit() else None,
        "counters_for_admin_only": admin.group(1) == "1" if admin else None,
        "powers": bool(powers and int(powers.group(1), 16) & _POWERS),
    }


def ask_nccl(python: str) -> dict[str, Any]:
    """Version of NCCL: of the server's Python, else of the system; and whether its ranges are turned off."""
    off = os.environ.get("NCCL_NVTX_DISABLE", "0") not in ("", "0")
    wheels = command([python, "-c", _NCCL]).split()
    if len(wheels) >= 2:
        return {"version": wheels[1], "from": wheels[0], "off": off}
    try:
        listed = re.search(r"libnccl\.so\.2 .*=> (\S+)", command(["/sbin/ldconfig", "-p"]))
    except ToolError:
        listed = None
    place = os.path.realpath(listed.group(1)) if listed else ""
    version = re.search(r"\.so\.(\d+\.\d+\.\d+)$", place)
    return {"version": version.group(1) if version else None, "from": place or None, "off": off}


def ask_kernels(python: str) -> dict[str, Any]:
    """Whether nsysk3's CUDA kernels can be built: the compiler, an earlier build, and what the GPUs can run."""
    try:
        capable = [row["compute_cap"] for row in _smi("--query-gpu=", ("compute_cap",))]
    except ToolError:
        capable = []
    try:
        return dict(json.loads(command([python, "-c", _KERNELS])), capable=capable)
    except ToolError as error:
        return {"nvcc": None, "built": False, "capable": capable, "why": str(error)}


def ask_containers(_: Any) -> dict[str, Any]:
    """Programs that run containers, with their versions or why they do not answer."""
    found = {}
    for name in ("docker", "podman"):
        if shutil.which(name):
            try:
                found[name] = {"version": command([name, "version", "--format", "{{.Server.Version}}"]).strip()}
            except ToolError as error:
                found[name] = {"error": str(error)}
    return {"found": found}


def ask_gpus(_: Any) -> dict[str, Any]:
    """Driver, GPUs with their memory, and who computes on them."""
    fields = ("index", "uuid", "name", "memory.total", "memory.used", "driver_version")
    rows = _smi("--query-gpu=", fields)
    running = _smi("--query-compute-apps=", ("gpu_uuid", "pid", "process_name", "used_memory"))
    return {
        "driver": rows[0]["driver_version"] if rows else None,
        "gpus": [
            {"index": _whole(row["index"]), "uuid": row["uuid"], "name": row["name"],
             "total_mib": _whole(row["memory.total"]), "used_mib": _whole(row["memory.used"])}
            for row in rows
        ],
        "processes": [
            {"uuid": row["gpu_uuid"], "pid": _whole(row["pid"]), "name": row["process_name"],
             "used_mib": _whole(row["used_memory"])}
            for row in running
        ],
    }  # fmt: skip


def _smi(query: str, fields: Sequence[str]) -> list[dict[str, str]]:
    text = command(["nvidia-smi", query + ",".join(fields), "--format=csv,noheader,nounits"])
    lines = [line for line in text.splitlines() if line.count(",") >= len(fields) - 1]
    return [dict(zip(fields, (part.strip() for part in line.split(",")))) for line in lines]  # noqa: B905 (new in 3.10)


def _whole(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def ask_model(path: str) -> dict[str, Any]:
    """The model's folder: its config.json, how many weight files and how large they are."""
    folder = Path(path)
    if not folder.is_dir():
        raise ToolError(f"{path}: no such folder")
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
    except OSError as error:
        raise ToolError(f"{path}/config.json: {error.strerror}") from None
    except ValueError:
        raise ToolError(f"{path}/config.json: not JSON") from None
    weights = [each for each in folder.iterdir() if each.suffix in (".safetensors", ".bin")]
    named = _indexed(folder)
    return {
        "config": config,
        "files": len(weights),
        "bytes": sum(each.stat().st_size for each in weights if each.exists()),
        "missing": sorted(name for name in named if not (folder / name).exists()),
    }


def _indexed(folder: Path) -> list[str]:
    """The weight files that the index of the model names."""
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text("utf-8"))
        return sorted(set(index["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return []


def ask_image(what: dict[str, str]) -> dict[str, Any]:
    """The container program and the image it has under a name."""
    version = command([what["cli"], "--version"]).strip()
    try:
        found = json.loads(command([what["cli"], "image", "inspect", what["image"]]))
    except ToolError as error:
        return {"version": version, "id": None, "digests": [], "why": str(error)}
    first = found[0] if found else {}
    identity = str(first.get("Id", ""))
    return {
        "version": version,
        "id": identity if identity.startswith("sha256:") else "sha256:" + identity,
        "digests": [each.rpartition("@")[2] for each in first.get("RepoDigests") or []],
    }


def ask_infiniband(gid_index: int | None) -> dict[str, Any]:
    """RDMA devices with the state of their ports and the address at an index of their table."""
    devices = {}
    for folder in sorted(Path("/sys/class/infiniband").glob("*")):
        ports = {}
        for port in sorted((folder / "ports").glob("*")):
            gid = _read(port / "gids" / str(gid_index)) if gid_index is not None else None
            ports[port.name] = {"state": _read(port / "state").partition(":")[2].strip(), "gid": gid}
        devices[folder.name] = ports
    return {"devices": devices}


def ask_verbs(_: Any) -> dict[str, Any]:
    """What /dev/infiniband holds."""
    return {"nodes": sorted(each.name for each in Path("/dev/infiniband").glob("*"))}


def ask_interfaces(_: Any) -> dict[str, Any]:
    """Network interfaces and their state."""
    return {"interfaces": {each.name: _read(each / "operstate") for each in sorted(Path("/sys/class/net").glob("*"))}}


def ask_ports(ports: Sequence[int]) -> dict[str, Any]:
    """Which TCP ports something listens on already."""
    taken = {}
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that is only closing is free
            try:
                probe.bind(("", port))
            except OSError as error:
                taken[str(port)] = error.strerror
    return {"taken": taken}


def ask_disk(path: str) -> dict[str, Any]:
    """Room in a folder, and whether one may write there."""
    folder = Path(path)
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    usage = shutil.disk_usage(str(folder))
    return {"folder": str(folder), "free": usage.free, "writable": os.access(str(folder), os.W_OK | os.X_OK)}


def ask_memory(_: Any) -> dict[str, Any]:
    """Shared memory and the limit of locked memory, which NCCL and RDMA need (None: no limit); and what is free."""
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    shm = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0
    return {"shm": shm, "memlock": None if locked == resource.RLIM_INFINITY else locked, "available": _available()}


def _available() -> int | None:
    """Bytes of memory to be had: of the machine, or as many as a container may have at all where that is less."""
    free = re.search(r"^MemAvailable:\s*(\d+) kB", _read("/proc/meminfo"), re.MULTILINE)
    groups = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
    limits = [int(text) for text in map(_read, groups) if text.isdigit()]
    return min([*limits, *([int(free.group(1)) * 1024] if free else [])], default=None)


def ask_packages(what: dict[str, Any]) -> dict[str, Any]:
    """Versions of packages in the server's Python, none of them imported; and what nsysk3's plugin says of SGLang."""
    found = json.loads(command([what["python"], "-c", _PACKAGES, *what["names"]]))
    if what.get("plugin") and found["packages"].get("nsysk3") and found["packages"].get("sglang"):
        try:
            found["plugin"] = {"ok": True, "said": command([what["python"], "-m", "nsysk3.plugin.check"]).strip()}
        except ToolError as error:
            found["plugin"] = {"ok": False, "said": str(error)}
    return dict(found)


def _read(path: Any) -> str:
    try:
        return Path(path).read_text("utf-8", "replace").strip()
    except OSError:
        return ""


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Every answer under the name of its question, all sought at once: one tool that hangs delays no other."""
    with ThreadPoolExecutor(len(question) or 1) as pool:
        found = {name: pool.submit(_answer, name, about) for name, about in question.items()}
        return {name: each.result() for name, each in found.items()}


def _answer(name: str, about: Any) -> dict[str, Any]:
    try:
        return dict(globals()["ask_" + name](about))
    except ToolError as error:
        return {"error": str(error)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error)[:300]}"}


if __name__ == "__main__":
    print(json.dumps(answer(json.loads(sys.argv[1]))))
