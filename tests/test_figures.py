"""The figures that issue 2 gives for real traces, and what every version of Nsight must have in common."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from conftest import FIXTURES, ROOT
from fixture_results import result_of

import nsysk3
from nsysk3.errors import InputError
from nsysk3.result.model import RankMetrics
from nsysk3.trace.nvtx import read_nvtx
from nsysk3.trace.report import Report, open_report

THIRD_PARTY = ROOT.parent / "shared" / "traces" / "third-party" / "nsys-ai-mfu-2gpu-2026.2.sqlite"
VERSIONS = sorted((FIXTURES / "versions").glob("*.sqlite"))
REAL = ["h200/tp2", "h200/pp2", "h200/graph", "sglang-h200/tp2-lw", "sglang-h200/pp2-lw"]


def rank_on(trace: str, device: int) -> RankMetrics:
    return next(rank for rank in result_of(trace).document.ranks if rank.device_id == device)


FIGURES: list[tuple[str, int, dict[str, Any]]] = [
    (
        "h200/tp2",
        0,
        {
            "window_ns": 298_038_641,
            "compute_ns": 236_636_862,
            "comm_ns": 57_443_058,
            "overlap_ns": 0,
            "allreduce_count": 256,
            "allreduce_total_ns": 57_443_058,
            "allreduce_p50_ns": 224_256,
            "p2p_count": 0,
        },
    ),
    (
        "h200/pp2",
        1,
        {
            "window_ns": 305_722_346,
            "compute_ns": 142_720_543,
            "comm_ns": 161_895_693,
            "overlap_ns": 0,
            "allreduce_count": 0,
            "allreduce_total_ns": 0,
            "allreduce_p50_ns": None,
            "p2p_count": 8,
            "p2p_total_ns": 161_895_693,
        },
    ),
    (
        "h200/graph",
        1,
        {
            "window_ns": 72_299_978,
            "compute_ns": 56_366_584,
            "comm_ns": 15_115_123,
            "overlap_ns": 0,
            "allreduce_count": 64,
            "allreduce_total_ns": 15_115_123,
            "allreduce_p50_ns": 234_127.5,
            "graph_ns": 0,
        },
    ),
    (
        "sglang-h200/tp2-lw",
        0,
        {
            "window_ns": 2_395_503_067,
            "compute_ns": 2_090_520_191,
            "comm_ns": 168_872_862,
            "overlap_ns": 192,
            "allreduce_count": 289,
            "allreduce_total_ns": 168_221_533,
            "allreduce_p50_ns": 544_064,
        },
    ),
    (
        "sglang-h200/pp2-lw",
        0,
        {
            "window_ns": 2_777_731_112,
            "compute_ns": 2_198_292_884,
            "comm_ns": 1_827_477_916,
            "overlap_ns": 1_384_182_823,
            "allreduce_count": 0,
            "p2p_count": 64,
        },
    ),
]


@pytest.mark.parametrize(("trace", "device", "figures"), FIGURES, ids=[f"{trace} {gpu}" for trace, gpu, _ in FIGURES])
def test_figures_of_the_issue(trace: str, device: int, figures: dict[str, Any]) -> None:
    rank = rank_on(trace, device)
    assert {name: getattr(rank, name) for name in figures} == figures


@pytest.mark.skipif(not THIRD_PARTY.exists(), reason=f"{THIRD_PARTY} may not be committed and is not here")
def test_figures_of_the_third_party_trace() -> None:
    result = nsysk3.analyze(THIRD_PARTY)
    rank = next(rank for rank in result.document.ranks if rank.device_id == 0)
    assert (rank.window_ns, rank.compute_ns, rank.comm_ns) == (299_848_812, 253_690_832, 17_172_652)
    assert (rank.allreduce_count, rank.p2p_count) == (0, 0)
    # 33 SendRecv on each of the two GPUs: an all-to-all, no pipeline.
    exchanged = result.roles.filter((pl.col("rank") == 0) & (pl.col("role") == "all_to_all"))
    assert exchanged["count"].to_list() == [33]
    # Correlation ids are shared by both processes: each launch still belongs to one kernel.
    run = nsysk3.load(THIRD_PARTY)
    launched = run.events.filter(pl.col("tid").is_not_null()).join(run.ranks.select("rank", "pid"), on="rank")
    assert launched.height > 3900
    assert ((launched["tid"] // 2**24) % 2**24 == launched["pid"]).all()


@pytest.mark.parametrize("trace", REAL)
def test_real_traces_agree_with_a_plain_sweep(trace: str) -> None:
    """The unions again, from the file itself, by adding and subtracting one nanosecond count at a time."""
    path = FIXTURES / f"{trace}.sqlite"
    with closing(sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)) as connection:
        rows = connection.execute(
            "SELECT k.deviceId, k.start, k.end, s.value LIKE 'nccl%' FROM CUPTI_ACTIVITY_KIND_KERNEL k "
            "LEFT JOIN StringIds s ON s.id = k.shortName"
        ).fetchall()
    ranks = result_of(trace).document.ranks
    assert {rank.device_id for rank in ranks} == {row[0] for row in rows}
    for rank in ranks:
        mine = [row[1:] for row in rows if row[0] == rank.device_id]
        compute, comm, both = sweep(mine)
        assert rank.window_ns == max(end for _, end, _ in mine) - min(start for start, _, _ in mine)
        # The fixtures run no fused kernels, so what is not NCCL's is compute.
        assert (rank.fused_ns, rank.compute_ns, rank.comm_ns, rank.overlap_ns) == (0, compute, comm, both)
        assert rank.exposed_comm_ns == comm - both
        assert rank.kernel_count == len(mine)
        assert rank.kernel_total_ns == sum(end - start for start, end, _ in mine)


def sweep(kernels: Iterable[tuple[int, int, int]]) -> tuple[int, int, int]:
    """Lengths with compute, with communication and with both running."""
    edges = [(start, 1, comm) for start, _, comm in kernels] + [(end, -1, comm) for _, end, comm in kernels]
    running = [0, 0]
    compute = communication = both = last = 0
    for at, step, comm in sorted(edges):
        compute += (at - last) if running[0] else 0
        communication += (at - last) if running[1] else 0
        both += (at - last) if all(running) else 0
        running[comm] += step
        last = at
    return compute, communication, both


# --- versions


@pytest.mark.parametrize("path", VERSIONS, ids=lambda path: path.stem)
def test_a_trace_without_gpu_work_is_one_line_that_names_it(path: Path) -> None:
    with pytest.raises(InputError) as error:
        nsysk3.load(path)
    text = str(error.value)
    assert text.startswith(f"{path}: no GPU work in this trace")
    assert "nsys profile" in text
    assert "\n" not in text


@cache
def read(name: str) -> tuple[Report, pl.DataFrame]:
    """One of the small traces of every version, and its ranges."""
    report = open_report(FIXTURES / "versions" / f"{name}.sqlite", name)
    return report, read_nvtx(report)


def names_of(name: str) -> list[str | None]:
    return sorted(read(name)[1]["name"].cast(pl.String).to_list(), key=str)


@pytest.mark.parametrize("kind", ["c", "p"])
def test_every_version_gives_the_same_ranges(kind: str) -> None:
    suffix = {"c": "", "p": ".full"}[kind]
    of_version = {year: names_of(f"{kind}_{year}{suffix}") for year in (2022, 2023, 2024)}
    assert of_version[2022] == of_version[2023] == of_version[2024]
    expected = {
        # registered, plain, empty (no name), and the same script's two ranges that never closed
        "c": [None, "ascii-text", "ascii-text", "killed-open", "ncclAllReduce", "never-ended", "wide-é"],
        "p": ["async", "attn", "attn", "attn", "layer_0", "layer_1", "layer_2", "never closed", "outer 层 é", "thr"],
    }
    assert of_version[2022] == expected[kind]


@pytest.mark.parametrize("path", VERSIONS, ids=lambda path: path.stem)
def test_every_version_says_what_it_is(path: Path) -> None:
    report, ranges = read(path.stem)
    exporter, schema = {
        "2022": ("2022.4.2.1", "3.0.0"),
        "2023": ("2023.4.4.54", "3.7.2"),
    }.get(path.stem.partition(".")[0][-4:], ("2024.2.3.38", "3.11.1"))
    assert (report.exporter, report.schema_version) == (exporter, schema)
    assert report.clock == "session start"
    # captured on one day in November 2026
    assert 1_795_900_000 < (report.utc_epoch_ns or 0) / 1e9 < 1_796_000_000
    length = (report.end_ns or 0) - report.time_shift_ns
    into = ranges.select(
        low=pl.col("start").min() - report.utc_epoch_ns, high=pl.col("end").max() - report.utc_epoch_ns
    )
    assert into["low"].item() >= 0
    assert into["high"].item() <= length


def test_shifted_and_normalized_exports_give_the_same_utc() -> None:
    (plain, ranges), (normalized, of_normalized), (shifted, of_shifted) = map(read, ("c_2024", "ts_norm", "ts_shift"))
    assert (plain.time_shift_ns, shifted.time_shift_ns) == (0, 1_000_000_000)
    assert normalized.time_shift_ns == normalized.utc_epoch_ns
    assert ranges.equals(of_normalized)
    assert ranges.equals(of_shifted)
    # and it is UTC: the capture's own start plus what the file says
    with closing(sqlite3.connect(f"file:{plain.path}?mode=ro&immutable=1", uri=True)) as connection:
        first = connection.execute("SELECT min(start) FROM NVTX_EVENTS WHERE eventType IN (59, 60)").fetchone()[0]
        epoch = connection.execute("SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME").fetchone()[0]
    assert ranges["start"].min() == first + epoch


def test_ranges_that_never_closed_are_marked_and_keep_their_place() -> None:
    for name, open_ones in (("c_2022", 2), ("c_2023", 2), ("c_2024", 2), ("ts_norm", 2), ("k_fork2024", 1)):
        _, ranges = read(name)
        truncated = ranges.filter("truncated")
        assert truncated.height == open_ones, name
        assert (truncated["end"] == ranges["end"].max()).all()
    _, forked = read("k_fork2024")
    assert forked["tid"].n_unique() == 2
