"""The collectives and the pipeline's boundary over four processes on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the operations need PyTorch")

from ops_processes import run_ranks  # noqa: E402

NAMES = (
    "nccl", "nccl uneven", "nccl fewer tokens than ranks", "fused falls back", "auto falls back", "one line",
    "wrong slices", "every cut", "every cut, uneven", "relayed chain", "chain without relay", "chain the other way",
    "misuse",
)  # fmt: skip


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return run_ranks(Path(__file__).with_name("ops_ranks.py"), 4, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", NAMES)
def test_on_four_ranks(said: dict[str, list[str]], name: str) -> None:
    assert said[name] == [], "\n".join(said[name])


def test_every_check_is_named(said: dict[str, list[str]]) -> None:
    assert set(said) == set(NAMES)
