"""A run.json or a rank map that says something else of the layout than the reports do."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command import run as command
from conftest import FIXTURES
from exports import Export
from identities import gpus

from nsysk3.analysis.analyze import analyze
from nsysk3.compare.layout import layout_of
from nsysk3.trace.load import load

SGLANG, TORCH = FIXTURES / "sglang-h200", FIXTURES / "torch-h200"
RUNS = [path.parent for path in sorted(FIXTURES.rglob("run.json"))]


def with_manifest_of(run: Path, other: Path, folder: Path, *, markers: bool) -> Path:
    """A copy of ``run`` with the run.json of another, and with or without its rank markers."""
    place = folder / "run" / "nodes" / "localhost"
    place.mkdir(parents=True)
    trace = Path(shutil.copyfile(run / "nodes" / "localhost" / "trace.sqlite", place / "trace.sqlite"))
    shutil.copyfile(other / "run.json", folder / "run" / "run.json")
    if not markers:
        with sqlite3.connect(trace) as database:
            database.execute("DELETE FROM NVTX_EVENTS WHERE text LIKE 'nsysk3.rank%'")
        database.close()
    return folder / "run"


@pytest.mark.parametrize("markers", [True, False])
@pytest.mark.parametrize("engine", [SGLANG, TORCH])
@pytest.mark.parametrize(("run", "other"), [("pp1", "pp2"), ("pp2", "pp1")])
def test_a_manifest_of_another_run_is_told(engine: Path, run: str, other: str, markers: bool, tmp_path: Path) -> None:
    path = with_manifest_of(engine / run, engine / other, tmp_path, markers=markers)
    real, said = {"pp1": "PP1 / TP2", "pp2": "PP2 / TP1"}[run], {"pp1": "PP1 / TP2", "pp2": "PP2 / TP1"}[other]
    (problem,) = load(path).problems
    assert problem.message.startswith(f"{path}/run.json: says {said}, but ")
    seen = {"pp1": "collectives, and send each other nothing", "pp2": "hand over by Send and Recv"}[run]
    assert (f"the rank markers in the reports say {real}" if markers else seen) in problem.message


@pytest.mark.parametrize("run", ["pp1", "pp2"])
def test_the_layout_is_then_that_of_the_reports(run: str, tmp_path: Path) -> None:
    other = {"pp1": "pp2", "pp2": "pp1"}[run]
    path = with_manifest_of(SGLANG / run, SGLANG / other, tmp_path, markers=True)
    layout = layout_of(analyze(path))
    assert (layout.pp, layout.tp, layout.source) == ({"pp1": (1, 2), "pp2": (2, 1)}[run] + ("inferred",))
    ran = command("analyze", path, "--out", tmp_path / "out", "-q")
    assert (ran.code, ran.err.count(f"{path}/run.json: says PP")) == (2, 1)


@pytest.mark.parametrize("run", RUNS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_a_manifest_of_its_own_run_is_not(run: Path, tmp_path: Path) -> None:
    for markers in (True, False):
        assert not load(with_manifest_of(run, run, tmp_path / str(markers), markers=markers)).problems


# --- what is certain, and what is not


def described(export: Export, folder: Path, pp: int, tp: int, **changes: Any) -> Path:
    """A run directory of one host that says it is PP x TP."""
    export.write(folder / "run" / "nodes" / "node0" / "trace.sqlite")
    ranks = [
        {"world_rank": rank, "host": "node0", "device": rank, "pp": rank // tp, "tp": rank % tp}
        for rank in range(pp * tp)
    ]
    manifest = {"topology": {"pp": pp, "tp": tp}, "ranks": ranks, **changes}
    (folder / "run" / "run.json").write_text(json.dumps(manifest))
    return folder / "run"


def said(path: Path) -> str:
    """The one thing that is said of run.json, or nothing."""
    problems = [str(problem) for problem in load(path).problems]
    assert len(problems) < 2
    return "".join(problems)


def mark(export: Export, pid: int, text: str) -> Export:
    return export.nvtx(f"nsysk3.rank {text}", 0, 1, pid=pid, event_type=34)


def calls(export: Export, pid: int, count: int, *groups: tuple[str, ...], comm: int = 5) -> Export:
    """NCCL calls of one process, each group ``count`` times."""
    at = 0.0
    for group in groups * count:
        for op in group:
            if "Group" in op:
                export.nccl(op, at, at + 1, pid=pid)
            else:
                export.nccl(op, at, at + 1, pid=pid, comm=comm, size=8, peer=0)
            at += 2
    return export


def alone(op: str) -> tuple[str, ...]:
    return ("ncclGroupStart", op, "ncclGroupEnd")


RING = ("ncclGroupStart", "ncclSend", "ncclRecv", "ncclGroupEnd")
BOTH = (alone("ncclSend"), alone("ncclRecv"))
REDUCE = ("ncclAllReduce",)


def both(count: int, *groups: tuple[str, ...], comm: int = 5) -> Export:
    export = gpus(11, 12)
    for pid in (11, 12):
        calls(export, pid, count, *groups, comm=comm)
    return export


def gather(count: int) -> Export:
    return calls(calls(gpus(11, 12), 11, count, alone("ncclSend")), 12, count, alone("ncclRecv"))


CASES: dict[str, tuple[Callable[[], Export], int, int, str]] = {
    "stages that reduce": (lambda: both(40, REDUCE), 2, 1, "devices 0, 1 of node0 share 40 collectives"),
    "a barrier now and then": (lambda: both(31, REDUCE), 2, 1, ""),
    "stages that reduce and hand over": (lambda: both(40, REDUCE, *BOTH), 2, 1, ""),
    "one stage that hands over": (lambda: both(4, *BOTH), 1, 2, "devices 0, 1 of node0 hand over by Send and Recv"),
    "few of these": (lambda: both(3, *BOTH), 1, 2, ""),
    "a ring, or an all-to-all": (lambda: both(40, RING), 1, 2, ""),
    "hand-overs of one group": (lambda: both(40, *BOTH, REDUCE), 1, 2, ""),
    "a gather": (lambda: gather(40), 1, 2, ""),
    "no call at all": (lambda: gpus(11, 12), 2, 1, ""),
    "calls that graphs hide": (lambda: both(40, REDUCE).graph(200, 300, pid=11), 2, 1, ""),
    "sends without calls": (lambda: both(40, REDUCE).kernel("ncclDevKernel_SendRecv(x)", 200, 300, pid=11), 2, 1, ""),
    "a larger communicator": (
        lambda: gpus(11, 12).nccl("ncclCommInitRank", 0, 5, pid=11, comm=5, nranks=8, rank=3, device=0),
        1, 2, "a communicator in the reports has 8 ranks",
    ),
    "more GPUs": (lambda: gpus(11, 12, 13), 2, 1, "3 GPUs did work in the reports"),
    "a title": (lambda: gpus(11, 12).process(12, "sglang::scheduler_PP1_TP0"), 1, 2, "says stage 1, TP rank 0"),
    "sizes": (lambda: mark(gpus(11, 12), 12, "world=1/2 pp=1/2 tp=0/1"), 1, 2, "markers in the reports say PP2 / TP1"),
    "a stage too many": (lambda: mark(gpus(11, 12), 12, "world=1 pp=1 tp=0"), 1, 2, "say rank 1 (stage 1, TP rank 0)"),
    "other stages": (
        lambda: mark(gpus(11, 12, 13, 14), 12, "world=1 pp=1 tp=0"), 2, 2,
        "by the marker of device 1 of node0 it is rank 1 (stage 1, TP rank 0), not rank 1 (stage 0, TP rank 1)",
    ),
    "other devices": (
        lambda: mark(mark(gpus(11, 12), 11, "world=1 pp=0 tp=1"), 12, "world=0 pp=0 tp=0"), 1, 2,
        "by its marker device 0 of node0 is rank 1, not rank 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_only_what_is_certain_contradicts(case: str, tmp_path: Path) -> None:
    make, pp, tp, words = CASES[case]
    message = said(described(make(), tmp_path, pp, tp))
    assert words in message
    assert bool(words) == bool(message)


def test_one_device_number_for_every_process_says_nothing_of_stages(tmp_path: Path) -> None:
    export = Export()
    for rank in range(4):
        export.kernel("gemm(x)", 0, 100, pid=11 + rank, device=0)
        calls(export, 11 + rank, 40, *BOTH, comm=6 + rank % 2)
    assert not said(described(export, tmp_path, 2, 2))


def test_a_renamed_host_and_replicas_are_no_contradiction(tmp_path: Path) -> None:
    path = described(both(40, *BOTH), tmp_path, 2, 1)
    (path / "nodes" / "node0").rename(path / "nodes" / "renamed")
    assert not said(path)
    assert not said(described(gpus(11, 12, 13, 14), tmp_path / "dp", 1, 2, server={"args": ["--dp-size", "2"]}))
