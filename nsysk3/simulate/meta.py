"""The tables of an export that say what was captured: versions, clock, GPUs, processes, strings, payload schemas."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np

from nsysk3.simulate.config import Config
from nsysk3.simulate.database import Constant, Database
from nsysk3.simulate.layers import (
    COPY_STREAM,
    FORWARD_STREAM,
    NEXT_STREAM,
    PREVIOUS_STREAM,
    RESULT_STREAM,
    SCHEDULE_STREAM,
)
from nsysk3.simulate.node import VM_ID, Node, pid_of_rank
from nsysk3.simulate.ranges import NCCL_DOMAIN, OPERATIONS, SCHEMAS, payload_bytes
from nsysk3.simulate.schema import PRODUCTS

_LAUNCHER_PID = 900
_NO_NVTX = "No NVTX events collected. Does the process use NVTX?"


def gpu_uuid(config: Config, node: int, device: int) -> str:
    """A UUID that is the same in every file that names the GPU."""
    rng = np.random.default_rng((config.seed, node, device, 77))
    raw = rng.bytes(16).hex()
    return f"{raw[:8]}-{raw[8:12]}-{raw[12:16]}-{raw[16:20]}-{raw[20:]}"


def write_meta(node: Node, version: str) -> None:
    """Everything but the bulk tables; StringIds last, when all names are known."""
    database = node.database
    _versions(database, version)
    _session(node)
    _target(node)
    _processes(node)
    if node.config.nvtx:
        _domains(node)
        if node.config.payloads:
            _payload_schemas(node)
    names = node.strings.ids
    database.insert_rows("StringIds", [{"id": number, "value": name} for name, number in names.items()])


def _versions(database: Database, version: str) -> None:
    product, schema = PRODUCTS[version]
    major, minor, micro = schema.split(".")
    prefix = "EXPORT_PARAM_" if database.has("META_DATA_EXPORT") else "EXPORT_"
    pairs = {
        "EXPORT_PRODUCT_NAME": "NVIDIA Nsight Systems", "EXPORT_PRODUCT_VERSION": product,
        "EXPORT_PRODUCT_DATE": ".".join(product.split(".")[:2]), "EXPORT_SCHEMA_VERSION": schema,
        "EXPORT_SCHEMA_VERSION_MAJOR": major, "EXPORT_SCHEMA_VERSION_MINOR": minor,
        "EXPORT_SCHEMA_VERSION_MICRO": micro, "EXPORT_PLATFORM": "linux-desktop", "EXPORT_ARCH": "x64",
        f"{prefix}OVERWRITE": "true", f"{prefix}LAZY": "true",
    }  # fmt: skip
    if database.has("META_DATA_EXPORT"):
        shifts = {"EXPORT_PARAM_TIME_NORMALIZE": "false", "EXPORT_PARAM_TIME_SHIFT": "0"}
        pairs |= shifts | {"EXPORT_CONFIG_TIME_SHIFT": "0"}
    rows: list[dict[str, Constant]] = [{"name": name, "value": value} for name, value in pairs.items()]
    for table in ("META_DATA_EXPORT", "EXPORT_META_DATA"):
        database.insert_rows(table, rows)


def _session(node: Node) -> None:
    database = node.database
    begun = datetime.fromtimestamp(node.session_ns // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    duration = int(node.ts(np.array([node.window[1]]))[0])
    database.insert_rows(
        "TARGET_INFO_SESSION_START_TIME",
        [{"utcEpochNs": node.session_ns, "utcTime": begun, "localTime": begun}],
    )
    uptime = 90_000_000_000
    database.insert_rows(
        "ANALYSIS_DETAILS",
        [{"globalVid": VM_ID, "duration": duration, "startTime": uptime, "stopTime": uptime + duration}],
    )
    host = node.config.hosts()[node.number]
    capture = {
        "DEVICE_ID": "Local (CLI)", "CAPTURE_EVENT_TYPE": "Cuda", "DEVICE_DISPLAY_NAME": host,
        "PROCESS_0:COMMAND": "python3", "PROCESS_0:COLLECT_NVTX_TRACE": str(node.config.nvtx).lower(),
        "PROCESS_0:COLLECT_CUDA_TRACE": "true", "PROCESS_0:CUDA_GRAPH_TRACE_OPTIONS:MODE": "Node",
        "RUN_DURATION_MS": str(duration // 10**6), "TRACE_AFTER_FORK_BEFORE_EXEC": "true",
    }  # fmt: skip
    database.insert_rows("META_DATA_CAPTURE", [{"name": name, "value": value} for name, value in capture.items()])
    said = [(1, 0, 3, "Profiling has started."), (1, duration, 3, "Profiling has stopped.")]
    said += [(2, duration, 3, "Not all CUDA events might have been collected.")]
    said += [] if node.config.nvtx else [(2, duration, 3, _NO_NVTX)]
    database.insert_rows(
        "DIAGNOSTIC_EVENT",
        [
            {"severity": severity, "timestamp": at, "timestampType": 1, "source": source, "text": text,
             "globalPid": VM_ID + (_LAUNCHER_PID << 24)}
            for severity, at, source, text in said
        ],
    )  # fmt: skip


def _target(node: Node) -> None:
    database, config = node.database, node.config
    env = {"CpuCores": (1, "128"), "CpuArchitecture": (3, "x86_64"), "NvDriverVersion": (205, "580.159.04"),
           "CudaDriverVersion": (611, "13000"), "Hostname": (619, config.hosts()[node.number])}  # fmt: skip
    database.insert_rows(
        "TARGET_INFO_SYSTEM_ENV",
        [
            {"globalVid": VM_ID, "devStateName": "Local (CLI)", "name": name, "nameEnum": number, "value": value}
            for name, (number, value) in env.items()
        ],
    )
    # Nsight's own numbering need not be CUDA's: here it runs the other way, as on a real Polaris node.
    last = config.gpus_per_node - 1
    database.insert_rows(
        "TARGET_INFO_GPU",
        [
            {"vmId": VM_ID, "id": last - device, "name": config.machine.gpu_name, "isDiscrete": 1,
             "busLocation": f"0000:{16 + device:02x}:00.0", "totalMemory": 89_812_303_872, "smCount": 132,
             "uuid": gpu_uuid(config, node.number, device), "chipName": "simulated", "cuDevice": device,
             "computeMajor": 12, "computeMinor": 0}
            for device in range(config.gpus_per_node)
        ],
    )  # fmt: skip
    pids = [pid_of_rank(config, rank) for rank in node.ranks]
    database.insert_rows(
        "TARGET_INFO_CUDA_DEVICE",
        [
            {"gpuId": last - device, "cudaId": device, "pid": pid}
            for pid in [*pids, _LAUNCHER_PID]
            for device in range(config.gpus_per_node)
        ],
    )
    for table in ("TARGET_INFO_CUDA_CONTEXT_INFO", "TARGET_INFO_CUDA_NULL_STREAM"):
        rows: list[dict[str, Constant]] = [
            {"nullStreamId": 7, "streamId": 7, "vmId": 1, "processId": pid, "deviceId": device, "contextId": 1}
            for device, pid in enumerate(pids)
        ]
        database.insert_rows(table, rows)
    streams = (FORWARD_STREAM, COPY_STREAM, SCHEDULE_STREAM, PREVIOUS_STREAM, NEXT_STREAM, RESULT_STREAM)
    database.insert_rows(
        "TARGET_INFO_CUDA_STREAM",
        [
            {"streamId": stream, "hwId": 0, "vmId": 1, "processId": pid, "contextId": 1, "priority": 0, "flag": 2}
            for pid in pids
            for stream in streams
        ],
    )


def _processes(node: Node) -> None:
    """Names are cut to 15 characters, as the kernel does: the rank is not in them."""
    pids = {pid_of_rank(node.config, rank): "sglang::schedul" for rank in node.ranks}
    node.database.insert_rows(
        "PROCESSES",
        [
            {"globalPid": VM_ID + (pid << 24), "pid": pid, "name": name}
            for pid, name in [(_LAUNCHER_PID, "python3"), *pids.items()]
        ],
    )
    node.database.insert_rows(
        "ThreadNames",
        [
            {"nameId": node.strings(name), "priority": 20, "globalTid": VM_ID + (pid << 24) + thread}
            for pid in pids
            for name, thread in (("sglang::schedul", pid), ("pt_nccl_watchdg", pid + 400), ("[NSys]", pid + 401))
        ],
    )


def _domains(node: Node) -> None:
    """The NCCL domain of every process: made before the capture, so at a negative time and without an end."""
    node.database.insert_rows(
        "NVTX_EVENTS",
        [
            {"start": -41_000_000_000 + rank, "eventType": 75, "text": "NCCL", "domainId": NCCL_DOMAIN,
             "globalTid": VM_ID + (pid_of_rank(node.config, rank) << 24) + pid_of_rank(node.config, rank)}
            for rank in node.ranks
        ],
    )  # fmt: skip


def _payload_schemas(node: Node) -> None:
    """Nsight writes these once a process, without saying which."""
    database = node.database
    for _ in node.ranks:
        database.insert_rows(
            "NVTX_PAYLOAD_SCHEMAS",
            [
                {"domainId": NCCL_DOMAIN, "schemaId": number, "type": 1, "numEntries": len(entries),
                 "payloadSize": payload_bytes(call)}
                for call, (number, entries) in SCHEMAS.items()
            ],
        )  # fmt: skip
        database.insert_rows(
            "NVTX_PAYLOAD_SCHEMA_ENTRIES",
            [
                {"domainId": NCCL_DOMAIN, "schemaId": number, "idx": index, "type": kind, "name": name, "offset": at}
                for number, entries in SCHEMAS.values()
                for index, (name, kind, at) in enumerate(entries)
            ],
        )
        enum = SCHEMAS["ncclAllReduce"][1][2][1]
        database.insert_rows(
            "NVTX_PAYLOAD_ENUMS",
            [{"domainId": NCCL_DOMAIN, "schemaId": enum, "numEntries": len(OPERATIONS), "size": 4}],
        )
        database.insert_rows(
            "NVTX_PAYLOAD_ENUM_ENTRIES",
            [
                {"domainId": NCCL_DOMAIN, "schemaId": enum, "idx": index, "name": name, "value": index or None}
                for index, name in enumerate(OPERATIONS)
            ],
        )
