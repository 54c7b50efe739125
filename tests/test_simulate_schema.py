"""Simulated exports have the tables of real ones, and real ones and simulated ones load through the same reader."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import polars as pl
import pytest
from conftest import FIXTURES
from simulated import make

from nsysk3.analysis.analyze import analyze
from nsysk3.simulate.ranges import payload
from nsysk3.simulate.schema import VERSIONS, create_statements, tables, version_of

REAL = {
    "2022.4": ("versions/p_2022.full.sqlite",),
    "2023.4": ("versions/p_2023.full.sqlite",),
    "2024.2": ("versions/p_2024.full.sqlite",),
    "2025.3": ("sglang-h200/pp2-lw.sqlite", "h200/graphwhole.sqlite"),
}
# What Nsight 2026 added to tables that nsysk3 simulates; no file of it may be committed here.
ADDED_2026 = {
    "CUPTI_ACTIVITY_KIND_KERNEL": {
        "qmdBulkReleaseDone", "qmdPreexitDone", "qmdLastCtaDone", "graphId", "clusterX", "clusterY", "clusterZ",
        "clusterSchedulingPolicy", "maxPotentialClusterSize", "maxActiveClusters", "sharedMemoryRequestedPercentage",
        "tensorSizeMinusOneElements",
    },
    "TARGET_INFO_SESSION_START_TIME": {"systemClockNs"},
}  # fmt: skip
SMALL = {"pp": 2, "tp": 2, "nodes": 2, "layers": 4, "micro_batches": 3, "layer_us": 500.0}


def read(path: Path, query: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)) as connection:
        return connection.execute(query).fetchall()


def columns(path: Path, table: str) -> list[tuple[object, ...]]:
    """Name, declared type, NOT NULL, primary key."""
    return read(path, f"SELECT name, type, \"notnull\", pk FROM pragma_table_info('{table}')")


@pytest.mark.parametrize("version", REAL)
def test_tables_are_those_of_a_real_file(version: str, tmp_path: Path) -> None:
    path = tmp_path / "export.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        for statement in create_statements(version):
            connection.execute(statement)
        connection.commit()
    for table in tables(version):
        real = next(found for name in REAL[version] if (found := columns(FIXTURES / name, table)))
        assert columns(path, table) == real, table


def test_2026_adds_what_it_is_known_to_add() -> None:
    older, newer = tables("2025.3"), tables("2026.2")
    for table, declared in older.items():
        assert set(newer[table]) - set(declared) >= ADDED_2026.get(table, set())
        assert set(declared) <= set(newer[table])


@pytest.mark.parametrize("asked", VERSIONS)
def test_every_variant_loads_and_gives_the_same_figures(asked: str, tmp_path: Path) -> None:
    made = make(tmp_path, **SMALL, schema=asked, drift_ppm=0.0, wander_ns=0.0)
    result = analyze(made.path)
    assert {report.schema_version for report in result.document.reports} == {
        {"2022.4": "3.0.0", "2023.4": "3.7.2", "2024.2": "3.11.1", "2025.3": "3.20.3", "2026.2": "3.25.0"}[
            version_of(asked)
        ]
    }
    ranks = result.tables["rank_metrics"]
    true = pl.DataFrame(made.facts["ranks"])
    assert ranks["allreduce_total_ns"].to_list() == true["allreduce_total_ns"].to_list()
    assert ranks["p2p_total_ns"].to_list() == true["p2p_ns"].to_list()
    assert ranks["stable"].all()
    assert result.document.simulated == "simulated"


def test_ids_are_packed_as_in_a_real_file(tmp_path: Path) -> None:
    """Machine and VM above 24 bits of process above 24 bits of thread; correlation ids shared between processes."""
    made = make(tmp_path, **SMALL).path / "nodes" / "node601" / "trace.sqlite"
    real = FIXTURES / "sglang-h200" / "pp2-lw.sqlite"
    for path in (made, real):
        kernels = read(path, "SELECT DISTINCT globalPid FROM CUPTI_ACTIVITY_KIND_KERNEL")
        threads = read(path, "SELECT DISTINCT globalTid FROM CUPTI_ACTIVITY_KIND_RUNTIME")
        processes = {row[0] for row in read(path, "SELECT globalPid FROM PROCESSES")}
        assert {(int(str(g)) >> 48) for (g,) in kernels + threads} == {1}
        assert {g for (g,) in kernels} <= processes
        assert {int(str(t)) & ~0xFFFFFF for (t,) in threads} >= {g for (g,) in kernels}
        assert {g for (g,) in kernels} == {
            1 << 48 | int(str(pid)) << 24
            for (pid,) in read(
                path, "SELECT DISTINCT pid FROM PROCESSES JOIN CUPTI_ACTIVITY_KIND_KERNEL USING (globalPid)"
            )
        }
    shared = "SELECT count(*) FROM (SELECT correlationId FROM CUPTI_ACTIVITY_KIND_KERNEL GROUP BY 1 HAVING count(DISTINCT globalPid) > 1)"  # noqa: E501
    assert int(str(read(made, shared)[0][0])) > 10


def test_payloads_are_the_bytes_of_a_real_file() -> None:
    real = FIXTURES / "sglang-h200" / "pp2-lw.sqlite"
    sends = "NVTX_EVENTS JOIN StringIds ON textId = id WHERE value = 'ncclSend'"
    query = f"SELECT DISTINCT CAST(binaryData AS BLOB) FROM {sends}"
    for (blob,) in read(real, query):
        assert isinstance(blob, bytes)
        size, peer = int.from_bytes(blob[40:48], "little"), int.from_bytes(blob[48:52], "little", signed=True)
        ours = payload("ncclSend", int.from_bytes(blob[32:40], "little"), size, peer)
        assert ours[:52] == blob[:52]  # the last four bytes are padding, in which NCCL leaves what was there
        assert len(ours) == len(blob)
