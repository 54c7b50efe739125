"""What people ran into, named after where it was reported: which kernel is what, by its name and its NCCL call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from case_results import US, only, roles
from conftest import FIXTURES
from exports import ALLREDUCE, GEMM, SENDRECV, Export, two_ranks

import nsysk3
from nsysk3.analysis.nccl_links import link_nccl
from nsysk3.result.model import RankMetrics

# --- names


def test_case_hta_208_four_nccl_generations(analyzed: Any) -> None:
    names = [
        "ncclKernel_AllReduce_RING_LL_Sum_half",
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL",
        "ncclSymDevKernel_AllReduce_AGxLL_R_Sum_bf16",
        "ncclSymkDevKernel_AllReduce_RSxLD_AGxST_Sum_bf16",
    ]
    export = Export()
    for index, name in enumerate(names):
        export.kernel(name, index * 100, index * 100 + 50)
    rank = only(analyzed(export))
    assert (rank.allreduce_count, rank.allreduce_total_ns, rank.comm_ns, rank.compute_ns) == (4, 200 * US, 200 * US, 0)


def test_case_nccl_739_a_generic_kernel_is_named_by_its_call(analyzed: Any) -> None:
    generic = "ncclDevKernel_Generic(ncclDevKernelArgsStorage<(unsigned long)4096>)"
    export = Export().nccl("ncclAllGather", 0, 20).kernel(generic, 30, 130, launch=(5, 10))
    export.kernel(generic, 130, 200, launch=(50, 55))
    result = analyzed(export)
    assert roles(result) == {"all_gather": 1, "comm_other": 1}
    assert only(result).comm_ns == 170 * US


def test_case_nccl_2196_algorithm_and_protocol_are_never_reported() -> None:
    result = nsysk3.analyze(FIXTURES / "h200" / "tp2.sqlite")
    words = {column for table in result.tables.values() for column in table.columns} | set(RankMetrics.model_fields)
    assert not [word for word in words if "proto" in word or "algo" in word]
    categories = set(result.categories["category"].to_list())
    assert not [name for name in categories if "RING" in name or "LL" in name.split("_")]


def test_case_tracelens_547_custom_collectives_are_communication(analyzed: Any) -> None:
    name = "void sglang::cross_device_reduce_2stage<__nv_bfloat16, 8>(sglang::RankData*, int)"
    result = analyzed(Export().kernel(name, 0, 50).kernel(GEMM, 50, 100))
    rank = only(result)
    assert (rank.comm_ns, rank.compute_ns, rank.allreduce_count) == (50 * US, 50 * US, 1)


def test_case_tracelens_15_what_no_rule_names_is_listed_and_warned_of(analyzed: Any, tmp_path: Path) -> None:
    mine = "void my_team::mystery_collective<8>(int)"
    export = Export().kernel(mine, 0, 60).kernel(GEMM, 60, 100)
    result = analyzed(export)
    assert only(result).unclassified_share == 0.6
    assert result.unclassified.select("name", "count", "total_ns").rows() == [(mine, 1, 60 * US)]
    (warning,) = [note for note in result.document.notes if "no rule names" in note]
    assert "60%" in warning
    assert "mystery_collective" in warning
    # AND a rule of the user's settles it
    rules = tmp_path / "mine.toml"
    rules.write_text('[[rule]]\npattern = "mystery_collective"\ncategory = "MINE"\nrole = "allreduce"\n')
    settled = analyzed(export, rules=rules)
    assert (only(settled).allreduce_count, only(settled).unclassified_share) == (1, 0)
    assert not [note for note in settled.document.notes if "no rule names" in note]


# --- NCCL calls and their payloads


def test_case_nvtx_101_a_call_of_another_thread_does_not_hold_the_launch(analyzed: Any) -> None:
    generic = "ncclDevKernel_Generic"
    export = Export().nccl("ncclAllReduce", 0, 20, tid=1).kernel(generic, 30, 40, launch=(5, 10), tid=2)
    export.nccl("ncclAllGather", 0, 20, tid=3).kernel(generic, 50, 60, launch=(6, 10), tid=3)
    assert roles(analyzed(export)) == {"all_gather": 1, "comm_other": 1}


def test_case_schema_rows_of_every_process_do_not_multiply_bytes(tmp_path: Path) -> None:
    export = two_ranks()
    export.rows["NVTX_PAYLOAD_SCHEMA_ENTRIES"] *= 2
    calls = nsysk3.load(export.write(tmp_path / "r.sqlite")).nccl_calls
    assert (calls.height, calls["bytes"].sum()) == (8, 8 * 4096)
    assert calls["comm"].unique().to_list() == [77]


def test_case_nsys_ai_98_payloads_are_blobs_in_a_text_column(tmp_path: Path) -> None:
    with_blobs = (
        Export().kernel(ALLREDUCE, 30, 50, launch=(5, 10)).nccl("ncclAllReduce", 0, 20, comm=2**63 + 5, size=64)
    )
    without = Export().kernel(ALLREDUCE, 30, 50, launch=(5, 10))
    without.nccl("ncclAllReduce", 0, 20, comm=1, size=64, blob=False)
    known = nsysk3.load(with_blobs.write(tmp_path / "with.sqlite"))
    assert known.nccl_calls.select("bytes", "comm").rows() == [(64, 2**63 + 5 - 2**64)]  # the same bits, signed
    assert not [note for note in known.notes if "payloads" in note]
    unknown = nsysk3.load(without.write(tmp_path / "without.sqlite"))
    assert unknown.nccl_calls.select("op", "bytes", "comm").rows() == [("ncclAllReduce", None, None)]
    assert any("--include-blobs=true" in note for note in unknown.notes)


def test_case_nsys_ai_mfu_sendrecv_of_several_peers_is_an_all_to_all(analyzed: Any) -> None:
    export = Export()
    for index, peers in enumerate(([1], [0, 1])):
        at = index * 1000
        export.nccl("ncclGroupStart", at, at + 1)
        for number, peer in enumerate(peers):
            export.nccl("ncclSend", at + 10 * number + 2, at + 10 * number + 4, comm=1, size=100, peer=peer)
            export.nccl("ncclRecv", at + 10 * number + 5, at + 10 * number + 7, comm=1, size=100, peer=peer)
        export.nccl("ncclGroupEnd", at + 30, at + 60)
        export.kernel(SENDRECV, at + 100, at + 200, launch=(at + 40, at + 45))
    result = analyzed(export)
    assert roles(result) == {"p2p": 1, "all_to_all": 1}
    assert only(result).p2p_count == 1


def test_case_nsys_ai_mfu_sendrecv_without_evidence_is_not_called_p2p(analyzed: Any) -> None:
    # On a stream with other collectives, and no NCCL range: nothing says that it is pipeline P2P.
    mixed = Export().kernel(SENDRECV, 0, 50, stream=20).kernel(ALLREDUCE, 50, 100, stream=20)
    assert roles(analyzed(mixed)) == {"allreduce": 1, "comm_other": 1}
    # A stream that carries nothing else is what a peer pair has.
    own = Export().kernel(SENDRECV, 0, 50, stream=20).kernel(ALLREDUCE, 50, 100, stream=21)
    assert roles(analyzed(own)) == {"allreduce": 1, "p2p": 1}


def test_case_nccl_228_copy_engine_collectives_are_communication(analyzed: Any) -> None:
    export = Export().nccl("ncclAllGather", 0, 20, comm=1, size=64).memcpy(30, 130, launch=(5, 10))
    export.memcpy(200, 210, launch=(190, 195)).kernel(GEMM, 0, 300)
    rank = only(analyzed(export))
    assert (rank.comm_ns, rank.copy_ns, rank.overlap_ns) == (100 * US, 10 * US, 100 * US)


def test_case_nsys_ai_300_links_of_many_calls_are_exact() -> None:
    """The join of launches and ranges as a sweep gives what holding each against each would."""
    generator = np.random.default_rng(7)
    start = np.sort(generator.integers(0, 10**7, 300)) * 10
    calls = pl.DataFrame(
        {
            "report": 0,
            "tid": generator.integers(1, 3, 300),
            "start": start,
            "end": start + 9,
            "op": "ncclAllReduce",
            "comm": np.arange(300),
            "bytes": 1,
            "peer": pl.Series([None] * 300, dtype=pl.Int64),
        }
    ).unique(["tid", "start"])
    at = np.concatenate([generator.integers(0, 10**8, 500), start[:200] + 4])
    events = pl.DataFrame({"report": 0, "tid": generator.integers(1, 3, 700), "api_start": at})
    linked = link_nccl(events, calls)
    expected = []
    for _, tid, launched in events.iter_rows():
        held = calls.filter((pl.col("tid") == tid) & (pl.col("start") <= launched) & (pl.col("end") >= launched))
        expected.append(held["comm"].item() if held.height else None)
    assert linked["comm"].to_list() == expected
    assert 50 < sum(comm is not None for comm in expected) < 700
