"""Synthetic Nsight Systems exports, with the tables, columns and id packing that real ones have.

    Export().kernel("gemm", 0, 100).kernel(ALLREDUCE, 50, 150, stream=20).write(tmp_path / "a.sqlite")

Times are microseconds after ``BASE_NS``, for an event at 0 of a report has no time as far as Nsight's readers are
concerned.  Every method returns the export, so that a case is one expression.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

from export_files import Tables, write_directory, write_sqlite

BASE_NS = 1_000_000_000
EPOCH_NS = 1_795_978_369_579_715_114
ALLREDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<(unsigned long)4096>)"
SENDRECV = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<(unsigned long)4096>)"
GEMM = "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT"
FLASH = "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<...>>>(...)"

_RUNS = "start end deviceId contextId greenContextId streamId correlationId globalPid"
COLUMNS = {
    "StringIds": "id value",
    "CUPTI_ACTIVITY_KIND_KERNEL": f"{_RUNS} demangledName shortName mangledName graphNodeId",
    "CUPTI_ACTIVITY_KIND_MEMCPY": f"{_RUNS} bytes copyKind graphNodeId",
    "CUPTI_ACTIVITY_KIND_MEMSET": f"{_RUNS} value bytes graphNodeId",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": f"{_RUNS} graphId graphExecId",
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": f"{_RUNS} syncType eventId",
    "CUPTI_ACTIVITY_KIND_CUDA_EVENT": "deviceId contextId streamId correlationId globalPid eventId",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start end eventClass globalTid correlationId nameId returnValue",
    "NVTX_EVENTS": "start end eventType text globalTid endGlobalTid textId domainId binaryData",
    "NVTX_PAYLOAD_SCHEMA_ENTRIES": "domainId schemaId idx flags type name offset",
    "TARGET_INFO_GPU": "vmId id name busLocation cuDevice uuid",
    "TARGET_INFO_CUDA_DEVICE": "gpuId cudaId pid",
    "TARGET_INFO_SYSTEM_ENV": "globalVid devStateName name nameEnum value",
    "TARGET_INFO_SESSION_START_TIME": "utcEpochNs utcTime localTime",
    "ANALYSIS_DETAILS": "globalVid duration startTime stopTime",
    "META_DATA_EXPORT": "name value",
    "META_DATA_CAPTURE": "name value",
    "PROCESSES": "globalPid pid name",
    "ThreadNames": "nameId priority globalTid",
    "MPI_RANKS": "globalTid rank",
    "DIAGNOSTIC_EVENT": "timestamp timestampType source severity text globalPid",
}

# What the payload of an NCCL call holds: (entry name, NVTX type, struct code, offset).
_COMM = ("NCCL communicator ID", 18, "Q", 0)
_SIZE = ("Message size [bytes]", 22, "Q", 8)
_PEER = ("Peer rank", 5, "i", 16)
_INIT = (_COMM, ("No. of ranks", 5, "i", 8), ("Rank", 5, "i", 12), ("CUDA device", 5, "i", 16))
_SCHEMAS = {
    "ncclCommInitRank": (0, _INIT),
    "ncclAllGather": (4, (_COMM, _SIZE)),
    "ncclAllReduce": (5, (_COMM, _SIZE)),
    "ncclBroadcast": (6, (_COMM, _SIZE)),
    "ncclReduceScatter": (7, (_COMM, _SIZE)),
    "ncclSend": (9, (_COMM, _SIZE, _PEER)),
    "ncclRecv": (10, (_COMM, _SIZE, _PEER)),
    "ncclCommInitRankConfig": (11, _INIT),
}
NCCL_DOMAIN = 1


def gpid(pid: int) -> int:
    """The globalPid of a process."""
    return 2**48 + pid * 2**24


def gtid(pid: int, tid: int = 1) -> int:
    """The globalTid of a thread."""
    return gpid(pid) + tid


def ns(microseconds: float) -> int:
    """A time of an export, as it is stored."""
    return BASE_NS + round(microseconds * 1000)


class Export:
    """An export being made.  ``rows``: the rows of each table, to be looked at or bent by hand."""

    def __init__(self, *, epoch_ns: int | None = EPOCH_NS, duration_us: float | None = None) -> None:
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self._strings: dict[str, int] = {}
        self._columns = {table: columns.split() for table, columns in COLUMNS.items()}
        self._names: dict[str, str] = {}
        self._epoch_ns, self._duration_us = epoch_ns, duration_us
        self._correlation = 100
        self._schemas_written: set[str] = set()

    # --- GPU work

    def kernel(
        self,
        name: str | None,
        start: float,
        end: float,
        *,
        pid: int = 1,
        device: int = 0,
        stream: int = 7,
        correlation: int | None = None,
        launch: tuple[float, float] | None = None,
        tid: int = 1,
        node: int | None = None,
    ) -> Self:
        """A kernel with a demangled name; ``launch`` adds the call that launched it."""
        work = self._work(start, end, pid, device, stream, correlation)
        if launch:
            self.launch(*launch, correlation=work["correlationId"], pid=pid, tid=tid)
        ids = {"demangledName": None, "shortName": None}
        if name is not None:
            short = name.removeprefix("void ").split("(")[0].split("<")[0].split("::")[-1]
            ids = {"demangledName": self.string(name), "shortName": self.string(short)}
        return self.row("CUPTI_ACTIVITY_KIND_KERNEL", **work, **ids, graphNodeId=node)

    def kernels(self, name: str, spans: Iterable[tuple[float, float]], **where: Any) -> Self:
        """Several kernels of one name."""
        for start, end in spans:
            self.kernel(name, start, end, **where)
        return self

    def memcpy(self, start: float, end: float, *, kind: int = 8, size: int = 1024, **where: Any) -> Self:
        """A copy; ``kind`` 1 is host to device, 8 device to device."""
        launch = where.pop("launch", None)
        tid = where.pop("tid", 1)
        work = self._work(start, end, **where)
        if launch:
            self.launch(
                *launch, correlation=work["correlationId"], pid=where.get("pid", 1), tid=tid, name="cudaMemcpyAsync"
            )
        return self.row("CUPTI_ACTIVITY_KIND_MEMCPY", **work, bytes=size, copyKind=kind)

    def memset(self, start: float, end: float, **where: Any) -> Self:
        """A memset."""
        return self.row("CUPTI_ACTIVITY_KIND_MEMSET", **self._work(start, end, **where), value=0, bytes=1024)

    def graph(self, start: float, end: float, **where: Any) -> Self:
        """A CUDA graph replay traced as a whole."""
        return self.row("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", **self._work(start, end, **where), graphId=1, graphExecId=2)

    def sync(self, start: float, end: float, **where: Any) -> Self:
        """A synchronization record, which is no GPU work."""
        return self.row("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", **self._work(start, end, **where), syncType=2, eventId=3)

    def _work(
        self,
        start: float,
        end: float,
        pid: int = 1,
        device: int = 0,
        stream: int = 7,
        correlation: int | None = None,
    ) -> dict[str, int]:
        if correlation is None:
            self._correlation += 1
            correlation = self._correlation
        return {
            "start": ns(start),
            "end": ns(end),
            "deviceId": device,
            "contextId": 1,
            "streamId": stream,
            "correlationId": correlation,
            "globalPid": gpid(pid),
        }

    # --- the host

    def launch(
        self,
        start: float,
        end: float,
        *,
        correlation: int,
        pid: int = 1,
        tid: int = 1,
        name: str = "cudaLaunchKernel_v7000",
    ) -> Self:
        """A CUDA API call."""
        return self.row(
            "CUPTI_ACTIVITY_KIND_RUNTIME",
            start=ns(start),
            end=ns(end),
            eventClass=0,
            globalTid=gtid(pid, tid),
            correlationId=correlation,
            nameId=self.string(name),
            returnValue=0,
        )

    def nvtx(
        self,
        text: str | None,
        start: float,
        end: float | None,
        *,
        pid: int = 1,
        tid: int = 1,
        registered: bool = False,
        event_type: int = 59,
        domain: int = 0,
        end_tid: int | None = None,
        blob: bytes | None = None,
    ) -> Self:
        """An NVTX range (59 push/pop, 60 start/end) or, as ``event_type`` 34, a mark."""
        return self.row(
            "NVTX_EVENTS",
            start=ns(start),
            end=None if end is None else ns(end),
            eventType=event_type,
            text=None if registered else text,
            textId=self.string(text) if registered and text is not None else None,
            globalTid=gtid(pid, tid),
            endGlobalTid=None if end_tid is None else gtid(pid, end_tid),
            domainId=domain,
            binaryData=blob,
        )

    def nccl(
        self,
        op: str,
        start: float,
        end: float,
        *,
        pid: int = 1,
        tid: int = 1,
        blob: bool = True,
        **fields: int,
    ) -> Self:
        """An NCCL call as NCCL annotates it; ``comm``, ``size``, ``peer``, ``nranks``, ``rank``, ``device`` make its
        payload.
        """
        payload = None
        if fields and op in _SCHEMAS:
            payload = self._payload(op, fields)
        written = payload if blob else None
        return self.nvtx(op, start, end, pid=pid, tid=tid, registered=True, domain=NCCL_DOMAIN, blob=written)

    def _payload(self, op: str, fields: dict[str, int]) -> bytes:
        number, entries = _SCHEMAS[op]
        schema = 2**24 + number
        keys = ("comm", "nranks", "rank", "device") if entries is _INIT else ("comm", "size", "peer")
        body = bytearray(24)
        for key, (_, _, code, offset) in zip(keys, entries, strict=False):
            struct.pack_into("<" + code, body, offset, fields.get(key, 0))
        if op not in self._schemas_written:
            self._schemas_written.add(op)
            for index, (name, kind, _, offset) in enumerate(entries):
                self.row(
                    "NVTX_PAYLOAD_SCHEMA_ENTRIES", domainId=NCCL_DOMAIN, schemaId=schema, idx=index, type=kind,
                    name=name, offset=offset or None,
                )  # fmt: skip
        return struct.pack("<IIIIQQ", NCCL_DOMAIN, 0, schema, 0, len(body), 32) + bytes(body)

    # --- what a report says of itself

    def gpu(self, number: int, *, cuda: int | None, uuid: str | None = None, name: str = "NVIDIA H200") -> Self:
        """A GPU as Nsight numbers it, with its CUDA ordinal."""
        return self.row("TARGET_INFO_GPU", vmId=2**48, id=number, name=name, cuDevice=cuda, uuid=uuid)

    def cuda_device(self, pid: int, cuda: int, gpu: int) -> Self:
        """How one process numbers a GPU."""
        return self.row("TARGET_INFO_CUDA_DEVICE", gpuId=gpu, cudaId=cuda, pid=pid)

    def host(self, name: str) -> Self:
        """The machine's name."""
        return self.row(
            "TARGET_INFO_SYSTEM_ENV", globalVid=2**48, devStateName="Local", name="Hostname", nameEnum=0, value=name
        )

    def process(self, pid: int, title: str) -> Self:
        """A process and its title."""
        return self.row("PROCESSES", globalPid=gpid(pid), pid=pid, name=title)

    def thread(self, pid: int, tid: int, name: str) -> Self:
        """A named thread."""
        return self.row("ThreadNames", nameId=self.string(name), priority=10, globalTid=gtid(pid, tid))

    def mpi_rank(self, pid: int, rank: int) -> Self:
        """An MPI rank."""
        return self.row("MPI_RANKS", globalTid=gtid(pid), rank=rank)

    def env(self, **variables: str) -> Self:
        """Environment of the launched process."""
        for key, value in variables.items():
            self.row("META_DATA_CAPTURE", name="PROCESS_0:ENVIRONMENT_VARIABLE", value=f'{key}="{value}"')
        return self

    def meta(self, name: str, value: str) -> Self:
        """A fact about the export."""
        return self.row("META_DATA_EXPORT", name=name, value=value)

    def diagnostic(self, text: str, severity: int = 2) -> Self:
        """A line that Nsight left."""
        return self.row(
            "DIAGNOSTIC_EVENT",
            timestamp=-1,
            timestampType=1,
            source=1,
            severity=severity,
            text=text,
            globalPid=-(2**57),
        )

    # --- by hand

    def string(self, text: str) -> int:
        """The StringIds id of a text."""
        if text not in self._strings:
            self._strings[text] = len(self._strings) + 1
            self.row("StringIds", id=self._strings[text], value=text)
        return self._strings[text]

    def row(self, table: str, **values: Any) -> Self:
        """Any row of any table; columns not given are NULL."""
        self._columns.setdefault(table, list(values))
        self.rows.setdefault(table, []).append(values)
        return self

    def table(self, table: str) -> Self:
        """A table that is there even without rows."""
        self.rows.setdefault(table, [])
        return self

    def without(self, table: str, *columns: str) -> Self:
        """Leave a table out, or only some of its columns."""
        if columns:
            self._columns[table] = [column for column in self._columns[table] if column not in columns]
        else:
            self.rows.pop(table, None)
            self._columns.pop(table, None)
        return self

    def renamed(self, table: str, name: str) -> Self:
        """Write a table under another name."""
        self._names[table] = name
        return self

    # --- files

    def _tables(self) -> Tables:
        rows = {table: list(found) for table, found in self.rows.items()}
        if self._epoch_ns is not None:
            rows.setdefault("TARGET_INFO_SESSION_START_TIME", [{"utcEpochNs": self._epoch_ns}])
        if "ANALYSIS_DETAILS" in self._columns:
            last = max((row["end"] or 0 for each in rows.values() for row in each if "end" in row), default=BASE_NS)
            duration = last + 1_000_000 if self._duration_us is None else ns(self._duration_us)
            rows.setdefault(
                "ANALYSIS_DETAILS", [{"globalVid": 2**48, "duration": duration, "startTime": 0, "stopTime": duration}]
            )
        return {
            self._names.get(table, table): (
                self._columns[table],
                [tuple(row.get(column) for column in self._columns[table]) for row in each],
            )
            for table, each in rows.items()
            if table in self._columns
        }

    def write(self, path: Path) -> Path:
        """Write it as SQLite."""
        return write_sqlite(self._tables(), path)

    def write_directory(self, path: Path, kind: str = "parquetdir", *, large: bool = False) -> Path:
        """Write it as a ``parquetdir`` or ``arrowdir``, ids unsigned as Nsight has them there."""
        return write_directory(self._tables(), path, kind, large=large)


def two_ranks(*, forwards: int = 2, layers: int = 2, pids: Sequence[int] = (11, 12), period_us: float = 1000) -> Export:
    """A small TP2 run in one report: per layer a GEMM and an AllReduce, the second rank a little later and longer."""
    export = Export()
    for rank, pid in enumerate(pids):
        export.gpu(rank, cuda=rank, uuid=f"uuid-{rank}").cuda_device(pid, rank, rank)
        for step in range(forwards * layers):
            at = step * period_us + 10 * rank
            export.kernel(
                GEMM, at + 20, at + 500 + 10 * rank, pid=pid, device=rank, launch=(at, at + 5), tid=pid, stream=7
            )
            export.nccl("ncclAllReduce", at + 6, at + 15, pid=pid, tid=pid, comm=77, size=4096)
            export.kernel(
                ALLREDUCE, at + 450, at + 700, pid=pid, device=rank, launch=(at + 8, at + 12), tid=pid, stream=20
            )
    return export
