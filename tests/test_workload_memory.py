"""The memory that ranks on CPUs are said to take is what they take."""

from __future__ import annotations

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="the workload needs PyTorch")

from nsysk3.workload.groups import make_facts  # noqa: E402
from nsysk3.workload.memory import weight_bytes, working_bytes  # noqa: E402
from nsysk3.workload.model import Stage  # noqa: E402
from nsysk3.workload.options import Options  # noqa: E402
from nsysk3.workload.weights import Source  # noqa: E402

TOKENS = 4096
# The most memory that one forward of one rank takes beyond what it had before; a KDA layer, then an MLA layer.
PEAK = f"""
from array import array
from pathlib import Path
import re
import torch
from nsysk3.workload.attn_res import read_separately
from nsysk3.workload.groups import make_facts
from nsysk3.workload.model import Stage
from nsysk3.workload.options import Options
from nsysk3.workload.paths import Stream, WholeStream
from nsysk3.workload.requests import Requests
from nsysk3.workload.scheduler import MicroBatch, Piece
from nsysk3.workload.weights import Source

def kept(name):
    return int(re.search(name + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

torch.set_num_threads(1)
options = Options(scale="small", layers=2, device="cpu")
shape, facts = options.shape(), make_facts(options, 0, 0)
stage = Stage(options, shape, facts, Source(1, torch.device("cpu"), torch.float32), None)
batch = MicroBatch(1, 0, "extend", (Piece(0, 0, {TOKENS}, {TOKENS}),), (), array("i", [1] * {TOKENS}))
with torch.inference_mode():
    bank = torch.zeros({TOKENS}, shape.bank_rows(shape.layers), shape.hidden)
    stream = Stream(torch.randn({TOKENS}, shape.hidden), bank, {TOKENS})
    stage.run_layers(stream, batch, Requests(), WholeStream(None, read_separately))
print(kept("VmHWM") - sum(each.nbytes for each in stage.parameters()))
"""


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 1, 1), (1, 4, 2), (3, 2, 1)])
def test_weights_are_counted_one_by_one(layout: tuple[int, int, int]) -> None:
    pp, tp, ep = layout
    options = Options(scale="small", pp_size=pp, tp_size=tp, ep_size=ep, device="cpu")
    source = Source(1, torch.device("cpu"), torch.float32)
    for rank in range(0, pp * tp, tp):
        stage = Stage(options, options.shape(), make_facts(options, rank, rank), source, None)
        assert weight_bytes(options, rank // tp) == sum(each.nbytes for each in stage.parameters())


def test_a_long_micro_batch_takes_about_what_is_said() -> None:
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True, timeout=300)
    said = working_bytes(Options(scale="small", layers=2, device="cpu"), TOKENS)
    assert 0.7 * said < int(done.stdout) < 1.3 * said
