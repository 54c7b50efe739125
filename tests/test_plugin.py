"""The SGLang plugin's markers, against a fake SGLang with the real one's call shapes."""

from __future__ import annotations

import logging
import types
from pathlib import Path
from typing import Any

import fake_sglang
import polars as pl
import pytest
from fake_torch import Module, ModuleList, Tape
from plugin_process import batch, sglang, tape

from nsysk3.analysis.layer_names import parse_names
from nsysk3.plugin.hooks import Hooks
from nsysk3.plugin.rank import Facts

__all__ = ["sglang", "tape"]  # fixtures


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


def test_a_forward_says_number_micro_batch_stage_and_tokens(sglang: Any, tape: Tape) -> None:
    scheduler = sglang.Scheduler()
    scheduler.forward_ct = 11
    assert scheduler._pp_launch_batch(3, batch()) == "result"
    scheduler.run_batch(batch(mode="DECODE"))
    rank = (
        "nsysk3.rank world=1/2 pp=1/2 tp=0/1 ep=0/1 device=1 tp_ranks=1 pp_ranks=0,1 nsysk3=0.1.0 sglang=0.0.fake "
        "markers=forward,mb,send,recv,window,stop layers=none"
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


def test_the_rank_mark_names_only_hooks_that_sglang_applied(
    tmp_path: Path, tape: Tape, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_sglang.write_tree(tmp_path)
    mixin = tmp_path / "sglang/srt/managers/scheduler_pp_mixin.py"
    mixin.write_text(mixin.read_text().replace("_pp_recv_typed_dict", "_pp_receive"))
    with fake_sglang.process(tmp_path, tape, monkeypatch) as scheduler:
        scheduler.Scheduler().run_batch(batch())
    assert any(" markers=forward,mb,send,window,stop " in line for line in tape.log)


def test_a_rank_that_does_not_know_itself_is_not_named(tape: Tape) -> None:
    def unknown() -> Facts:
        raise RuntimeError("groups are not built")

    hooks = Hooks(tape, unknown, lambda: "nsysk3=0")
    hooks.start_profile(None, object())

    def forward(*_: Any) -> None:
        hooks.profile_step(None)

    hooks.run_batch(forward, types.SimpleNamespace(forward_ct=0), batch())
    assert tape.log[1:] == [f"{verb} nsysk3.forward 1 mode=extend reqs=1 tokens=8192" for verb in ("push", "pop")]
