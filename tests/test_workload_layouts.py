"""The torch workload over one to four ranks on the CPU: no layout changes what comes out."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the workload needs PyTorch")

from ops_processes import run_ranks  # noqa: E402


def test_no_layout_changes_a_token(tmp_path: Path) -> None:
    said = run_ranks(Path(__file__).with_name("workload_ranks.py"), 4, tmp_path)
    failed = {name: failures for name, failures in said.items() if failures}
    assert len(said) == 11
    assert not failed, "\n".join(line for failures in failed.values() for line in failures)
