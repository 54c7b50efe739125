"""What may not change a number of a whole trace, and what must hold between its numbers."""

from __future__ import annotations

import copy
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import polars as pl
import pytest
from conftest import FIXTURES
from exports import ALLREDUCE, GEMM, SENDRECV, Export, two_ranks
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from report_runs import real

import nsysk3
from nsysk3.result import Result
from nsysk3.result.model import RankMetrics

# Each example is a file written and analysed: no minutes of making a failing one smaller.  All laws but that of the
# order draw nothing but the trace, from one seed: they begin with the result of the same ten files, which is made once.
TRACES = settings(phases=[Phase.explicit, Phase.reuse, Phase.generate])
NAMES = [
    GEMM,
    ALLREDUCE,
    SENDRECV,
    "ncclDevKernel_Generic",
    "void sglang::attn_res_fused_pull_rs_kernel<8>(sglang::Params)",
    "void my_team::mystery_kernel<8>(int)",
]
PROCESSES = ((11, 0), (12, 1))
# Numbers of one rank that say nothing of its clock or of other ranks.
SECTION_4 = [
    "pid",
    "device_id",
    "gpu_uuid",
    "window_ns",
    "compute_ns",
    "comm_ns",
    "fused_ns",
    "copy_ns",
    "overlap_ns",
    "overlap_ratio",
    "exposed_comm_ns",
    "exposed_comm_share",
    "idle_ns",
    "allreduce_count",
    "allreduce_total_ns",
    "allreduce_p50_ns",
    "allreduce_p95_ns",
    "allreduce_p99_ns",
    "p2p_count",
    "p2p_total_ns",
    "unclassified_share",
    "graph_ns",
    "kernel_count",
    "kernel_total_ns",
]


@st.composite
def traces(draw: st.DrawFn) -> Export:
    """A small export of two processes with everything in it, and a kernel at both ends of each."""
    export = Export()
    for (pid, device), uuid in zip(PROCESSES, ("uuid-0", "uuid-1"), strict=True):
        export.gpu(device, cuda=device, uuid=uuid).cuda_device(pid, device, device)
        export.kernel(GEMM, 0, 1, pid=pid, device=device).kernel(GEMM, 260, 261, pid=pid, device=device)
    place = st.sampled_from(PROCESSES)
    when = st.integers(1, 190)
    for (pid, device), name, start, length, stream, launched in draw(
        st.lists(
            st.tuples(
                place, st.sampled_from(NAMES), when, st.integers(1, 60), st.sampled_from((7, 20, 21)), st.booleans()
            ),
            max_size=10,
        )
    ):
        launch = (start - 0.7, start - 0.2) if launched else None
        export.kernel(name, start, start + length, pid=pid, device=device, stream=stream, launch=launch)
    for (pid, device), start, length in draw(st.lists(st.tuples(place, when, st.integers(1, 40)), max_size=3)):
        export.memcpy(start, start + length, pid=pid, device=device, stream=9)
    for (pid, _), op, start in draw(
        st.lists(st.tuples(place, st.sampled_from(("ncclAllGather", "ncclSend", "ncclRecv")), when), max_size=4)
    ):
        export.nccl(op, start - 0.9, start - 0.1, pid=pid, comm=5, size=64, peer=1)
    return export


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


_RESULTS: dict[str, Result] = {}


def analyzed(export: Export) -> Result:
    """What the analysis makes of it; of one with the same rows, the same result."""
    rows = repr(export.rows)
    if rows not in _RESULTS:
        with folder() as place:
            _RESULTS[rows] = nsysk3.analyze(export.write(place / "r.sqlite"))
    return _RESULTS[rows]


def chance(export: Export) -> random.Random:
    """Another for every trace, the same whenever the tests run."""
    return random.Random(repr(export.rows))


@settings(TRACES, max_examples=10)
@seed(1)
@given(traces())
def test_numbers_of_a_trace_hold_together(export: Export) -> None:
    result = analyzed(export)
    spent = dict(result.budget.group_by("rank").agg(pl.col("ns").sum()).iter_rows())
    kernels = result.kernels.group_by("rank").agg(pl.col("count").sum(), pl.col("total_ns").sum())
    counted = {rank: rest for rank, *rest in kernels.iter_rows()}
    by_role = {(rank, role): count for rank, role, count in result.roles.select("rank", "role", "count").iter_rows()}
    for index, rank in enumerate(result.document.ranks):
        assert spent[index] == rank.window_ns == 261_000
        for name in ("overlap_ratio", "exposed_comm_share", "unclassified_share", "coverage"):
            value = getattr(rank, name)
            assert value is None or 0 <= value <= 1
        assert rank.overlap_ns <= min(rank.compute_ns, rank.comm_ns)
        assert rank.exposed_comm_ns + rank.overlap_ns <= rank.comm_ns
        assert [rank.kernel_count, rank.kernel_total_ns] == counted[index]
        assert rank.allreduce_count == by_role.get((index, "allreduce"), 0)
        assert rank.p2p_count == by_role.get((index, "p2p"), 0)
    shares = result.budget.group_by("rank").agg(pl.col("share").sum())
    assert shares["share"].to_list() == pytest.approx([1, 1])


def same_tables(one: Result, other: Result, *, but: tuple[str, ...] = ()) -> None:
    assert set(one.tables) == set(other.tables)
    for name, table in one.tables.items():
        left = table.select(c for c in table.columns if c not in but)
        right = other.tables[name].select(c for c in table.columns if c not in but)
        assert left.equals(right), name


