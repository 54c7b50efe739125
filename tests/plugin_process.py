"""What the tests of the SGLang plugin share."""

from __future__ import annotations

import importlib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_sglang
import pytest
from fake_torch import Tape


@pytest.fixture
def tape() -> Tape:
    return Tape()


@pytest.fixture
def sglang(tmp_path: Path, tape: Tape, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The scheduler module of a process of the fake SGLang that loaded the plugin."""
    fake_sglang.write_tree(tmp_path)
    with fake_sglang.process(tmp_path, tape, monkeypatch) as scheduler:
        yield scheduler


def batch(tokens: int = 8192, at_start: Any = None, mode: str = "EXTEND") -> Any:
    forward_mode = types.SimpleNamespace(is_extend=lambda: mode == "EXTEND", name=mode)
    return types.SimpleNamespace(
        extend_num_tokens=tokens if mode == "EXTEND" else None, forward_mode=forward_mode, reqs=[0], at_start=at_start
    )


def manager_of(tape: Tape) -> Any:
    profiler = importlib.import_module("sglang.srt.managers.scheduler_components.profiler_manager")
    return profiler.SchedulerProfilerManager(tape.log)
