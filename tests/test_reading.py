"""What nsys-schema.md says of exports: optional columns, ids, devices, text, clocks, facts of the host."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from conftest import FIXTURES
from exports import ALLREDUCE, BASE_NS, EPOCH_NS, GEMM, Export, gtid, ns, two_ranks

import nsysk3
from nsysk3.analysis.layer_names import parse_names
from nsysk3.analysis.marked_ranges import mark_ranges
from nsysk3.trace.launches import read_launches
from nsysk3.trace.nccl import read_nccl_calls
from nsysk3.trace.nvtx import read_nvtx
from nsysk3.trace.report import Report, open_report


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., Report]:
    def opened(export: Export, name: str = "r") -> Report:
        return open_report(export.write(tmp_path / f"{name}.sqlite"), name)

    return opened


def metrics(path: Path) -> pl.DataFrame:
    return nsysk3.analyze(path).rank_metrics.drop("report", "host")


# --- what may be missing


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> pl.DataFrame:
    """The metrics of the small run that lacks nothing."""
    return metrics(two_ranks().write(tmp_path_factory.mktemp("whole") / "whole.sqlite"))


OPTIONAL = [
    ("CUPTI_ACTIVITY_KIND_KERNEL", "contextId"),
    ("CUPTI_ACTIVITY_KIND_KERNEL", "greenContextId"),
    ("CUPTI_ACTIVITY_KIND_KERNEL", "graphNodeId"),
    ("CUPTI_ACTIVITY_KIND_KERNEL", "mangledName"),
    ("CUPTI_ACTIVITY_KIND_KERNEL", "shortName"),
    ("CUPTI_ACTIVITY_KIND_KERNEL", "demangledName"),
    ("CUPTI_ACTIVITY_KIND_RUNTIME", "eventClass"),
    ("NVTX_EVENTS", "binaryData"),
    ("NVTX_EVENTS", "endGlobalTid"),
    ("NVTX_EVENTS", "text"),
    ("TARGET_INFO_GPU", "busLocation"),
    ("ANALYSIS_DETAILS", "startTime"),
    ("TARGET_INFO_SESSION_START_TIME", "utcTime"),
]


@pytest.mark.parametrize(("table", "column"), OPTIONAL, ids=[f"{table}.{column}" for table, column in OPTIONAL])
def test_columns_that_a_version_lacks_change_no_metric(
    tmp_path: Path, whole: pl.DataFrame, table: str, column: str
) -> None:
    assert metrics(two_ranks().without(table, column).write(tmp_path / "less.sqlite")).equals(whole)


@pytest.mark.parametrize(
    "table",
    ["NVTX_EVENTS", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_PAYLOAD_SCHEMA_ENTRIES", "TARGET_INFO_CUDA_DEVICE"],
)
def test_tables_that_a_capture_lacks_change_no_interval(tmp_path: Path, whole: pl.DataFrame, table: str) -> None:
    assert metrics(two_ranks().without(table).write(tmp_path / "less.sqlite")).equals(whole)


def test_the_newest_of_several_versions_of_a_table_is_read(opened: Callable[..., Report]) -> None:
    export = (
        Export()
        .nvtx("first", 0, 1)
        .row("NVTX_EVENTS_V3", start=ns(0), end=ns(1), eventType=59, text="third", globalTid=gtid(1))
    )
    export.row("NVTX_EVENTS_V10", start=ns(0), end=ns(1), eventType=59, text="tenth", globalTid=gtid(1))
    export.row("NVTX_EVENTS_OTHER", text="another table")
    assert read_nvtx(opened(export))["name"].to_list() == ["tenth"]


def test_columns_that_only_some_version_has_are_ignored(tmp_path: Path, whole: pl.DataFrame) -> None:
    export = two_ranks()
    for row in export.rows["CUPTI_ACTIVITY_KIND_RUNTIME"]:
        row["name"] = "a legacy text column"
    export._columns["CUPTI_ACTIVITY_KIND_RUNTIME"] += ["name", "callchainId"]
    assert metrics(export.write(tmp_path / "more.sqlite")).equals(whole)


def test_kernels_without_a_process_are_one_rank_a_gpu(tmp_path: Path, whole: pl.DataFrame) -> None:
    export = two_ranks().without("CUPTI_ACTIVITY_KIND_KERNEL", "globalPid")
    result = nsysk3.analyze(export.write(tmp_path / "r.sqlite"))
    assert [rank.pid for rank in result.document.ranks] == [None, None]
    assert result.document.not_measured["pid"] == "the export has no process ids"
    for name in ("window_ns", "compute_ns", "comm_ns", "allreduce_p50_ns"):
        assert result.rank_metrics[name].to_list() == whole[name].to_list()


# --- names


def test_the_demangled_name_decides_and_the_short_name_where_there_is_none(tmp_path: Path) -> None:
    # cutlass::device_kernel says what it is only in its template arguments
    name = "void cutlass::device_kernel<flash::FlashAttnFwdSm90<64>>(flash::Params)"
    export = Export().kernel(name, 0, 10).kernel(ALLREDUCE, 20, 30)
    result = nsysk3.analyze(export.write(tmp_path / "r.sqlite"))
    assert dict(result.kernels.select("short_name", "category").iter_rows()) == {
        "device_kernel": "MLA_ATTN",
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL": "AR",
    }
    short_only = nsysk3.analyze(
        export.without("CUPTI_ACTIVITY_KIND_KERNEL", "demangledName").write(tmp_path / "s.sqlite")
    )
    assert set(short_only.kernels["name"].to_list()) == {"device_kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"}


def test_the_mangled_name_is_the_last_resort(tmp_path: Path) -> None:
    export = Export().kernel(None, 0, 10)
    export.rows["CUPTI_ACTIVITY_KIND_KERNEL"][0]["mangledName"] = export.string("_Z5saxpyPdS_")
    export.without("CUPTI_ACTIVITY_KIND_KERNEL", "demangledName", "shortName")
    assert nsysk3.load(export.write(tmp_path / "r.sqlite")).names["name"].to_list() == ["_Z5saxpyPdS_"]


def test_text_that_is_not_utf8_is_mended_and_costs_no_row(tmp_path: Path, opened: Callable[..., Report]) -> None:
    export = (
        Export()
        .nvtx("good", 0, 10)
        .nvtx("PLACEHOLDER", 20, 30)
        .kernel("gemm_PLACEHOLDER", 0, 10)
        .process(1, "PLACEHOLDER")
    )
    path = export.write(tmp_path / "r.sqlite")
    with closing(sqlite3.connect(path)) as connection:
        for table, column in (("NVTX_EVENTS", "text"), ("StringIds", "value"), ("PROCESSES", "name")):
            bad = f"CAST(X'{'ff'}' || '{column}' || X'e4bd' AS TEXT)"
            connection.execute(f"UPDATE {table} SET {column} = {bad} WHERE {column} LIKE '%PLACEHOLDER'")
        connection.commit()
    report = open_report(path, "r")
    assert read_nvtx(report)["name"].to_list() == ["good", "\ufffdtext\ufffd"]
    assert report.processes["title"].to_list() == ["\ufffdname\ufffd"]
    assert nsysk3.load(path).names["name"].to_list() == ["\ufffdvalue\ufffd"]


def test_names_of_ranges_come_from_text_then_from_the_registered_string(opened: Callable[..., Report]) -> None:
    export = Export().nvtx("plain", 0, 1).nvtx("registered", 2, 3, registered=True).nvtx(None, 4, 5).nvtx("", 6, 7)
    export.nvtx("both", 8, 9)
    export.rows["NVTX_EVENTS"][-1]["textId"] = export.string("not this one")
    assert read_nvtx(opened(export))["name"].to_list() == ["plain", "registered", None, None, "both"]


def test_what_is_left_unread_of_nvtx_changes_no_layer(opened: Callable[..., Report], tmp_path: Path) -> None:
    # GIVEN a registered module that only an unregistered layer shows to be one, names of no use, and a range of one of
    # those after the stated end of the capture, which disproves it for a range still open
    export = Export(duration_us=100).nvtx("model.embed_tokens", 0, 5, registered=True).nvtx("model.layers.0", 6, 9)
    export.nvtx("nsysk3.forward 1", 0, None, registered=True).nvtx("scheduler.idle", 50, 60, registered=True)
    export.nvtx("scheduler.idle", 300, 400, registered=True)
    fixtures = [path for path in sorted(FIXTURES.rglob("*.sqlite")) if ".nsysk3." not in path.name]
    reports = [opened(export), *(open_report(path, path.stem) for path in fixtures)]
    for report in reports:
        every, some = (read_nvtx(report, use) for use in (None, lambda names: parse_names(names)["name"]))
        marked, kept = (mark_ranges(ranges)[0] for ranges in (every, some))
        assert kept.equals(marked), report.name
        assert some.height <= every.height
    some = read_nvtx(reports[0], lambda names: parse_names(names)["name"])
    assert some.filter(pl.col("name") == "nsysk3.forward 1")["end"].to_list() == [EPOCH_NS + ns(400)]
    # WHEN the capture did end there, idle ranges are not read
    export.rows["NVTX_EVENTS"].pop()
    rows = read_nvtx(opened(export, "less"), lambda names: parse_names(names)["name"])
    assert rows["name"].to_list() == ["nsysk3.forward 1", "model.embed_tokens", "model.layers.0"]


def test_marks_names_and_domains_are_no_ranges(opened: Callable[..., Report]) -> None:
    export = Export().nvtx("range", 0, 9)
    for kind in (33, 34, 39, 75, 76, 97):
        export.nvtx("no range", 1, None, event_type=kind)
    assert read_nvtx(opened(export))["name"].to_list() == ["range"]


def test_open_ranges_end_with_the_capture_and_are_marked(opened: Callable[..., Report]) -> None:
    # GIVEN a range that Nsight closed at the capture's end, one without an end, and one that did close
    export = Export(duration_us=500).nvtx("closed by nsight", 0, 500).nvtx("null", 10, None).nvtx("closed", 20, 499)
    for shift in (0, 10**9):
        export.rows.pop("META_DATA_EXPORT", None)
        export.meta("EXPORT_CONFIG_TIME_SHIFT", str(shift))
        for row in export.rows["NVTX_EVENTS"] if shift else ():
            row["start"] += shift
            row["end"] = row["end"] and row["end"] + shift
        ranges = read_nvtx(opened(export, f"r{shift}"))
        found = dict(ranges.select("name", "truncated").iter_rows())
        assert found == {"closed by nsight": True, "null": True, "closed": False}
        assert ranges["end"].to_list() == [EPOCH_NS + ns(500), EPOCH_NS + ns(500), EPOCH_NS + ns(499)]


# --- ids and devices


def test_processes_and_threads_are_unpacked_from_global_ids(tmp_path: Path) -> None:
    pid, tid = 0xABCDEF, 0xFEDCBA
    export = Export().kernel(GEMM, 0, 10, pid=pid, launch=(0, 1), tid=tid)
    # hardware and VM ids in the upper 16 bits belong to no process
    for table, column in (("CUPTI_ACTIVITY_KIND_KERNEL", "globalPid"), ("CUPTI_ACTIVITY_KIND_RUNTIME", "globalTid")):
        export.rows[table][0][column] += 0x7F << 56
    run = nsysk3.load(export.write(tmp_path / "r.sqlite"))
    assert run.ranks["pid"].to_list() == [pid]
    assert run.events["tid"].to_list() == [gtid(pid, tid) + (0x7F << 56)]


def test_ids_of_the_upper_half_survive_sqlite_and_parquet(tmp_path: Path) -> None:
    export = (
        Export().kernel(GEMM, 0, 10, pid=5, launch=(0, 1)).nccl("ncclAllReduce", 0, 5, pid=5, comm=2**63 + 9, size=8)
    )
    high = 0x80 << 56  # a hardware id that makes the 64-bit number negative in SQLite
    for table, column in (
        ("CUPTI_ACTIVITY_KIND_KERNEL", "globalPid"),
        ("CUPTI_ACTIVITY_KIND_RUNTIME", "globalTid"),
        ("NVTX_EVENTS", "globalTid"),
    ):
        for row in export.rows[table]:
            row[column] += high - 2**64
    runs = [
        nsysk3.load(export.write(tmp_path / "r.sqlite")),
        nsysk3.load(export.write_directory(tmp_path / "r_pqtdir", "parquetdir")),
        nsysk3.load(export.write_directory(tmp_path / "r_arwdir", "arrowdir", large=True)),
    ]
    for run in runs:
        assert run.ranks["pid"].to_list() == [5]
        assert run.events["api_start"].null_count() == 0
        assert run.nccl_calls["comm"].to_list() == [2**63 + 9 - 2**64]
        assert run.events.equals(runs[0].events)
        assert run.nccl_calls.equals(runs[0].nccl_calls)


def test_a_launch_needs_both_keys(opened: Callable[..., Report], tmp_path: Path) -> None:
    # GIVEN two processes that use the same correlation ids, as real reports do
    export = Export()
    for pid in (11, 12):
        for correlation in (1, 2):
            at = pid * 100 + correlation * 10
            export.kernel(GEMM, at + 50, at + 55, pid=pid, correlation=correlation, launch=(at, at + 3), tid=pid)
    events = nsysk3.load(export.write(tmp_path / "r.sqlite")).events
    assert events.height == 4
    assert (events["start"] - events["api_start"]).unique().to_list() == [50_000]


def test_the_outer_of_two_calls_with_one_id_is_the_launch(opened: Callable[..., Report]) -> None:
    export = Export().kernel(GEMM, 50, 60, correlation=3).launch(10, 20, correlation=3)
    export.launch(12, 18, correlation=3, name="cuLaunchKernel").launch(
        9, 30, correlation=3, name="cudaEventRecord_v3020"
    )
    launches = read_launches(opened(export))
    assert launches.select("api_start", "api_end").rows() == [(EPOCH_NS + ns(10), EPOCH_NS + ns(20))]


def test_the_gpu_of_an_ordinal_is_found_by_process_where_nsight_says(
    opened: Callable[..., Report], tmp_path: Path
) -> None:
    # GIVEN two processes with CUDA_VISIBLE_DEVICES of their own: each calls its GPU 0
    export = Export().kernel(GEMM, 0, 1, pid=11).kernel(GEMM, 0, 1, pid=12)
    export.gpu(0, cuda=0, uuid="first").gpu(1, cuda=1, uuid="second")
    export.cuda_device(11, 0, 0).cuda_device(12, 0, 1)
    ranks = nsysk3.load(export.write(tmp_path / "r.sqlite")).ranks
    assert ranks.select("pid", "gpu_uuid").rows() == [(11, "first"), (12, "second")]


def test_the_gpu_of_an_ordinal_is_not_the_one_with_that_number(opened: Callable[..., Report], tmp_path: Path) -> None:
    # A Polaris node numbers its GPUs 3, 2, 1, 0 where CUDA counts 0, 1, 2, 3 (ALCF).
    export = Export()
    for cuda in range(4):
        export.kernel(GEMM, 0, 1, pid=11 + cuda, device=cuda).gpu(3 - cuda, cuda=cuda, uuid=f"cuda-{cuda}")
    ranks = nsysk3.load(export.write(tmp_path / "r.sqlite")).ranks
    assert ranks.select("device_id", "gpu_uuid").rows() == [(cuda, f"cuda-{cuda}") for cuda in range(4)]


def test_copies_alone_make_no_rank_and_stretch_no_window(tmp_path: Path) -> None:
    export = Export().kernel(GEMM, 100, 200, pid=1).memcpy(0, 50, pid=1).memcpy(150, 260, pid=1, stream=9)
    export.memset(190, 195, pid=1, stream=9).memcpy(0, 500, pid=2, device=1)
    (rank,) = nsysk3.analyze(export.write(tmp_path / "r.sqlite")).document.ranks
    assert (rank.pid, rank.window_ns, rank.compute_ns) == (1, 100_000, 100_000)
    assert (rank.copy_ns, rank.idle_ns) == (50_000, 0)


# --- clocks


def test_a_report_without_a_clock_says_so_and_one_already_in_utc_does_not(tmp_path: Path) -> None:
    none = Export(epoch_ns=None).kernel(GEMM, 0, 10)
    run = nsysk3.load(none.write(tmp_path / "none.sqlite"))
    assert run.reports[0].clock == "none"
    assert any("cannot be placed on UTC" in note for note in run.notes)
    already = Export(epoch_ns=None).row("ANALYSIS_DETAILS", duration=5, startTime=EPOCH_NS, stopTime=EPOCH_NS + 5)
    run = nsysk3.load(already.kernel(GEMM, 0, 10).write(tmp_path / "already.sqlite"))
    assert run.reports[0].clock == "already UTC"
    assert run.events["start"].to_list() == [BASE_NS]


@pytest.mark.parametrize("table", ["META_DATA_EXPORT", "EXPORT_META_DATA"])
def test_the_time_shift_is_taken_off_under_either_name_of_its_table(tmp_path: Path, table: str) -> None:
    export = Export().kernel(GEMM, 0, 10).meta("EXPORT_CONFIG_TIME_SHIFT", "-500").renamed("META_DATA_EXPORT", table)
    assert nsysk3.load(export.write(tmp_path / "r.sqlite")).events["start"].to_list() == [EPOCH_NS + BASE_NS + 500]


# --- payloads and facts of the host


def test_payloads_of_a_schema_that_is_not_described_are_left_out(opened: Callable[..., Report]) -> None:
    export = Export().nccl("ncclAllReduce", 0, 5, comm=3, size=8).nccl("ncclSend", 10, 15, comm=3, size=16, peer=1)
    entries = export.rows["NVTX_PAYLOAD_SCHEMA_ENTRIES"]
    export.rows["NVTX_PAYLOAD_SCHEMA_ENTRIES"] = [row for row in entries if row["schemaId"] != 2**24 + 9]
    export.nvtx("ncclAllReduce", 20, 25, registered=True, domain=1, blob=b"short")
    export.nvtx(
        "ncclAllReduce", 30, 35, registered=True, domain=1, blob=export.rows["NVTX_EVENTS"][0]["binaryData"][:44]
    )
    calls = read_nccl_calls(opened(export))
    assert calls.select("op", "comm", "bytes", "peer").rows() == [
        ("ncclAllReduce", 3, 8, None),
        ("ncclSend", None, None, None),
        ("ncclAllReduce", None, None, None),
        ("ncclAllReduce", 3, None, None),  # cut short: what is whole is read
    ]


def test_facts_of_the_host_are_read_and_environments_are_not_shown(
    opened: Callable[..., Report], tmp_path: Path
) -> None:
    export = Export().kernel(GEMM, 0, 10).env(RANK="3", SECRET_TOKEN="hunter2").host("node7")
    export.row("META_DATA_CAPTURE", name="PROCESS_0:ENVIRONMENT_VARIABLE", value='BASH_FUNC_x="() {\n RANK=9\n}"')
    report = opened(export)
    assert dict(report.rank_environment) == {"RANK": "3"}
    assert report.host == "node7"
    result: Any = nsysk3.analyze(tmp_path / "r.sqlite")
    assert "hunter2" not in result.to_json()
