"""nsysk3's kernels inside SGLang: the hooks go in, keep SGLang's meaning, and leave alone what they cannot do."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the kernels need PyTorch")

from ops_cases import BF16, Case, assert_normed, make_case  # noqa: E402

from nsysk3.ops import reference as ref  # noqa: E402
from nsysk3.plugin import sp as plugin_sp  # noqa: E402
from nsysk3.plugin.entry import register_hooks  # noqa: E402
from nsysk3.plugin.targets import SCHEDULER, SP_TARGETS, VERIFIED_VERSIONS  # noqa: E402

HIDDEN = 7168
ATTN_RESIDUAL = "sglang.srt.layers.attn_residual"


class Registry:
    """SGLang's, as far as it is used."""

    HookType = SimpleNamespace(AROUND="around", BEFORE="before", AFTER="after")

    def __init__(self) -> None:
        self.HookRegistry, self.hooks = self, {}

    def register(self, path: str, hook: Callable[..., Any], kind: str) -> None:
        assert kind == "around"
        self.hooks[path] = hook

    def apply(self) -> None:
        for path, hook in self.hooks.items():
            module, _, name = path.rpartition(".")
            owner = sys.modules[module]
            original = getattr(owner, name)
            setattr(owner, name, lambda *a, _hook=hook, _original=original, **k: _hook(_original, *a, **k))


class Norm(torch.nn.Module):
    """SGLang's RMSNorm, plain."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.variance_epsilon, self.variance_size_override = weight, eps, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.variance_epsilon).to(x.dtype)  # fmt: skip  # noqa: E501


Norm.__name__ = "RMSNorm"


def stub(monkeypatch: pytest.MonkeyPatch, name: str, **values: Any) -> types.ModuleType:
    """A module of SGLang that is not there; its packages too."""
    for end in range(1, name.count(".") + 1):
        package = ".".join(name.split(".")[:end])
        if package not in sys.modules:
            made = types.ModuleType(package)
            made.__path__ = []
            monkeypatch.setitem(sys.modules, package, made)
    module = types.ModuleType(name)
    module.__spec__ = importlib.util.spec_from_loader(name, None)
    vars(module).update(values)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def wheel_of(version: str) -> zipfile.ZipFile:
    wheels = sorted(Path(os.environ.get("NSYSK3_SGLANG_WHEELS", "/nowhere")).glob(f"sglang-{version}-*.whl"))
    if not wheels:
        pytest.skip(f"no wheel of SGLang {version} in NSYSK3_SGLANG_WHEELS")
    return zipfile.ZipFile(wheels[0])


@pytest.fixture(params=[VERIFIED_VERSIONS[0], VERIFIED_VERSIONS[-1]])
def sglang(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The real attn_residual and k3_sp_collective of a wheel, hooked, above modules that are not there."""
    pytest.importorskip("triton", reason="SGLang's file imports Triton")
    wheel = wheel_of(request.param)
    names = wheel.namelist()
    collective = next(each for each in SP_TARGETS[2].modules if f"{each.replace('.', '/')}.py" in names)
    stub(monkeypatch, "sglang.srt.layers.layernorm", RMSNorm=Norm)
    stub(monkeypatch, "sglang.srt.layers.linear", ReplicatedLinear=torch.nn.Module)
    stub(monkeypatch, "sglang.srt.utils", is_cuda=lambda: False, is_hip=lambda: False, is_npu=lambda: False)
    switch = SimpleNamespace(is_set=lambda: True, get=lambda: False)
    envs = SimpleNamespace(SGLANG_K3_SP_COLLECTIVE=switch, SGLANG_K3_SP_ATTN_RES=switch)
    stub(monkeypatch, "sglang.srt.environ", envs=envs)
    stub(monkeypatch, "sglang.srt.layers.communication.k3_ar_fusion")
    stub(monkeypatch, "sglang.srt.layers.k3_ar_fusion")
    stub(monkeypatch, "sglang.srt.layers", k3_ar_fusion=None, __path__=[])
    stub(monkeypatch, "sglang.srt.layers.communication", k3_ar_fusion=None, __path__=[])
    stub(monkeypatch, "sglang.srt.runtime_context", get_exec=None, get_parallel=None)
    registry = Registry()
    stub(monkeypatch, "sglang.srt.plugins.hook_registry", HookRegistry=registry, HookType=registry.HookType)
    stub(monkeypatch, SCHEDULER)
    loaded = []
    for name in (ATTN_RESIDUAL, collective):
        path = tmp_path / f"{name}.py"
        path.write_bytes(wheel.read(f"{name.replace('.', '/')}.py"))
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(sys.modules[name.rpartition(".")[0]], name.rpartition(".")[2], module, raising=False)
        spec.loader.exec_module(module)
        loaded.append(module)
    loaded[0]._use_fast = lambda hidden: False  # it would ask a GPU
    register_hooks(markers=False, kernels=True)
    assert len(registry.hooks) == len(SP_TARGETS)
    registry.apply()
    (hooks,) = {hook.__self__ for hook in registry.hooks.values()}
    return SimpleNamespace(attn_residual=loaded[0], collective=loaded[1], hooks=hooks)


