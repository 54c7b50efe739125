"""Builds the CUDA kernels at first use and loads them; says in one line why it cannot."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from platformdirs import user_cache_path

from nsysk3.ops import cuda_abi

SOURCES = Path(__file__).resolve().parent / "csrc"
FLAGS = ("-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-shared", "-Xcompiler", "-fPIC")
BUILD_TIMEOUT_S = 600


class BuildError(Exception):
    """The kernels cannot be built or loaded here; the text is the reason in one line."""


def cache_folder() -> Path:
    """Where built libraries are kept: $NSYSK3_OPS_CACHE, else the user's cache folder."""
    override = os.environ.get("NSYSK3_OPS_CACHE")
    return Path(override) if override else user_cache_path("nsysk3") / "ops"


def find_nvcc() -> str | None:
    """The CUDA compiler: $CUDA_HOME's, then the PATH's, then the usual place."""
    home = os.environ.get("CUDA_HOME")
    for candidate in ([f"{home}/bin/nvcc"] if home else []) + ["nvcc", "/usr/local/cuda/bin/nvcc"]:
        found = shutil.which(candidate)
        if found:
            return found
    return None


def source_key() -> str:
    """Changes whenever a source or a flag does."""
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for path in sorted(SOURCES.glob("*")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def built_path() -> Path:
    """The library of these sources: there after the first build."""
    return cache_folder() / f"libk3-sm_90a-{source_key()}.so"


def build() -> Path:
    """The library, built unless it is there already.  Raises BuildError."""
    target = built_path()
    if target.is_file():
        return target
    nvcc = find_nvcc()
    if nvcc is None:
        raise BuildError("no nvcc: the CUDA kernels are built at first use (set CUDA_HOME)")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder) / "libk3.so"
            done = subprocess.run(
                [nvcc, *FLAGS, "-o", str(made), str(SOURCES / "launch.cu")],
                capture_output=True,
                text=True,
                timeout=BUILD_TIMEOUT_S,
                check=False,
            )
            if done.returncode != 0:
                lines = [x for x in (done.stderr + done.stdout).splitlines() if "error" in x.lower()]
                raise BuildError(f"nvcc failed: {lines[0] if lines else 'exit code ' + str(done.returncode)}")
            made.replace(target)  # at once, so that ranks building side by side never load half a file
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the CUDA kernels could not be built: {error}") from error
    return target


@cache
def load() -> ctypes.CDLL:
    """The library, its functions typed.  Raises BuildError."""
    try:
        library = ctypes.CDLL(str(build()))
    except OSError as error:
        raise BuildError(f"the CUDA kernels do not load: {error}") from error
    cuda_abi.declare(library)
    return library
