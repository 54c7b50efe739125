"""Which rank a GPU is: every source, their order, and what is said when nothing tells."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import FIXTURES
from exports import Export, gpid
from identities import gpus, ranks_of

import nsysk3
from nsysk3.trace.load import Run, load


@pytest.fixture
def loaded(tmp_path: Path) -> Callable[..., Run]:
    def loaded(export: Export, name: str = "r", **options: Any) -> Run:
        return load(export.write(tmp_path / f"{name}.sqlite"), **options)

    return loaded


# --- each source alone


def test_the_order_of_gpus_is_a_guess_and_said(loaded: Callable[..., Run]) -> None:
    run = loaded(gpus(30, 20))
    assert ranks_of(run) == {30: (0, None, None, None, "inferred"), 20: (1, None, None, None, "inferred")}
    notes = nsysk3.analyze(run).document.notes
    assert any(note.startswith("2 of 2 ranks are numbered by host and GPU order") for note in notes)


def test_a_known_rank_is_not_called_a_guess() -> None:
    result = nsysk3.analyze(FIXTURES / "h200" / "tp2.sqlite")
    assert not [note for note in result.document.notes if "guess" in note]
    assert [rank.rank_source for rank in result.document.ranks] == ["marker", "marker"]


@pytest.mark.parametrize(("registered", "event_type"), [(True, 34), (False, 34), (True, 59)])
def test_marker(loaded: Callable[..., Run], registered: bool, event_type: int) -> None:
    export = gpus(11, 12)
    for pid, world in ((11, 7), (12, 3)):
        text = f"nsysk3.rank world={world} pp={world // 4} tp={world % 4} ep=0"
        export.nvtx(text, 0, 1, pid=pid, registered=registered, event_type=event_type)
    assert ranks_of(loaded(export)) == {12: (3, 0, 3, 0, "marker"), 11: (7, 1, 3, 0, "marker")}


def test_nccl_payload_of_the_world(loaded: Callable[..., Run]) -> None:
    export = gpus(11, 12)
    # Each process also joins a communicator of its own, which says nothing of the world.
    for pid, rank in ((11, 1), (12, 0)):
        export.nccl("ncclCommInitRank", 0, 5, pid=pid, comm=9, nranks=1, rank=0, device=0)
        export.nccl("ncclCommInitRankConfig", 6, 9, pid=pid, comm=5, nranks=2, rank=rank, device=0)
    assert ranks_of(loaded(export)) == {
        12: (0, None, None, None, "NCCL payload"),
        11: (1, None, None, None, "NCCL payload"),
    }


def test_nccl_payload_of_a_subgroup_is_no_world_rank(loaded: Callable[..., Run]) -> None:
    # PP2 x TP2: the largest communicator in the capture is a TP group of 2, and there are 4 GPUs.
    export = gpus(11, 12, 13, 14)
    for index, pid in enumerate((11, 12, 13, 14)):
        export.nccl("ncclCommInitRank", 0, 5, pid=pid, comm=5 + index // 2, nranks=2, rank=index % 2, device=index)
    assert {source for *_, source in ranks_of(loaded(export)).values()} == {"inferred"}


def test_nccl_payload_of_a_subgroup_leaves_it_to_the_next_source(loaded: Callable[..., Run]) -> None:
    export = gpus(11, 12, 13)
    for index, pid in enumerate((11, 12)):
        export.nccl("ncclCommInitRank", 0, 5, pid=pid, comm=5, nranks=2, rank=index, device=index)
    found = ranks_of(loaded(export.mpi_rank(11, 4).mpi_rank(12, 5).mpi_rank(13, 6)))
    assert [(world, source) for world, *_, source in found.values()] == [(n, "MPI_RANKS") for n in (4, 5, 6)]


def test_mpi_ranks(loaded: Callable[..., Run]) -> None:
    found = ranks_of(loaded(gpus(11, 12).mpi_rank(11, 1).mpi_rank(12, 0)))
    assert found == {12: (0, None, None, None, "MPI_RANKS"), 11: (1, None, None, None, "MPI_RANKS")}


@pytest.mark.parametrize("where", ["process", "thread"])
def test_process_title_of_sglang(loaded: Callable[..., Run], where: str) -> None:
    export = gpus(11, 12, 13, 14)
    titles = {11: (1, 1), 12: (0, 0), 13: (1, 0), 14: (0, 1)}
    for pid, (pp, tp) in titles.items():
        title = f"sglang::scheduler_PP{pp}_TP{tp}_EP{tp}"
        export.process(pid, title) if where == "process" else export.thread(pid, pid, title)
    # PP strided, TP contiguous
    assert ranks_of(loaded(export)) == {
        12: (0, 0, 0, 0, "process title"),
        14: (1, 0, 1, 1, "process title"),
        13: (2, 1, 0, 0, "process title"),
        11: (3, 1, 1, 1, "process title"),
    }


def test_process_title_with_both_numbers_of_two_digits(loaded: Callable[..., Run]) -> None:
    export = gpus(11).process(11, "sglang::scheduler_PP1_TP3_EP3")
    assert ranks_of(loaded(export))[11] == (7, 1, 3, 3, "process title")
    export = gpus(11).process(11, "sglang::scheduler_DP0_TP12_EP12")
    assert ranks_of(loaded(export, "two"))[11] == (12, None, 12, 12, "process title")


@pytest.mark.parametrize(
    "title", ["sglang::scheduler", "sglang::detokenizer_TP1", "python", "my_sglang::scheduler_TP1"]
)
def test_other_titles_tell_nothing(loaded: Callable[..., Run], title: str) -> None:
    assert ranks_of(loaded(gpus(11).process(11, title)))[11][-1] == "inferred"


@pytest.mark.parametrize(
    "variable", ["RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "PALS_RANKID", "SLURM_PROCID"]
)
def test_environment_names_the_one_rank_of_a_report(loaded: Callable[..., Run], variable: str) -> None:
    assert ranks_of(loaded(gpus(11).env(**{variable: "5", "LOCAL_RANK": "1"})))[11] == (
        5,
        None,
        None,
        None,
        "environment",
    )


def test_environment_is_of_the_launcher_where_a_report_has_several_ranks(loaded: Callable[..., Run]) -> None:
    assert {source for *_, source in ranks_of(loaded(gpus(11, 12).env(RANK="5"))).values()} == {"inferred"}


def test_a_local_rank_is_no_world_rank(loaded: Callable[..., Run]) -> None:
    assert ranks_of(loaded(gpus(11).env(LOCAL_RANK="5", NODE_RANK="3")))[11][-1] == "inferred"


@pytest.mark.parametrize("pattern", ["rank{}", "rank_{}", "run-Rank-{}.part", "node1.rank{}.x"])
def test_file_names(tmp_path: Path, pattern: str) -> None:
    for rank in (2, 10, 0):
        gpus(100 + rank).write(tmp_path / f"{pattern.format(rank)}.sqlite")
    run = load(tmp_path)
    assert run.ranks["world_rank"].to_list() == [0, 2, 10]
    assert run.ranks["pid"].to_list() == [100, 102, 110]
    assert set(run.ranks["rank_source"]) == {"file name"}


def test_names_without_ranks_are_ordered_as_people_count(tmp_path: Path) -> None:
    for node in (10, 2, 1):
        gpus(100 + node, 200 + node).write(tmp_path / f"node{node}.sqlite")
    ranks = load(tmp_path).ranks
    assert ranks["report_name"].to_list() == ["node1", "node1", "node2", "node2", "node10", "node10"]
    assert ranks["pid"].to_list() == [101, 201, 102, 202, 110, 210]
    assert ranks["world_rank"].to_list() == list(range(6))
    assert set(ranks["rank_source"]) == {"inferred"}


# --- their order


def everything(pid: int) -> Export:
    """One GPU about which every source says something else."""
    export = gpus(pid, host="node0").nvtx("nsysk3.rank world=2 pp=2 tp=0", 0, 1, pid=pid, event_type=34)
    export.nccl("ncclCommInitRank", 0, 5, pid=pid, comm=5, nranks=8, rank=3, device=0)
    return export.mpi_rank(pid, 4).process(pid, "sglang::scheduler_PP0_TP5").env(RANK="6")


def test_sources_go_in_order_of_trust(tmp_path: Path) -> None:
    ranks = tmp_path / "ranks.toml"
    ranks.write_text("[[rank]]\nworld_rank = 0\n")
    run_dir = tmp_path / "run"
    export = everything(11)
    path = export.write(run_dir / "nodes" / "node0" / "rank7.sqlite")
    manifest = {"ranks": [{"world_rank": 1, "host": "node0", "device": 0, "pp": 1, "tp": 0}]}
    (run_dir / "run.json").write_text(json.dumps(manifest))

    def source(**options: Any) -> tuple[int, str]:
        path.unlink()
        export.write(path)
        world, *_, said = ranks_of(load(run_dir, **options))[11]
        return world, said

    assert source(ranks=ranks) == (0, "user map")
    assert source() == (1, "manifest")
    (run_dir / "run.json").unlink()
    assert source() == (2, "marker")
    export.rows["NVTX_EVENTS"] = [row for row in export.rows["NVTX_EVENTS"] if row["eventType"] != 34]
    assert source() == (3, "NCCL payload")
    export.rows["NVTX_EVENTS"] = []
    assert source() == (4, "MPI_RANKS")
    export.rows["MPI_RANKS"] = []
    assert source() == (5, "process title")
    export.rows["PROCESSES"] = []
    assert source() == (6, "environment")
    export.rows["META_DATA_CAPTURE"] = []
    assert source() == (7, "file name")
    path.rename(path.with_name("trace.sqlite"))
    path = path.with_name("trace.sqlite")
    assert source() == (0, "inferred")


def test_two_gpus_that_claim_one_rank_are_both_unknown(loaded: Callable[..., Run]) -> None:
    found = ranks_of(loaded(gpus(11, 12).mpi_rank(11, 1).mpi_rank(12, 1)))
    assert found == {11: (0, None, None, None, "inferred"), 12: (1, None, None, None, "inferred")}


def test_where_one_rank_is_unknown_all_are_numbered_and_said_to_be_guessed(loaded: Callable[..., Run]) -> None:
    found = ranks_of(loaded(gpus(11, 12).mpi_rank(12, 0)))
    assert {pid: (world, source) for pid, (world, *_, source) in found.items()} == {
        11: (0, "inferred"),
        12: (1, "inferred"),
    }


def test_global_pids_of_the_builder_are_those_of_real_reports() -> None:
    # h200/tp2: PROCESSES says globalPid 281485747683328 is pid 642
    assert gpid(642) % 2**48 == 281485747683328 % 2**48
