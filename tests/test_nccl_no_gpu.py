"""nccl-bench where there is no GPU to measure."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from command import run


@pytest.fixture
def no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a driver, whatever this one has."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("nvidia-smi", "ls"):
        (tools / name).write_text("#!/bin/sh\nexit 9\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("words", [("--pp", 1), ("--pp", 1, "--tp", 2), ("--pp", 2, "--tp", 1, "--torch")])
def test_nccl_bench_says_that_there_is_no_gpu(words: tuple[object, ...]) -> None:
    ran = run("nccl-bench", "-q", *words)
    assert (ran.code, ran.out) == (3, "")
    assert ran.err == "nsysk3: no GPU on localhost; --device cpu tries the command without GPUs\n"
