"""What a real Nsight sees of the torch workload on a CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from nsysk3.analysis.forward_ranges import forward_ranges
from nsysk3.analysis.marked_ranges import mark_ranges
from nsysk3.trace.nsys import export_report, find_nsys
from nsysk3.trace.nvtx import read_nvtx
from nsysk3.trace.report import open_report

pytest.importorskip("torch", reason="the workload needs PyTorch")


@pytest.mark.nsys
def test_real_nsight_sees_forwards_layers_and_boundaries(nsys: Path, tmp_path: Path) -> None:
    script = Path(__file__).with_name("workload_marked.py")
    command = [str(nsys), "profile", "-t", "nvtx", "-s", "none", "--cpuctxsw=none", "-o", str(tmp_path / "t")]
    command += [sys.executable, str(script), "0", str(tmp_path / "meet")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    report = open_report(export_report(tmp_path / "t.nsys-rep", find_nsys()), "t")
    marked, left_out = mark_ranges(read_nvtx(report))
    assert left_out == 0
    forwards = forward_ranges(marked)
    assert forwards["tokens"].to_list() == [24, 24, 12] * 2
    assert forwards["number"].to_list() == [1, 2, 3] * 2
    kinds = marked.group_by("kind", "layer", "module").len().sort("kind", "layer", "module", nulls_last=True)
    layers = kinds.filter(pl.col("kind") == "layer")
    assert layers.select("layer", "module", "len").rows() == [
        (layer, module, 3) for layer in range(4) for module in ("mlp", "self_attn", None)
    ]
    boundary = kinds.filter(pl.col("kind") == "boundary").select("module", "len").rows()
    assert dict(boundary) == {"pp.send": 3, "pp.recv": 3, "pp.send_output": 3, "pp.recv_output": 3}
    assert kinds.filter(pl.col("kind") == "window")["len"].sum() == 2
