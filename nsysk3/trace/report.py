"""What one Nsight report says about itself: versions, clock, host, devices, processes, diagnostics."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import polars as pl

from nsysk3.trace.source import Source, open_source

# A nanosecond count above this is a date after 2001, not a time since the session started.
_LOOKS_LIKE_UTC_NS = 10**18
# UTC of no trace is outside (1933 to 2116): only damage puts a time there, and sums of such would not fit in 64 bits.
_EARLIEST_NS, _LATEST_NS = -(2**60), 2**62
_RANK_VARIABLES = (
    "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "PALS_RANKID", "SLURM_PROCID", "LOCAL_RANK", "NODE_RANK",
)  # fmt: skip
# Nsight prints these on healthy traces too: a launcher among the processes uses neither CUDA nor NVTX.
_HARMLESS = re.compile(
    r"Not all .* events might have been collected|No \w+ events collected|CUDA profiling might have not been started",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Diagnostic:
    """A warning (severity 2) or error (3) that Nsight left in the report."""

    severity: int
    text: str

    @property
    def matters(self) -> bool:
        """False for the lines that Nsight prints on healthy traces too."""
        return not _HARMLESS.search(self.text)


@dataclass(frozen=True)
class Report:
    """One export and the facts needed to read its rows.

    ``name`` is unique among the reports of a run.  ``host`` is the folder that a run directory keeps it in, else what
    the report says; containers can all say the same, so it is a label and not a key.
    """

    path: Path
    source: Source = field(repr=False)
    name: str
    folder_host: str | None = None

    @cached_property
    def _meta(self) -> Mapping[str, str]:
        for table in ("META_DATA_EXPORT", "EXPORT_META_DATA"):
            rows = self.source.read(table, texts=("name", "value"))
            if not rows.is_empty():
                return {name: value or "" for name, value in rows.iter_rows() if name}
        return {}

    @cached_property
    def _system(self) -> Mapping[str, str]:
        rows = self.source.read("TARGET_INFO_SYSTEM_ENV", texts=("name", "value"))
        return {name: value or "" for name, value in rows.iter_rows() if name}

    @cached_property
    def _capture(self) -> pl.DataFrame:
        return self.source.read("META_DATA_CAPTURE", texts=("name", "value"))

    @property
    def exporter(self) -> str | None:
        """Version of the Nsight Systems that exported (not captured) the report."""
        return self._meta.get("EXPORT_PRODUCT_VERSION")

    @property
    def schema_version(self) -> str | None:
        """Version of the export's schema, for display: reading never depends on it."""
        return self._meta.get("EXPORT_SCHEMA_VERSION")

    @property
    def host(self) -> str:
        """Label of the machine."""
        if self.folder_host:
            return self.folder_host
        named = dict(self._capture.filter(pl.col("name") == "DEVICE_DISPLAY_NAME").iter_rows())
        return self._system.get("Hostname") or named.get("DEVICE_DISPLAY_NAME") or self.name

    @cached_property
    def utc_epoch_ns(self) -> int | None:
        """UTC at which the capture started, null when the report does not say."""
        rows = self.source.read("TARGET_INFO_SESSION_START_TIME", ("utcEpochNs",))
        rows = rows.filter(pl.col("utcEpochNs").is_between(0, _LATEST_NS))
        return rows.item(0, 0) if rows.height else None

    @cached_property
    def time_shift_ns(self) -> int:
        """What the exporter added to every timestamp (``--ts-normalize``, ``--ts-shift``)."""
        text = self._meta.get("EXPORT_CONFIG_TIME_SHIFT", "0")
        shift = int(text) if re.fullmatch(r"-?\d{1,19}", text) else 0
        return shift if abs(shift) < _LATEST_NS else 0

    @cached_property
    def to_utc_ns(self) -> int:
        """Add this to a timestamp of the report to get UTC; 0 when the report has no clock (see ``clock``)."""
        epoch = self.utc_epoch_ns
        if epoch is not None:
            return epoch - self.time_shift_ns
        return 0

    @cached_property
    def possible_ns(self) -> tuple[int, int]:
        """First and last timestamp of the report that can be meant; a row outside is damaged."""
        low, high = _EARLIEST_NS - self.to_utc_ns, _LATEST_NS - self.to_utc_ns
        return max(low, -(2**63)), min(high, 2**63 - 1)

    @cached_property
    def clock(self) -> str:
        """Where UTC comes from: ``session start``, ``already UTC`` or ``none``."""
        if self.utc_epoch_ns is not None:
            return "session start"
        first = self.source.read("ANALYSIS_DETAILS", ("startTime",)).drop_nulls()
        already = first.height > 0 and first.item(0, 0) > _LOOKS_LIKE_UTC_NS
        return "already UTC" if already else "none"

    @cached_property
    def end_ns(self) -> int | None:
        """Report timestamp at which the capture ended; ranges still open then were closed by Nsight exactly here."""
        rows = self.source.read("ANALYSIS_DETAILS", ("duration",)).filter(pl.col("duration").is_between(0, _LATEST_NS))
        return rows.item(0, 0) + self.time_shift_ns if rows.height else None

    @property
    def recorded_utc_ns(self) -> tuple[int, int] | None:
        """UTC at which recording began and ended; None where the report does not say."""
        if self.utc_epoch_ns is None or self.end_ns is None:
            return None
        return self.to_utc_ns + self.time_shift_ns, self.to_utc_ns + self.end_ns

    @cached_property
    def strings(self) -> pl.DataFrame:
        """StringIds: ``id`` (Int64), ``value``."""
        rows = self.source.read("StringIds", ("id",), texts=("value",)).drop_nulls("id")
        return rows.unique("id", keep="first", maintain_order=True)

    def strings_like(self, pattern: str) -> list[int]:
        """Ids of the strings that match a regular expression."""
        return self.strings.filter(pl.col("value").str.contains(pattern))["id"].to_list()

    @cached_property
    def devices(self) -> pl.DataFrame:
        """GPUs as each process numbers them: ``pid`` (null: any process), ``device_id``, ``gpu_uuid``, ``gpu_name``.

        The CUDA ordinal of a process is neither the bus order nor the id Nsight gives: TARGET_INFO_CUDA_DEVICE maps it
        per process where Nsight wrote it (2025 and later), else TARGET_INFO_GPU.cuDevice does for the whole report.
        """
        gpus = self.source.read("TARGET_INFO_GPU", ("id", "cuDevice"), texts=("uuid", "name"))
        gpus = gpus.rename({"uuid": "gpu_uuid", "name": "gpu_name"})
        per_process = self.source.read("TARGET_INFO_CUDA_DEVICE", ("gpuId", "cudaId", "pid"), texts=("uuid",))
        mapped = per_process.join(gpus.unique("id"), left_on="gpuId", right_on="id", how="left").select(
            "pid", pl.col("cudaId").alias("device_id"), pl.coalesce("uuid", "gpu_uuid").alias("gpu_uuid"), "gpu_name"
        )
        whole = gpus.select(
            pl.lit(None, pl.Int64).alias("pid"),
            # Exports before cuDevice numbered the GPUs in CUDA order.
            pl.coalesce("cuDevice", "id").alias("device_id"),
            "gpu_uuid",
            "gpu_name",
        )
        return pl.concat([mapped, whole]).unique(("pid", "device_id"), keep="first", maintain_order=True)

    @cached_property
    def simulated(self) -> bool | None:
        """Written by ``nsysk3 simulate``, which calls the chip of its GPUs so; null where no chip is named."""
        chips = self.source.read("TARGET_INFO_GPU", texts=("chipName",))["chipName"].drop_nulls()
        return "simulated" in chips if chips.len() else None

    @cached_property
    def processes(self) -> pl.DataFrame:
        """Every title a process or one of its threads carried: ``pid``, ``title``."""
        names = self.source.read("PROCESSES", ("pid",), texts=("name",)).rename({"name": "title"})
        threads = self.source.read("ThreadNames", ("nameId", "globalTid")).join(
            self.strings, left_on="nameId", right_on="id", how="left"
        )
        threads = threads.select(pid_of(pl.col("globalTid")).alias("pid"), pl.col("value").alias("title"))
        return pl.concat([names, threads]).drop_nulls().unique(maintain_order=True)

    @cached_property
    def rank_environment(self) -> Mapping[str, str]:
        """Rank variables in the environment of the launched process (of no other: Nsight keeps only that one)."""
        rows = self._capture.filter(pl.col("name") == "PROCESS_0:ENVIRONMENT_VARIABLE")["value"].to_list()
        pairs = (value.partition("=") for value in rows if value)
        return {key: value.strip('"') for key, _, value in pairs if key in _RANK_VARIABLES}

    @cached_property
    def diagnostics(self) -> tuple[Diagnostic, ...]:
        """Nsight's own warnings and errors, once each, worst first."""
        rows = self.source.read("DIAGNOSTIC_EVENT", ("severity",), texts=("text",)).drop_nulls()
        worst = rows.filter(pl.col("severity") >= 2).unique().sort("severity", "text", descending=[True, False])
        return tuple(Diagnostic(severity, text) for severity, text in worst.iter_rows())


def open_report(path: Path, name: str, host: str | None = None, *, shown_as: Path | None = None) -> Report:
    """Open one export; ``shown_as`` is the report it was exported from.  Raises InputError in one line."""
    return Report(shown_as or path, open_source(path), name, host)


def pid_of(global_id: pl.Expr) -> pl.Expr:
    """Process id packed in a globalTid or globalPid: 24 bits above the 24 of the thread."""
    return (global_id // 2**24) % 2**24
