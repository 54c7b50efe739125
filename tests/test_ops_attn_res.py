"""Attention residual and norm: every implementation gives the reference's value."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the operations need PyTorch")

from ops_cases import BF16, assert_normed, make_case  # noqa: E402

from nsysk3.errors import InputError  # noqa: E402
from nsysk3.ops import attn_res  # noqa: E402
from nsysk3.ops import reference as ref  # noqa: E402


@pytest.mark.parametrize("rows", [0, 2, 8])
@pytest.mark.parametrize("scale", [1.0, 3e-4])
def test_in_pytorch(rows: int, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attn_res, "_CHUNK", 3)  # several chunks, the last one short
    case = make_case(7, 1, 256, rows, seed=rows, scale=scale)
    bank = case.bank.clone()
    normed = attn_res.attn_res_norm(case.prefix, bank, rows, *case.weights, write_row=rows)
    assert_normed(normed, ref.attn_res(case.prefix, case.bank, rows, *case.weights))
    assert torch.equal(bank[:, rows], case.prefix)

    normed, prefix = attn_res.attn_res_add_norm(case.prefix, case.partials[0], bank, rows, *case.weights)
    assert torch.equal(prefix, (case.prefix.double() + case.partials[0].double()).to(BF16))
    assert_normed(normed, ref.attn_res(prefix, case.bank, rows, *case.weights))


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_in_the_triton_interpreter() -> None:
    script = Path(__file__).with_name("ops_interpreted.py")
    arguments = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(script)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_does_not_fit_is_said() -> None:
    case = make_case(4, 1, 64, 2, seed=0)
    for rows, write, bank in ((4, None, case.bank), (-1, None, case.bank), (2, 1, case.bank), (2, 3, case.bank),
                              (2, None, case.bank[:3]), (2, None, case.bank.float())):  # fmt: skip
        with pytest.raises(InputError):
            attn_res.attn_res_norm(case.prefix, bank, rows, *case.weights, write_row=write)


def test_no_tokens() -> None:
    case = make_case(0, 1, 64, 1, seed=0)
    assert attn_res.attn_res_norm(case.prefix, case.bank, 1, *case.weights).shape == (0, 64)


def test_weights_are_converted_once_and_again_when_they_change() -> None:
    weight = torch.randn(64).to(BF16)
    first = attn_res.as_type(weight, torch.float32)
    assert attn_res.as_type(weight, torch.float32) is first
    weight.mul_(2)
    assert torch.equal(attn_res.as_type(weight, torch.float32), weight.float())
    assert attn_res.as_type(first, torch.float32) is first


def test_a_bank_is_copied_only_where_a_kernel_cannot_read_it() -> None:
    whole = torch.zeros(4, 3, 64, dtype=BF16)
    for bank in (whole, whole[1:], whole[:, :2], torch.zeros(3, 4, 64, dtype=BF16).transpose(0, 1)):
        assert attn_res.readable(bank) is bank
    odd = torch.zeros(4, 3, 67, dtype=BF16)[:, :, :64]
    for bank in (odd, whole[..., ::2], torch.zeros(4 * 3 * 64 + 1, dtype=BF16)[1:].view(4, 3, 64)):
        assert attn_res.readable(bank) is not bank


@pytest.mark.parametrize(("capability", "hidden"), [(80, 1024), (90, 7168), (120, 7168)])
def test_triton_compiles_it_without_spilling(capability: int, hidden: int, tmp_path: Path) -> None:
    """Without a GPU: what the interpreter takes, the compiler may not."""
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from nsysk3.ops.attn_res_triton import _attn_res_kernel as kernel
    from nsysk3.ops.attn_res_triton import warps_for

    texts = {"score_weight": "*fp32", "tokens": "i32", "rows": "i32", "write_row": "i32", "eps": "fp32", "norm_eps": "fp32"}  # fmt: skip  # noqa: E501
    fixed = {"HIDDEN": hidden, "BLOCK": triton.next_power_of_2(hidden), "STAGES": 3, "HAS_ADDEND": True, "WRITES": True}
    names = kernel.arg_names
    types = {n: "constexpr" if n in fixed else texts.get(n, "i32" if n.endswith("_stride") else "*bf16") for n in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n not in fixed and n not in texts}
    source = ASTSource(kernel, types, {(names.index(n),): value for n, value in fixed.items()}, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps_for(fixed["BLOCK"])})  # fmt: skip  # noqa: E501
    code = tmp_path / "kernel.ptx"
    code.write_text(made.asm["ptx"])
    assert ".v4.b32" in made.asm["ptx"]  # 16 bytes at a time
    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    if capability != 90 or not assembler.is_file():
        return
    done = subprocess.run([assembler, "-v", "--gpu-name=sm_90a", code, "-o", tmp_path / "kernel"], capture_output=True, text=True, check=True)  # fmt: skip  # noqa: E501
    assert " 0 bytes spill stores" in done.stderr
