"""Sequence-parallel collectives: requested, active, fell back and why, from manifest, marks and kernels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from conftest import FIXTURES
from exports import GEMM, Export

import nsysk3
from nsysk3.analysis.sp_collectives import sp_calls, sp_info, sp_sentences
from nsysk3.classify import RuleSet
from nsysk3.result.model import SpInfo
from nsysk3.run.manifest import Feature, Manifest

ARGS = "(int)7, (int)7, (int)2, (int)13, (int)0, (int)0"
K0 = f"void k3::rs_attn_res<{ARGS}, (k3::Remote)0, (bool)0>(k3::RingParams)"
K1 = "void k3::rs_attn_res<(int)7, (int)7, (int)2, (int)9, (int)4, (int)0, (k3::Remote)1, (bool)0>(k3::RingParams)"
K3 = f"void k3::rs_attn_res<{ARGS}, (k3::Remote)0, (bool)1>(k3::RingParams)"
SGLANG_RS = "void sglang::attn_res_fused_pull_rs_kernel<sglang::Trait<(int)7168>, (int)1>(sglang::Params)"
SGLANG_AG = "void sglang::sp_collective::all_gather_direct_kernel<(unsigned int)8>(...)"
NCCL_RS = "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<(unsigned long)4096>)"
SWITCH, CARRY = "SGLANG_K3_SP_COLLECTIVE", "SGLANG_K3_SP_ATTN_RES"


@pytest.mark.parametrize(
    ("name", "category", "role"),
    [
        (K0, "ATTN_RES", "compute"),
        (K1, "FUSED_RS_ATTNRES_NORM", "fused"),
        (K3, "FUSED_ATTNRES_NORM_AG", "fused"),
        (K0.replace("(int)", "").replace("(bool)0", "false"), "ATTN_RES", "compute"),
        (K3.replace("(int)", "").replace("(bool)1", "true"), "FUSED_ATTNRES_NORM_AG", "fused"),
        ("_attn_res_kernel", "ATTN_RES", "compute"),
    ],
)
def test_what_nsysk3s_own_kernels_are(name: str, category: str, role: str) -> None:
    match = RuleSet.load().match(name, name)
    assert (match.category, match.role) == (category, role)


def mark(operation: str, path: str, reason: str, mode: str = "auto", number: int = 1) -> str:
    return f"k3.{operation} M=8192 Ml=4096 nvb=4 P=2 epoch={number} path={path} mode={mode} reason={reason}"


def calls(*marks: str) -> pl.DataFrame:
    return sp_calls(pl.Series("name", [*marks, "nsysk3.layer 3", None, "k3.attn_res M=8192 nvb=3"], pl.Categorical))


def kernels(**counts: int) -> pl.DataFrame:
    names = {
        "k1": (K1, "fused"), "k0": (K0, "compute"), "sglang": (SGLANG_RS, "fused"),
        "gather": (SGLANG_AG, "all_gather"), "nccl": (NCCL_RS, "reduce_scatter"),
    }  # fmt: skip
    rows = [(*names[key], count) for key, count in counts.items()]
    return pl.DataFrame(rows, schema={"name": pl.String, "role": pl.String, "count": pl.Int64}, orient="row")


def manifest(**features: dict[str, Any]) -> Manifest:
    return Manifest(features=[Feature(name=name, **said) for name, said in features.items()])


def test_marks_are_counted_by_what_they_say() -> None:
    found = calls(
        mark("rs_attn_res", "pull", "measured fastest (2026-11-30)", number=1),
        mark("rs_attn_res", "pull", "measured fastest (2026-11-30)", number=2),
        mark("attn_res_ag", "nccl", "cases measured around this one disagree"),
    )
    assert found.rows() == [
        ("rs_attn_res", "pull", "auto", "measured fastest (2026-11-30)", 2),
        ("attn_res_ag", "nccl", "auto", "cases measured around this one disagree", 1),
    ]


ASKED = {"requested": True}
NOTHING = calls()
CASES = [
    # nsysk3: requested, active, fell back, reason, kernels, calls, fused calls
    (manifest(NSYSK3_SP=ASKED), kernels(k1=8), calls(mark("rs_attn_res", "pull", "x")), False,
     ("nsysk3", True, True, False, None, 8, 1, 1)),
    (manifest(NSYSK3_SP=ASKED), kernels(k1=8),
     calls(mark("rs_attn_res", "pull", "x"), mark("rs_attn_res", "nccl", "why")), False,
     ("nsysk3", True, True, True, "1 of 2 calls by NCCL: why (1)", 8, 2, 1)),
    (None, kernels(nccl=3, k0=5), calls(mark("rs_attn_res", "nccl", "no peer access", "fused")), False,
     ("nsysk3", True, False, True, "1 of 1 calls by NCCL: no peer access (1)", 0, 1, 0)),
    (manifest(NSYSK3_SP={**ASKED, "reason": "no plugin"}), kernels(nccl=3), NOTHING, False,
     ("nsysk3", True, False, True, "no plugin", 0, None, None)),
    (None, kernels(k1=2), NOTHING, False, ("nsysk3", None, True, None, None, 2, None, None)),
    (None, kernels(nccl=2), calls(mark("rs_attn_res", "nccl", "asked for", "nccl")), False,
     ("nsysk3", False, False, False, "1 of 1 calls by NCCL: asked for (1)", 0, 1, 0)),
    (manifest(NSYSK3_SP=ASKED), kernels(), NOTHING, True,
     ("nsysk3", True, None, None, "CUDA graphs were traced as a whole: their kernels are unknown", None, None, None)),
    # sglang
    (manifest(**{SWITCH: ASKED}), kernels(sglang=4, gather=4), NOTHING, False,
     ("sglang", True, True, False, None, 8, None, None)),
    (manifest(**{SWITCH: {**ASKED, "active": False, "fell_back": True, "reason": "K3 SP collective requires SM100"}}),
     kernels(nccl=9), NOTHING, False, ("sglang", True, False, True, "K3 SP collective requires SM100", 0, None, None)),
    (manifest(**{SWITCH: {**ASKED, "active": True, "fell_back": False}}), kernels(nccl=9), NOTHING, False,
     ("sglang", True, False, True, "none of their kernels ran in the window; 9 reduce-scatters and 0 all-gathers did",
      0, None, None)),
    (manifest(**{CARRY: {"requested": False, "fell_back": False, "reason": "K3 SP collective requires SM100"}}),
     kernels(nccl=9), NOTHING, False,
     ("sglang", False, False, False, "none of their kernels ran in the window; 9 reduce-scatters and 0 all-gathers did",
      0, None, None)),
    (manifest(**{SWITCH: ASKED}), kernels(), NOTHING, True,
     ("sglang", True, None, None, "CUDA graphs were traced as a whole: their kernels are unknown", None, None, None)),
]  # fmt: skip


@pytest.mark.parametrize(("run", "ran", "marks", "opaque", "expected"), CASES)
def test_what_is_said(
    run: Manifest | None, ran: pl.DataFrame, marks: pl.DataFrame, opaque: bool, expected: tuple[Any, ...]
) -> None:
    (entry,) = sp_info(run, ran, marks, opaque)
    assert tuple(entry.model_dump().values()) == expected


def test_nothing_known_is_nothing_said() -> None:
    assert sp_info(None, kernels(nccl=5, k0=3), NOTHING, False) == []
    assert sp_info(Manifest(), kernels(), NOTHING, True) == []


def test_sentences() -> None:
    said = [sp_sentences(sp_info(run, ran, marks, opaque)) for run, ran, marks, opaque, _ in CASES]
    assert said[0] == ["SP collectives of nsysk3: requested and active, 8 kernels in the window"]
    assert said[1] == [
        "SP collectives of nsysk3: requested and active, 8 kernels in the window; in part fell back: "
        "1 of 2 calls by NCCL: why (1)"
    ]
    assert said[3] == ["SP collectives of nsysk3: requested, but fell back: no plugin"]
    assert said[4] == ["SP collectives of nsysk3: not known to be requested and active, 2 kernels in the window"]
    assert said[5] == []  # neither asked for nor there
    assert said[6][0].startswith("SP collectives of nsysk3: requested; whether they ran cannot be told")


def test_a_run_says_it_in_its_result(tmp_path: Path) -> None:
    export = Export().gpu(0, cuda=0)
    for number in range(3):
        start = number * 100.0
        text = mark("rs_attn_res", "pull", "measured fastest (today)", number=number)
        export.kernel(GEMM, start, start + 50).kernel(K1, start + 50, start + 80).nvtx(text, start, start + 40)
    export.write(tmp_path / "trace.sqlite")
    (tmp_path / "run.json").write_text(json.dumps({"features": [{"name": "NSYSK3_SP", "requested": True}]}))
    result = nsysk3.analyze(nsysk3.load(tmp_path))
    (entry,) = result.document.sp
    assert entry == SpInfo(
        name="nsysk3", requested=True, active=True, fell_back=False, reason=None, kernels=3, calls=3, fused_calls=3
    )
    assert "SP collectives of nsysk3: requested and active, 3 kernels in the window" in result.document.sentences
    assert result.rank_metrics["fused_ns"].to_list() == [90_000]


def test_a_run_without_them_says_nothing() -> None:
    result = nsysk3.analyze(nsysk3.load(FIXTURES / "h200" / "tp2.sqlite"))
    assert result.document.sp == []
    assert not any("SP collectives" in sentence for sentence in result.document.sentences)
