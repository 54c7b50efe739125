"""When the SGLang plugin registers, and whether the SGLang at hand has what it hooks."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import fake_sglang
import polars as pl
import pytest
from conftest import FIXTURES
from fake_torch import Tape
from plugin_process import batch

import nsysk3
from nsysk3.plugin import register
from nsysk3.plugin.check import check, main, open_source
from nsysk3.plugin.targets import VERIFIED_VERSIONS

PROOF = "nsysk3=0.1.0 sglang=0.5.17 markers=forward,mb,send,recv,window,stop"


@pytest.mark.parametrize("value", [None, "0", ""])
def test_off_by_default_and_loads_nothing(tmp_path: Path, value: str | None) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "NSYSK3_MARKERS"}
    environment |= {"NSYSK3_MARKERS": value} if value is not None else {}
    code = (
        "import sys; from nsysk3.plugin import register; before = set(sys.modules); register();"
        "print(sorted(set(sys.modules) - before), 'torch' in sys.modules, 'polars' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "[] False False\n"


def test_a_process_without_a_scheduler_is_left_alone(tmp_path: Path) -> None:
    fake_sglang.write_tree(tmp_path)
    code = (
        "import sys, sglang.srt.plugins; from nsysk3.plugin import register; register(); print('torch' in sys.modules)"
    )
    environment = os.environ | {"NSYSK3_MARKERS": "1", "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path.cwd()}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_register_never_raises(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("NSYSK3_MARKERS", "1")
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.scheduler", types.ModuleType("scheduler"))
    monkeypatch.setitem(sys.modules, "torch", None)
    register()
    assert "markers are off" in caplog.text


def test_check_names_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake_sglang.write_tree(tmp_path)
    assert main([str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "missing: sglang.srt.managers.scheduler: run_scheduler_process: no longer used there" in printed
    assert "note: sglang.srt.models.kimi_k3: no such module" in printed
    assert "SGLang unknown (not among those tried" in printed
    path = tmp_path / "sglang/srt/managers/scheduler_pp_mixin.py"
    path.write_text(path.read_text().replace("self, mb_id", "self, batch, mb_id").replace("_pp_recv_typed", "_recv"))
    found = {finding.what: finding.problem for finding in check(open_source(tmp_path)[0])}
    mixin = "sglang.srt.managers.scheduler_pp_mixin.SchedulerPPMixin"
    assert found[f"{mixin}._pp_launch_batch"] == "takes (self, batch, mb_id, cur_batch), expected (self, mb_id, ...)"
    assert found[f"{mixin}._pp_recv_typed_dict"] == "no such method"
    assert main([str(tmp_path / "nowhere")]) == 2


def wheel_of(version: str) -> Path:
    folder = Path(os.environ.get("NSYSK3_SGLANG_WHEELS", "/nowhere"))
    wheels = sorted(folder.glob(f"sglang-{version}-*.whl"))
    if not wheels:
        pytest.skip(f"no wheel of SGLang {version} in NSYSK3_SGLANG_WHEELS (pip download --no-deps sglang=={version})")
    return wheels[0]


@pytest.mark.parametrize("version", VERIFIED_VERSIONS)
def test_real_sglang_has_every_hook(version: str) -> None:
    source, found = open_source(wheel_of(version))
    assert found == version
    assert check(source) == []


@pytest.mark.parametrize("version", [VERIFIED_VERSIONS[0], VERIFIED_VERSIONS[-1]])
def test_real_sglang_applies_the_hooks(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_sglang.write_tree(tmp_path)
    registry = "sglang/srt/plugins/hook_registry.py"
    with zipfile.ZipFile(wheel_of(version)) as wheel:
        (tmp_path / registry).write_bytes(wheel.read(registry))
    tape = Tape()
    with fake_sglang.process(tmp_path, tape, monkeypatch) as scheduler:
        assert scheduler.Scheduler()._pp_launch_batch(1, batch()) == "result"
    assert tape.log[0] == "push nsysk3.forward 1 mb=1 stage=1 mode=extend reqs=1 tokens=8192"
    assert " markers=forward,mb,send,recv,window,stop " in tape.log[1]
    assert not tape.open


def test_the_real_trace_is_marked_throughout() -> None:
    run = nsysk3.load(FIXTURES / "sglang-h200" / "pp2-markers.sqlite")
    assert run.ranks["rank_source"].to_list() == ["marker", "marker"]
    assert run.ranks["pp_rank"].to_list() == [0, 1]
    result = nsysk3.analyze(run)
    forwards = result.forwards.select("rank", "forward", "whole", "source", "tokens").unique()
    expected = [(rank, number, True, "marker", 8192) for rank in (0, 1) for number in range(44, 60)]
    assert forwards.sort("rank", "forward").rows() == expected
    layers = result.layers.group_by("rank").agg(pl.col("layer").unique().sort(), pl.len()).sort("rank")
    assert layers.rows() == [(0, [0, 1, 2, 3], 64), (1, [4, 5, 6, 7], 64)]


def test_the_real_trace_proves_that_the_plugin_was_active() -> None:
    path = FIXTURES / "sglang-h200" / "pp2-markers.sqlite"
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
        marks = database.execute("select text from NVTX_EVENTS where eventType = 34 and text like 'nsysk3.rank %'")
        texts = [text for (text,) in marks]
        bytes_sent = database.execute("select distinct text from NVTX_EVENTS where text like 'pp.send forward=44 %'")
        (sent,) = bytes_sent.fetchone()
    assert all(PROOF in text for text in texts)
    assert {text.rpartition(" ")[2] for text in texts} >= {"layers=0-3", "layers=4-7"}
    assert len(texts) == 34  # one when the capture opened and one a forward, on both ranks
    # one row of the stream's head and one of the residual bank, 8,192 x 7,168 in bf16 each
    assert sent == f"pp.send forward=44 mb=0 bytes={2 * 8192 * 7168 * 2}"
