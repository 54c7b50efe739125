"""What people ran into, named after where it was reported: which processes and nodes are in a trace."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from conftest import FIXTURES
from exports import GEMM, Export

import nsysk3


def test_case_vllm_5132_workers_without_kernels_are_named(analyzed: Any) -> None:
    export = Export().kernel(GEMM, 0, 100, pid=11)
    for rank, pid in enumerate((11, 12, 13, 14)):
        export.gpu(rank, cuda=rank, uuid=f"uuid-{rank}").cuda_device(pid, rank, rank)
    (note,) = [note for note in analyzed(export).document.notes if "trace-fork-before-exec" in note]
    assert "GPUs 1, 2, 3" in note
    assert "(12, 13, 14)" in note


def test_case_sglang_2776_processes_that_launch_but_have_no_kernels_are_named(analyzed: Any) -> None:
    export = Export().kernel(GEMM, 0, 100, pid=11, launch=(0, 1)).launch(0, 5, correlation=9, pid=12)
    export.nccl("ncclAllReduce", 0, 5, pid=13)
    (note,) = [note for note in analyzed(export).document.notes if "trace-fork-before-exec" in note]
    assert "processes 12, 13 launched" in note


def test_case_vllm_5132_a_whole_trace_has_no_such_note() -> None:
    for trace in ("h200/tp2", "h200/pp2", "h200/graph", "sglang-h200/pp2-lw"):
        notes = nsysk3.analyze(FIXTURES / f"{trace}.sqlite").document.notes
        assert not [note for note in notes if "trace-fork-before-exec" in note], trace


def test_real_copies_of_one_fixture_are_told_apart(tmp_path: Path) -> None:
    """Two nodes can have files of the same name: both are ranks, neither hides the other."""
    for node in ("node0", "node1"):
        (tmp_path / node).mkdir()
        shutil.copy(FIXTURES / "h200" / "graph.sqlite", tmp_path / node / "trace.sqlite")
    ranks = nsysk3.analyze(tmp_path).document.ranks
    assert [(rank.report, rank.host) for rank in ranks].count(("node0/trace", "node0")) == 2
    assert len(ranks) == 4
