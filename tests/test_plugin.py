"""The SGLang plugin's markers, against a fake SGLang with the real one's call shapes."""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import fake_sglang
from fake_sglang import Module, ModuleList, Tape
from nsysk3.analysis.layer_names import parse_names
from nsysk3.plugin import register
from nsysk3.plugin.check import check, main, open_source
from nsysk3.plugin.hooks import Hooks
from nsysk3.plugin.rank import Facts
from nsysk3.plugin.targets import VERIFIED_VERSIONS

STAGE_1 = Facts(world=1, world_size=2, pp=1, pp_size=2, device=1, tp_ranks=(1,), pp_ranks=(0, 1))


@pytest.fixture
def tape() -> Tape:
    return Tape()


@pytest.fixture
def sglang(tmp_path: Path, tape: Tape, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A process of the fake SGLang that loaded the plugin: its scheduler module."""
    fake_sglang.write_tree(tmp_path)
    fake_sglang.forget()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "torch", fake_sglang.fake_torch(tape))
    monkeypatch.setenv("NSYSK3_MARKERS", "1")
    scheduler = importlib.import_module("sglang.srt.managers.scheduler")
    registry = importlib.import_module("sglang.srt.plugins.hook_registry").HookRegistry
    register()
    registry.apply_hooks()
    yield scheduler
    fake_sglang.forget()


def batch(tokens: int = 8192, at_start: Any = None, mode: str = "EXTEND") -> Any:
    forward_mode = types.SimpleNamespace(is_extend=lambda: mode == "EXTEND", name=mode)
    return types.SimpleNamespace(
        extend_num_tokens=tokens if mode == "EXTEND" else None, forward_mode=forward_mode, reqs=[0], at_start=at_start
    )


def kimi(fails: bool = False) -> Module:
    class KimiK3DeltaAttention(Module): ...

    class KimiK3MLAAttention(Module): ...

    class KimiK3MLP(Module): ...

    class KimiK3MoE(Module): ...

    class PPMissingLayer(Module): ...

    dense, moe = Module({"self_attn": KimiK3DeltaAttention(), "mlp": KimiK3MLP()}), KimiK3MoE(fails=fails)
    dense.is_block_write_layer = True  # type: ignore[attr-defined]
    sparse = Module({"self_attn": KimiK3MLAAttention(), "mlp": moe})
    layers = ModuleList([PPMissingLayer(), PPMissingLayer(), dense, sparse])
    tower = Module({"blocks": ModuleList([Module({"attn": Module()}) for _ in range(9)])})
    text = Module({"model": Module({"embed_tokens": PPMissingLayer(), "layers": layers})})
    return Module({"vision_tower": tower, "language_model": text, "logits_processor": Module()})


def manager_of(scheduler: Any, tape: Tape, **settings: Any) -> Any:
    profiler = importlib.import_module("sglang.srt.managers.scheduler_components.profiler_manager")
    return profiler.SchedulerProfilerManager(tape.log, **settings)


def test_a_forward_says_number_micro_batch_stage_and_tokens(sglang: Any, tape: Tape) -> None:
    scheduler = sglang.Scheduler()
    scheduler.forward_ct = 11
    assert scheduler._pp_launch_batch(3, batch()) == "result"
    scheduler.run_batch(batch(mode="DECODE"))
    rank = (
        "nsysk3.rank world=1/2 pp=1/2 tp=0/1 ep=0/1 device=1 tp_ranks=1 pp_ranks=0,1 nsysk3=0.1.0 sglang=0.0.fake "
        "markers=forward,mb,pp.send,pp.recv,start,stop,start2,stop2 layers=none"
    )
    prefill = "nsysk3.forward 12 mb=3 stage=1 mode=extend reqs=1 tokens=8192"
    decode = "nsysk3.forward 13 mb=3 stage=1 mode=decode reqs=1 tokens=1"
    expected = [f"push {prefill}", f"mark {rank}", f"pop {prefill}"]
    assert tape.log == [*expected, f"push {decode}", f"mark {rank}", f"pop {decode}"]


def test_layers_keep_their_numbers_over_stages_and_say_what_they_are(sglang: Any, tape: Tape) -> None:
    sglang.Scheduler(kimi()).run_batch(batch())
    pushed = [line.removeprefix("push ") for line in tape.log if line.startswith("push ")]
    layers = "model.language_model.model.layers"
    assert pushed[1:] == [
        "nsysk3.layer 2 attn=kda mlp=dense bank=write", f"{layers}.2.self_attn", f"{layers}.2.mlp",
        "nsysk3.layer 3 attn=mla mlp=moe", f"{layers}.3.self_attn", f"{layers}.3.mlp", "model.logits_processor",
    ]  # fmt: skip
    assert not tape.open
    assert any("layers=2-3" in line for line in tape.log)


def test_layer_attribution_reads_every_name(sglang: Any, tape: Tape) -> None:
    scheduler = sglang.Scheduler(kimi())
    scheduler._pp_recv_typed_dict(expected_kind="proxy")
    scheduler.run_batch(batch())
    scheduler._pp_send_dict_to_next_stage({}, msg_type="proxy")
    pushed = [line.removeprefix("push ") for line in tape.log if line.startswith("push ")]
    parsed = parse_names(pl.Series(pushed)).rows_by_key("name", named=True, unique=True)
    forward = parsed["nsysk3.forward 1 stage=1 mode=extend reqs=1 tokens=8192"]
    assert (forward["kind"], forward["number"], forward["tokens"]) == ("forward", 1, 8192)
    assert [row["layer"] for name, row in parsed.items() if name.startswith("nsysk3.layer")] == [2, 3]
    part = parsed["model.language_model.model.layers.3.mlp"]
    assert (part["layer"], part["module"]) == (3, "mlp")
    assert [row["module"] for row in parsed.values() if row["kind"] == "boundary"] == ["pp.recv", "pp.send"]
    assert len(parsed) == len(set(pushed))


def test_a_model_is_wrapped_once_and_a_new_one_again(sglang: Any, tape: Tape) -> None:
    scheduler = sglang.Scheduler(kimi())
    for _ in range(3):
        scheduler.run_batch(batch())
    assert sum(line.startswith("push nsysk3.layer 2") for line in tape.log) == 3
    scheduler.tp_worker.model_runner.model = kimi()
    scheduler.run_batch(batch())
    assert sum(line.startswith("push nsysk3.layer 2") for line in tape.log) == 4


def test_boundaries_name_their_forward_and_leave_the_result_ring_apart(sglang: Any, tape: Tape) -> None:
    scheduler = sglang.Scheduler()
    scheduler.forward_ct, current = 7, object()
    scheduler.mbs, scheduler.cur_batch_for_debug = [None, current], current
    hidden = types.SimpleNamespace(numel=lambda: 10, element_size=lambda: 2)
    assert scheduler._pp_recv_typed_dict(expected_kind="proxy") == {"kind": "proxy"}
    scheduler._pp_launch_batch(1, batch())
    sent = {"hidden_states": hidden, "residual": None}
    assert scheduler._pp_send_dict_to_next_stage(sent, async_send=True, msg_type="proxy") == ["work"]
    scheduler._pp_send_dict_to_next_stage({"next_token_ids": hidden}, msg_type="output")
    scheduler._pp_recv_typed_dict("output")
    boundaries = [line.removeprefix("push ") for line in tape.log if line.startswith("push pp.")]
    assert boundaries == [
        "pp.recv forward=8 mb=1",
        "pp.send forward=8 mb=1 bytes=20",
        "pp.send_output bytes=20",
        "pp.recv_output",
    ]


@pytest.mark.parametrize("depth", ["layer", "batch"])
def test_ranges_close_when_what_they_are_around_raises(sglang: Any, tape: Tape, depth: str) -> None:
    def fail() -> None:
        raise ValueError("out of memory")

    scheduler = sglang.Scheduler(kimi(fails=depth == "layer"))
    with pytest.raises(ValueError, match="out of memory"):
        scheduler.run_batch(batch(at_start=fail if depth == "batch" else None))
    assert not tape.open
    scheduler.tp_worker.model_runner.model = None
    assert scheduler.run_batch(batch()) == "result"
    assert not tape.open


def test_failures_stay_inside_and_are_logged_once(sglang: Any, tape: Tape, caplog: pytest.LogCaptureFixture) -> None:
    scheduler = sglang.Scheduler(kimi())
    tape.broken = True
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert scheduler.run_batch(batch()) == "result"
        assert scheduler.run_batch(types.SimpleNamespace(at_start=None)) == "result"  # not as the hook knows batches
    assert len(caplog.records) == 3
    tape.broken = False
    assert scheduler.run_batch(batch()) == "result"
    assert not tape.open
    scheduler._pp_recv_typed_dict()  # no pipeline state at all
    scheduler._pp_send_dict_to_next_stage({})
    assert not tape.open


def test_a_capture_that_opens_inside_a_forward_sees_it_whole(sglang: Any, tape: Tape) -> None:
    profiler = manager_of(sglang, tape)
    scheduler = sglang.Scheduler()
    scheduler.run_batch(batch(at_start=profiler._start_profile))
    assert tape.shape()[2:7] == [
        "capture starts",
        "pop nsysk3.forward 1",
        "start nsysk3.prefill_window",
        next(line for line in tape.log if line.startswith("mark")),
        "push nsysk3.forward 1",
    ]
    assert not tape.open


def stop_in_a_forward(hooks: Hooks, tape: Tape, facts: Facts, first_gpu: bool) -> list[str]:
    """What a rank does when the capture's last step is over, at the start of the forward after it."""

    class Manager:
        profile_in_progress = True
        dp_tp_cpu_group = object()
        profiler_activities = ["CUDA_PROFILER"]  # noqa: RUF012

        def stop(self) -> str:
            tape.log.append("SGLang stops")
            if first_gpu and "CUDA_PROFILER" in self.profiler_activities:
                tape.log.append("cudaProfilerStop")
            return "stopped"

    manager = Manager()
    hooks.start_profile(None, manager)
    scheduler = types.SimpleNamespace(forward_ct=4)

    def forward(*_: Any) -> str:
        assert hooks.stop_profile(Manager.stop, manager) == "stopped"
        return "result"

    tape.log.clear()
    assert hooks.run_batch(forward, scheduler, batch()) == "result"
    assert manager.profiler_activities == ["CUDA_PROFILER"]
    assert not tape.open
    return [line for line in tape.shape() if not line.startswith("mark")]


@pytest.mark.parametrize(
    ("facts", "first_gpu", "expected"),
    [
        # one stage: all its GPUs finish, then the first stops
        (Facts(tp=0, tp_size=2), True, ["synchronize", "barrier", "SGLang stops", "cudaProfilerStop"]),
        (Facts(world=1, tp=1, tp_size=2), False, ["synchronize", "barrier", "SGLang stops"]),
        # two stages on a node: the first leaves it to the last
        (Facts(pp=0, pp_size=2), True, ["SGLang stops"]),
        (Facts(pp=1, pp_size=2), False, ["synchronize", "barrier", "SGLang stops", "cudaProfilerStop"]),
        (Facts(pp=1, pp_size=2, tp=1, tp_size=2), False, ["synchronize", "barrier", "SGLang stops"]),
        # four stages on two nodes: each node's last
        (Facts(pp=2, pp_size=4, nnodes=2), True, ["SGLang stops"]),
        (Facts(pp=1, pp_size=4, nnodes=2), False, ["synchronize", "barrier", "SGLang stops", "cudaProfilerStop"]),
        # a stage over two nodes: the first GPU of each
        (Facts(tp=2, tp_size=4, nnodes=2), True, ["synchronize", "barrier", "SGLang stops", "cudaProfilerStop"]),
    ],
)
def test_the_nodes_last_stage_ends_the_capture(
    sglang: Any, tape: Tape, facts: Facts, first_gpu: bool, expected: list[str]
) -> None:
    forward = f"nsysk3.forward 5 stage={facts.pp}"
    shape = stop_in_a_forward(Hooks(tape, lambda: facts, "nsysk3=0"), tape, facts, first_gpu)
    before = [f"push {forward}".replace(f" stage={facts.pp}", ""), "pop nsysk3.forward 5", "end nsysk3.prefill_window"]
    assert shape == [*before, *expected, "push nsysk3.forward 5", "pop nsysk3.forward 5"]


def test_a_stop_without_a_capture_waits_for_nothing(sglang: Any, tape: Tape) -> None:
    profiler = manager_of(sglang, tape)
    assert profiler._start_profile() == "started"
    profiler.profiler_activities = ["CPU"]
    assert profiler._stop_profile() == "stopped"
    assert "synchronize" not in tape.log


def test_a_stop_that_cannot_settle_still_stops(
    sglang: Any, tape: Tape, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(group: object, timeout: object) -> None:
        raise RuntimeError("a rank is gone")

    monkeypatch.setattr(sys.modules["torch"].distributed, "monitored_barrier", broken)
    shape = stop_in_a_forward(Hooks(tape, lambda: STAGE_1, "nsysk3=0"), tape, STAGE_1, False)
    assert shape[-4:-2] == ["SGLang stops", "cudaProfilerStop"]
    assert "a rank is gone" in caplog.text


def test_the_second_profiler_manager_settles_too(sglang: Any, tape: Tape) -> None:
    utils = importlib.import_module("sglang.srt.utils.profile_utils")
    manager = utils.ProfileManager()
    manager._do_start("prefill")
    manager._do_stop()
    assert [line for line in tape.log if not line.startswith("mark")] == [
        "start nsysk3.prefill_window",
        "end nsysk3.prefill_window",
        "synchronize",
    ]
    assert utils.LOG == ["capture starts", "cudaProfilerStop"]


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
    code = "import sys, sglang.srt.plugins; from nsysk3.plugin import register; register(); print('torch' in sys.modules)"
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


@pytest.mark.parametrize("version", VERIFIED_VERSIONS)
def test_real_sglang_has_every_hook(version: str) -> None:
    folder = Path(os.environ.get("NSYSK3_SGLANG_WHEELS", "/nowhere"))
    wheels = sorted(folder.glob(f"sglang-{version}-*.whl"))
    if not wheels:
        pytest.skip(f"no wheel of SGLang {version}: NSYSK3_SGLANG_WHEELS names a folder with them (pip download --no-deps)")
    source, found = open_source(wheels[0])
    assert found == version
    assert check(source) == []