def modules_of(case: Case) -> tuple[Any, Any, Any]:
    """Projection, score norm and output norm whose product is the case's."""
    projection = torch.nn.Module()
    projection.weight = torch.ones(1, case.score_weight.numel(), dtype=torch.float32)
    return projection, Norm(case.score_weight, case.eps), Norm(case.norm_weight, case.eps)


@pytest.mark.parametrize("added", [True, False])
def test_sglangs_own_class_reads_through_one_launch(
    sglang: SimpleNamespace, added: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(plugin_sp, "_in_one_launch", lambda *_: True)
    monkeypatch.setattr(plugin_sp, "_range", lambda text: (calls.append(text), nullcontext())[1])
    case = make_case(6, 1, 1024, 2, seed=1)
    stream = sglang.attn_residual.AttnResidual(case.prefix, 3, case.bank[:, :2])
    pending = case.partials[0] if added else None
    normed, prefix = stream.forward(case.prefix, pending, *modules_of(case), write=True)
    wanted = case.prefix if pending is None else (case.prefix.double() + pending.double()).to(BF16)
    assert torch.equal(prefix, wanted)
    assert_normed(normed, ref.attn_res(wanted, case.bank, 2, *case.weights))
    assert torch.equal(stream.block_residual[:, 2], wanted)  # SGLang's own write follows
    assert stream.num_valid_blocks == 3
    assert calls == ["k3.attn_res M=6 nvb=2"]


def test_what_is_not_plain_is_left_to_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(2, 1, 64, 1, seed=1)
    on_gpu = SimpleNamespace(is_cuda=True, shape=(2, 64), dtype=BF16)
    assert plugin_sp._in_one_launch(on_gpu, case.bank, modules_of(case)[2])
    for name, value in (("variance_size_override", 3), ("_quant_linear", 3)):
        norm = modules_of(case)[2]
        setattr(norm, name, value)
        assert not plugin_sp._in_one_launch(on_gpu, case.bank, norm)
    assert not plugin_sp._in_one_launch(on_gpu, case.bank, torch.nn.LayerNorm(64))
    assert not plugin_sp._in_one_launch(on_gpu, case.bank.float(), modules_of(case)[2])

    hooks, original = plugin_sp.SpHooks("auto"), lambda *args: args
    assert hooks.aggregate(original, case.prefix, case.bank, 1, *modules_of(case))[0] is case.prefix  # a CPU's
    monkeypatch.setattr(plugin_sp, "_in_one_launch", lambda *_: True)
    stub(monkeypatch, ATTN_RESIDUAL, _use_fast=lambda *_: True, _use_hip_fused=lambda *_: False)  # it has a kernel here
    assert hooks.aggregate_add(original, case.prefix, case.prefix, case.bank, 1, *modules_of(case))[-1] is False


class Collectives:
    """nsysk3's SequenceParallel of two ranks, this one the second, that takes what it is told to."""

    world, unable = 2, None

    def __init__(self, taken: bool) -> None:
        self.taken, self.calls = taken, []

    def rows(self, tokens: int) -> slice:
        return ref.local_rows(tokens, 1, 2)

    def takes(self, operation: str, tokens: int, rows: int, dtype: torch.dtype) -> bool:
        self.calls.append((operation, tokens, rows, dtype))
        return self.taken

    def reads_partial(self, tokens: int) -> bool:
        return tokens > 4

    def partial_buffer(self, tokens: int) -> torch.Tensor:
        return torch.full((tokens, HIDDEN), 7, dtype=BF16)

    def reduce_scatter_attn_res(self, partial: Any, prefix: Any, bank: Any, rows: int, *weights: Any) -> Any:
        other = torch.zeros_like(partial)
        normed, new = ref.reduce_scatter_attn_res([other, partial], 1, prefix, bank, rows, *weights)
        return normed.to(BF16), new

    def attn_res_all_gather(self, prefix: Any, bank: Any, rows: int, *rest: Any) -> Any:
        *weights, write_row = rest
        if write_row is not None:
            ref.write_bank(bank, write_row, prefix)
        return ref.attn_res(prefix, bank, rows, *weights).to(BF16).repeat(2, 1)


def test_sglangs_own_class_calls_the_collectives(sglang: SimpleNamespace) -> None:
    sp = Collectives(taken=True)
    sglang.hooks._sp, sglang.hooks._asked, collective = sp, True, sglang.collective
    assert collective.enabled()
    case = make_case(8, 1, HIDDEN, 2, seed=3)
    stream = sglang.attn_residual.AttnResidual(case.prefix, 4, case.bank[:, :2])
    rows = sp.rows(8)
    for pending in (case.prefix, case.prefix[rows], None):  # SGLang gives every row, or this rank's
        read = stream.forward_sp_reduce_scatter(case.partials[0], pending, *modules_of(case), rows=rows)
        assert read is not None
        mine = case.partials[0][rows].double() + (0 if pending is None else case.prefix[rows].double())
        assert torch.equal(read[1], mine.to(BF16))
        assert_normed(read[0], ref.attn_res(read[1], case.bank[rows], 2, *case.weights), within=2)  # bf16 score weight
    read = stream.forward_sp_all_gather(case.prefix[rows], None, *modules_of(case), rows=rows, write=True)
    assert read is not None
    assert torch.equal(stream.block_residual[rows, 2], case.prefix[rows])
    assert read[0].shape == (8, HIDDEN)
    assert sp.calls == [("rs_attn_res", 8, 2, BF16)] * 3 + [("attn_res_ag", 8, 2, BF16)]
    assert [collective.requires_symmetric_rs(t, torch.device("cpu")) for t in (4, 8)] == [False, True]
    assert collective.get_o_proj_output_buffer(8, BF16, HIDDEN).shape == (8, HIDDEN)


def test_none_where_they_decline_and_sglang_where_they_are_not(
    sglang: SimpleNamespace,
) -> None:
    case = make_case(8, 1, HIDDEN, 2, seed=3)
    stream = sglang.attn_residual.AttnResidual(case.prefix, 4, case.bank[:, :2])
    for sp in (Collectives(taken=False), None):
        sglang.hooks._sp, sglang.hooks._asked = sp, True
        assert sglang.collective.enabled() is (sp is not None)
        arguments = (*modules_of(case), slice(4, 8))
        assert stream.forward_sp_reduce_scatter(case.partials[0], None, *arguments) is None
        assert stream.forward_sp_all_gather(case.prefix[4:], None, *arguments) is None
    assert stream.num_valid_blocks == 2


def hooks_with(sp: Collectives | None) -> plugin_sp.SpHooks:
    hooks = plugin_sp.SpHooks("auto")
    hooks._sp, hooks._asked = sp, True  # type: ignore[assignment]
    return hooks


def test_hooks_answer_or_pass_on() -> None:
    case = make_case(8, 1, HIDDEN, 2, seed=5)
    rows, taking, declining = slice(4, 8), hooks_with(Collectives(True)), hooks_with(Collectives(False))
    scatter = (case.partials[0], case.prefix[rows], case.bank[rows], *case.weights[:2], 2, case.eps)
    gather = (case.prefix[rows], case.bank[rows], *case.weights[:2], 2, case.eps)

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("SGLang's was called")

    read = taking.reduce_scatter_attn_res(never, *scatter)
    assert torch.equal(read[1], (case.partials[0][rows].double() + case.prefix[rows].double()).to(BF16))
    assert torch.equal(taking.reduce_scatter_attn_res(never, case.partials[0], case.prefix, *scatter[2:])[1], read[1])
    assert taking.attn_res_all_gather(never, *gather, write_prefix=True).shape == (8, HIDDEN)
    assert torch.equal(case.bank[rows, 2], case.prefix[rows])
    assert declining.reduce_scatter_attn_res(never, *scatter) is None
    assert declining.attn_res_all_gather(never, *gather) is None
    assert taking.reduce_scatter_attn_res(never, case.partials[0][:, ::2], *scatter[1:]) is None  # not whole rows
    for name, arguments in (
        ("reduce_scatter_attn_res", scatter), ("attn_res_all_gather", gather),
        ("requires_symmetric_rs", (8, "cuda", 2)), ("o_proj_output_buffer", (8, BF16, HIDDEN)),
    ):  # fmt: skip
        assert getattr(hooks_with(None), name)(lambda *_, **__: "SGLang's", *arguments) in ("SGLang's", True)


def test_sglangs_own_collectives_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = plugin_sp.SpHooks("auto")
    monkeypatch.setattr(hooks, "_make", lambda: Collectives(True))
    assert hooks.enabled(lambda: True)
    assert hooks._sp is None
    assert hooks.enabled(lambda: False)
    assert hooks._sp is not None


@pytest.mark.parametrize(("backend", "world", "said"), [("none", 2, "is off"), ("deepep", 1, "is off"), ("deepep", 2, "fell back: NCCL (no GPU)")])  # fmt: skip  # noqa: E501
def test_what_is_needed_of_the_server(
    backend: str, world: int, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from nsysk3.ops import sp

    group = SimpleNamespace(world_size=world, device_group="group")
    context = {"get_parallel": lambda: SimpleNamespace(attn_tp_group=group), "get_server_args": lambda: SimpleNamespace(chunked_prefill_size=16384)}  # fmt: skip  # noqa: E501
    stub(monkeypatch, "sglang.srt.runtime_context", **context)
    kind = SimpleNamespace(is_none=lambda: backend == "none")
    stub(monkeypatch, "sglang.srt.layers.moe.utils", get_moe_a2a_backend=lambda: kind)
    monkeypatch.setenv("SGLANG_K3_SP_ATTN_RES", "")  # so that it is put back
    monkeypatch.delenv("SGLANG_K3_SP_ATTN_RES")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    made: dict[str, Any] = {}
    monkeypatch.setattr(sp, "SequenceParallel", lambda *a, **k: (made.update(k), SimpleNamespace(unable="no GPU"))[1])
    with caplog.at_level("INFO"):
        assert not plugin_sp.SpHooks("fused").enabled(lambda: False)
    assert said in caplog.text
    if made:
        assert (made["max_tokens"], made["mode"], os.environ["SGLANG_K3_SP_ATTN_RES"]) == (16384, "fused", "1")


def test_a_kernel_that_fails_leaves_it_to_sglang(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:  # fmt: skip  # noqa: E501
    case, hooks = make_case(2, 1, 64, 1, seed=1), plugin_sp.SpHooks("auto")
    monkeypatch.setattr(plugin_sp, "_in_one_launch", lambda *_: True)
    monkeypatch.setattr(plugin_sp, "_range", lambda _: nullcontext())
    stub(
        monkeypatch, ATTN_RESIDUAL, get_cw=lambda *_: 1 / 0, _use_fast=lambda *_: False, _use_hip_fused=lambda *_: False
    )
    for _ in range(2):
        assert hooks.aggregate(lambda *_: "SGLang's", case.prefix, case.bank, 1, *modules_of(case)) == "SGLang's"
    added = hooks.aggregate_add(lambda *_: "SGLang's", case.prefix, case.prefix, case.bank, 1, *modules_of(case))
    assert added == "SGLang's"
    assert caplog.text.count("division by zero") == 1


def test_nothing_is_hooked_where_sglang_changed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    registry = Registry()
    stub(monkeypatch, SCHEDULER)
    stub(monkeypatch, "sglang.srt.plugins.hook_registry", HookRegistry=registry, HookType=registry.HookType)
    stub(monkeypatch, ATTN_RESIDUAL, _aggregate_fused=lambda prefix_sum, bank, rows: None)
    register_hooks(markers=False, kernels=True)
    assert registry.hooks == {}
    assert "nsysk3 SP is off" in caplog.text
    assert "expected" in caplog.text
