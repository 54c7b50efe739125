"""NCCL calls of one report, with what their NVTX payloads say: communicator, bytes, peer, ranks."""

from __future__ import annotations

import numpy as np
import polars as pl

from nsysk3.trace.nvtx import PUSH_POP
from nsysk3.trace.report import Report, pid_of

# Nsight puts this before the payload: domain u32, -, schema u32, -, payload size u64, total u64 (little endian).
_HEADER = 32
# NVTX payload entry types by number: how many bytes, and how to read them.
_ENTRY_TYPES = {3: "<i2", 4: "<u2", 5: "<i4", 6: "<u4", 7: "<i8", 8: "<u8", 17: "<u4", 18: "<u8", 22: "<u8"}
# Entry names are stable over NCCL versions; schema numbers above 10 are not, so names decide.
_FIELDS = {
    "NCCL communicator ID": "comm",
    "Message size [bytes]": "bytes",
    "Bytes": "bytes",
    "Peer rank": "peer",
    "No. of ranks": "nranks",
    "Rank": "rank",
    "CUDA device": "cuda_device",
}
PAYLOAD_COLUMNS = ("comm", "bytes", "peer", "nranks", "rank", "cuda_device")


def read_nccl_calls(report: Report) -> pl.DataFrame:
    """NCCL API calls of a report, sorted by (tid, start).

    Columns: ``tid`` (globalTid), ``start``, ``end`` (UTC ns, host time: never GPU time), ``op`` (``ncclAllReduce``...)
    and, null where the payload does not say or was not exported (``--include-blobs=true``): ``comm`` (communicator id,
    the same number on all its ranks), ``bytes``, ``peer``, ``nranks``, ``rank``, ``cuda_device``.
    """
    ids = report.strings_like(r"^nccl[A-Z]")
    source = report.source
    numbers = ("start", "end", "globalTid", "textId")
    blobs = ("binaryData",)
    if ids and "textId" in source.columns("NVTX_EVENTS"):
        rows = source.read("NVTX_EVENTS", numbers, blobs=blobs, only={"eventType": [PUSH_POP], "textId": ids})
        strings = report.strings.select(pl.col("id").alias("textId"), pl.col("value").alias("op"))
        rows = rows.join(strings, on="textId", how="left").drop("textId")
    else:  # NCCL registers its names; a trimmed or hand-made export may hold them as text
        rows = source.read("NVTX_EVENTS", numbers[:3], texts=("text",), blobs=blobs, only={"eventType": [PUSH_POP]})
        rows = rows.rename({"text": "op"}).filter(pl.col("op").str.contains(r"^nccl[A-Z]"))
    start, end = pl.col("start"), pl.col("end")
    possible = start.is_between(*report.possible_ns) & end.is_between(*report.possible_ns)
    rows = rows.filter((end >= start) & possible & pl.col("globalTid").is_not_null()).with_row_index("row")
    calls = rows.join(_payloads(report, rows), on="row", how="left")
    shift = report.to_utc_ns
    return calls.select(
        pl.col("globalTid").alias("tid"),
        (pl.col("start") + shift).alias("start"),
        (pl.col("end") + shift).alias("end"),
        "op",
        *PAYLOAD_COLUMNS,
    ).sort("tid", "start", pl.col("end"), descending=[False, False, True])


def shared_work(calls: pl.DataFrame) -> pl.DataFrame:
    """What each process did on each communicator: ``pid``, ``comm``, and how many calls.

    ``collectives`` (AllReduce, ReduceScatter, AllGather), ``messages`` (Send and Recv), and of these ``sends`` and
    ``receives`` that go alone, as at the boundary of a pipeline: an all-to-all or a ring has both in one group.
    """
    message = pl.col("op").is_in(["ncclSend", "ncclRecv"])
    beside = [message.shift(step, fill_value=False).over("tid") for step in (1, -1)]
    alone = message & ~beside[0] & ~beside[1]
    together = pl.col("op").is_in(["ncclAllReduce", "ncclReduceScatter", "ncclAllGather"])
    counts = {
        "collectives": together,
        "messages": message,
        "sends": alone & (pl.col("op") == "ncclSend"),
        "receives": alone & (pl.col("op") == "ncclRecv"),
    }
    told = calls.select(pid_of(pl.col("tid")).alias("pid"), "comm", **counts).filter(pl.col("comm") != 0)
    return told.group_by("pid", "comm", maintain_order=True).agg(pl.col(*counts).sum().cast(pl.Int64))


def payloads_exported(report: Report) -> bool:
    """False when the report describes payloads that the export left out."""
    described = bool(report.source.columns("NVTX_PAYLOAD_SCHEMA_ENTRIES"))
    return not described or report.source.holds("NVTX_EVENTS", "binaryData")


def _schemas(report: Report) -> dict[tuple[int, int], list[tuple[str, str, int]]]:
    """(domain, schema) -> fields as (column, numpy type, offset)."""
    numbers = ("domainId", "schemaId", "type", "offset")
    # No process column: every process writes its own copy of the same rows, and a join would multiply the bytes.
    entries = report.source.read("NVTX_PAYLOAD_SCHEMA_ENTRIES", numbers, texts=("name",)).unique(maintain_order=True)
    found: dict[tuple[int, int], list[tuple[str, str, int]]] = {}
    for domain, schema, kind, offset, name in entries.iter_rows():
        if name in _FIELDS and kind in _ENTRY_TYPES:
            found.setdefault((domain, schema), []).append((_FIELDS[name], _ENTRY_TYPES[kind], offset or 0))
    return found


def _payloads(report: Report, rows: pl.DataFrame) -> pl.DataFrame:
    """Decoded payloads of ``rows``: ``row`` and PAYLOAD_COLUMNS."""
    schemas = _schemas(report)
    decoded = [pl.DataFrame(schema={"row": rows.schema["row"], **dict.fromkeys(PAYLOAD_COLUMNS, pl.Int64)})]
    for (size,), group in rows.group_by(pl.col("binaryData").bin.size()):
        if not isinstance(size, int) or size <= _HEADER:
            continue
        raw = np.frombuffer(b"".join(group["binaryData"].to_list()), np.uint8).reshape(group.height, size)
        domain = _field(raw, 0, "<u4")
        number = _field(raw, 8, "<u4")
        for (known_domain, known_schema), fields in schemas.items():
            mine = (domain == known_domain) & (number == known_schema)
            if mine.any():
                decoded.append(_decode(group.filter(pl.Series(mine)).select("row"), raw[mine], fields))
    return pl.concat(decoded, how="diagonal_relaxed")


def _decode(rows: pl.DataFrame, raw: np.ndarray, fields: list[tuple[str, str, int]]) -> pl.DataFrame:
    width = raw.shape[1]
    columns = [
        pl.Series(name, _field(raw, _HEADER + offset, kind).astype(np.int64))
        for name, kind, offset in fields
        if _HEADER + offset + np.dtype(kind).itemsize <= width
    ]
    return rows.with_columns(columns)


def _field(raw: np.ndarray, offset: int, kind: str) -> np.ndarray:
    size = np.dtype(kind).itemsize
    return np.ascontiguousarray(raw[:, offset : offset + size]).view(kind).ravel()