@settings(TRACES, max_examples=12)
@given(traces(), st.randoms(use_true_random=False))
def test_the_order_of_rows_in_the_file_changes_nothing(export: Export, shuffle: random.Random) -> None:
    before = analyzed(export)
    for rows in export.rows.values():
        shuffle.shuffle(rows)
    after = analyzed(export)
    same_tables(before, after)
    left, right = (result.document.model_dump(exclude={"reports": {"__all__": {"path"}}}) for result in (before, after))
    assert left == right


def moved(export: Export, nanoseconds: int) -> Export:
    other = copy.deepcopy(export)
    for table, rows in other.rows.items():
        for row in rows:
            for column in ("start", "end"):
                if table != "StringIds" and row.get(column) is not None:
                    row[column] += nanoseconds
    return other


@settings(TRACES, max_examples=10)
@seed(1)
@given(traces())
def test_when_it_all_happened_changes_nothing_but_the_date(export: Export) -> None:
    luck = chance(export)
    by = luck.choice([luck.randint(-900_000_000, -1), luck.randint(1, 10**9), luck.randint(1, 10**15)])
    before, after = analyzed(export), analyzed(moved(export, by))
    dates = tuple({name for table in before.tables.values() for name in table.columns if name.endswith("_utc_ns")})
    # What is at a moment carries the word utc in its name; everything else is a length, a count or a share.
    same_tables(before, after, but=(*dates, "coverage"))
    started = [result.rank_metrics["window_start_utc_ns"] for result in (before, after)]
    assert (started[1] - started[0]).to_list() == [by, by]


def per_process(export: Export, pid: int) -> Export:
    """What the report would be if only that process had been traced."""
    other = copy.deepcopy(export)
    for table, rows in other.rows.items():
        kept = []
        for row in rows:
            owner = row.get("globalPid") or row.get("globalTid")
            mine = row.get("pid") if table == "TARGET_INFO_CUDA_DEVICE" else owner and (owner >> 24) & 0xFFFFFF
            if not mine or mine == pid:
                kept.append(row)
        other.rows[table] = kept
    return other


@settings(TRACES, max_examples=10)
@seed(1)
@given(traces())
def test_one_report_or_one_for_each_process_gives_the_same_ranks(export: Export) -> None:
    together = analyzed(export).rank_metrics.select(SECTION_4)
    with folder() as place:
        for pid, _ in PROCESSES:
            per_process(export, pid).write(place / f"process{pid}.sqlite")
        apart = nsysk3.analyze(place).rank_metrics.select(SECTION_4)
    assert together.equals(apart)


@pytest.mark.parametrize("trace", ["h200/tp2", "sglang-h200/pp2-lw"])
def test_a_real_report_cut_by_process_gives_the_same_ranks(trace: str, tmp_path: Path) -> None:
    import shutil
    import sqlite3

    source = FIXTURES / f"{trace}.sqlite"
    whole = real(source)
    pids = whole.rank_metrics["pid"].to_list()
    for index, pid in enumerate(pids):
        part = Path(shutil.copy(source, tmp_path / f"part{index}.sqlite"))
        connection = sqlite3.connect(part)
        for table, column in (("CUPTI_ACTIVITY_KIND_KERNEL", "globalPid"), ("CUPTI_ACTIVITY_KIND_MEMCPY", "globalPid"),
                              ("CUPTI_ACTIVITY_KIND_MEMSET", "globalPid"), ("CUPTI_ACTIVITY_KIND_RUNTIME", "globalTid"),
                              ("NVTX_EVENTS", "globalTid")):  # fmt: skip
            if connection.execute("SELECT 1 FROM sqlite_master WHERE name = ?", [table]).fetchone():
                connection.execute(f"DELETE FROM {table} WHERE ({column} >> 24) & 16777215 <> {pid}")
        connection.commit()
        connection.close()
    apart = nsysk3.analyze(tmp_path)
    assert apart.rank_metrics.select(SECTION_4).equals(whole.rank_metrics.select(SECTION_4))


@settings(TRACES, max_examples=10)
@seed(1)
@given(traces())
def test_two_windows_that_meet_add_up_to_the_capture(export: Export) -> None:
    whole, cut = analyzed(export).rank_metrics, chance(export).randint(1, 260_999)
    with folder() as place:
        run = nsysk3.load(export.write(place / "r.sqlite"))
        halves = [nsysk3.analyze(run, window=w).rank_metrics for w in (f"0ns:{cut}ns", f"{cut}ns:261000ns")]
    sums = [name for name in SECTION_4 if name.endswith(("_ns", "_count")) and name[-6:-3] not in ("p50", "p95", "p99")]
    for name in sums:
        assert (halves[0][name] + halves[1][name]).to_list() == whole[name].to_list(), name


@settings(TRACES, max_examples=10)
@seed(1)
@given(traces())
def test_a_result_saved_and_loaded_is_the_same(export: Export) -> None:
    result = analyzed(export)
    with folder() as place:
        assert result.save(place / "deep" / "out") == place / "deep" / "out"
        again = Result.load(place / "deep" / "out")
        files = {file.name for file in (place / "deep" / "out").iterdir()}
    same_tables(result, again)
    assert again.document == result.document
    assert again.to_json() == result.to_json()
    assert not [name for name in files if name.startswith(".")]


@pytest.mark.parametrize("trace", ["h200/tp2", "h200/pp2", "h200/graphwhole", "sglang-h200/pp2-lw"])
def test_a_real_result_saved_and_loaded_is_the_same(trace: str, tmp_path: Path) -> None:
    result = real(FIXTURES / f"{trace}.sqlite")
    again = Result.load(result.save(tmp_path))
    same_tables(result, again)
    assert again.document == result.document


def test_metrics_of_the_model_are_the_columns_of_the_table() -> None:
    result = analyzed(two_ranks())
    assert result.rank_metrics.columns == list(RankMetrics.model_fields)
    assert [rank.model_dump() for rank in result.document.ranks] == result.rank_metrics.to_dicts()
