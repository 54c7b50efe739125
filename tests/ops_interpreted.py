"""The Triton kernel in Triton's interpreter; test_ops_attn_res runs this file in a process with TRITON_INTERPRET=1.

The interpreter of Triton 3.6 truncates float32 to bfloat16 instead of rounding, and cannot take a program's number as
the start of a loop with numpy 2.4; both are put right here.  Compiled kernels do neither.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from ops_cases import BF16, assert_normed, make_case
from triton.runtime import interpreter

from nsysk3.ops import reference as ref
from nsysk3.ops.attn_res_triton import launch

_convert = interpreter._convert_float
_patch = interpreter._patch_lang_tensor


def _round(value: Any, source: Any, target: Any, mode: Any) -> Any:
    if source == tl.float32 and target == tl.bfloat16:
        bits = np.ascontiguousarray(value, dtype=np.float32).view(np.uint32)
        rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return np.where(np.isnan(value), np.uint16(0x7FC0), rounded).astype(np.uint16).reshape(np.shape(value))
    if source == tl.bfloat16 and target == tl.float32:
        return (np.asarray(value).view(np.uint16).astype(np.uint32) << 16).reshape(np.shape(value))
    return _convert(value, source, target, mode)


def _patch_tensor(tensor: Any, scope: Any) -> None:
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).reshape(-1)[0]))


interpreter._convert_float = _round
interpreter._patch_lang_tensor = _patch_tensor


@pytest.mark.parametrize(
    ("hidden", "rows", "add", "write", "programs", "slot_major", "scale"),
    [
        (256, 0, False, False, 9, False, 1.0),
        (256, 0, True, True, 2, False, 3e-4),
        (200, 1, False, True, 1, True, 1.0),
        (96, 3, True, True, 2, True, 3e-4),
        (200, 5, True, False, 3, False, 1.0),
        (7168, 8, True, True, 2, False, 1.0),
        (7168, 8, False, False, 2, True, 3e-4),
    ],
)
def test_kernel(
    hidden: int, rows: int, add: bool, write: bool, programs: int, slot_major: bool, scale: float
) -> None:  # fmt: skip
    case = make_case(3, 1, hidden, rows, seed=hidden + rows, slots=rows + 2, slot_major=slot_major, scale=scale)
    addend, bank = case.partials[0] if add else None, case.bank.clone(memory_format=torch.preserve_format)
    into = rows + 1 if write else None  # not the next slot: the number given counts
    normed, prefix = launch(
        case.prefix, addend, bank, rows, *case.weights[:2], case.eps, case.eps, into, programs=programs
    )
    wanted = case.prefix if addend is None else (case.prefix.double() + addend.double()).to(BF16)
    assert torch.equal(prefix, wanted)
    assert_normed(normed, ref.attn_res(wanted, case.bank, rows, *case.weights))
    if write:
        assert torch.equal(bank[:, rows + 1], wanted)
        bank[:, rows + 1] = case.bank[:, rows + 1]
    assert torch.equal(bank.view(torch.int16), case.bank.view(torch.int16)), "nothing else is written"


def test_strided_prefix_other_types_and_two_eps() -> None:
    for dtype in (torch.float32, torch.float16):
        case = make_case(4, 1, 64, 2, seed=1, scale=3e-3, dtype=dtype)
        wide = torch.full((4, 100), float("nan"), dtype=dtype)
        wide[:, :64] = case.prefix
        normed, _ = launch(wide[:, :64], None, case.bank, 2, *case.weights[:2], 1e-5, 1e-3, None, programs=3)
        truth = ref.attn_res(case.prefix, case.bank, 2, *case.weights[:2], 1e-5, norm_eps=1e-3)
        assert_normed(normed, truth, within=0.3)
