"""The shape of a result: every number by name, with its unit and meaning.

The JSON Schema in docs/result.schema.json and the columns of rank_metrics come from these models.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION = 1


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class RankMetrics(_Model):
    """One rank over one window (docs/metrics.md section 4).  Null: the trace cannot say; see ``not_measured``."""

    host: str | None = Field(description="Machine label.")
    report: str = Field(description="Report the rank was read from.")
    pid: int | None = Field(description="Process id.")
    device_id: int = Field(description="CUDA ordinal in that process.")
    gpu_uuid: str | None = Field(description="GPU.")
    world_rank: int = Field(description="Rank in the run; a guess where rank_source is inferred.")
    pp_rank: int | None = Field(description="Pipeline stage.")
    tp_rank: int | None = Field(description="Rank in the tensor-parallel group.")
    rank_source: str = Field(description="How the rank is known.")
    stable: bool = Field(description="Counted in medians over ranks.")
    reason: str | None = Field(description="Why not stable.")
    window_ns: int = Field(description="Length of the window.")
    compute_ns: int | None = Field(description="Union of compute kernels.")
    comm_ns: int | None = Field(description="Union of communication kernels, waiting included.")
    fused_ns: int | None = Field(description="Union of kernels that compute and communicate.")
    copy_ns: int = Field(description="Union of copies and memsets.")
    overlap_ns: int | None = Field(description="Time with compute and communication at once.")
    overlap_ratio: float | None = Field(ge=0, le=1, description="overlap_ns / comm_ns.")
    exposed_comm_ns: int | None = Field(description="Communication beside neither compute nor fused kernels.")
    exposed_comm_share: float | None = Field(ge=0, le=1, description="exposed_comm_ns / window_ns.")
    idle_ns: int = Field(description="Window with nothing on the GPU.")
    allreduce_count: int | None = Field(description="AllReduce kernels that start in the window.")
    allreduce_total_ns: int | None = Field(description="Their summed durations, waiting included.")
    allreduce_p50_ns: float | None = Field(description="Median duration.")
    p2p_count: int | None = Field(description="Pipeline Send/Recv kernels that start in the window.")
    p2p_total_ns: int | None = Field(description="Their summed durations, waiting included.")
    unclassified_share: float | None = Field(ge=0, le=1, description="Time of kernels no rule names / kernel time.")
    ep_rank: int | None = Field(description="Rank in the expert-parallel group.")
    gpu_name: str | None = Field(description="GPU model.")
    window_start_utc_ns: int = Field(description="Start of the window, UTC.")
    coverage: float | None = Field(
        ge=0, le=1, description="Share of the run's working time in which this rank's report was recording."
    )
    graph_ns: int = Field(description="Union of CUDA graph replays traced as a whole: busy, contents unknown.")
    allreduce_p95_ns: float | None = Field(description="95th percentile of AllReduce duration.")
    allreduce_p99_ns: float | None = Field(description="99th percentile of AllReduce duration.")
    kernel_count: int = Field(description="Kernels that start in the window.")
    kernel_total_ns: int = Field(description="Summed durations of those kernels.")
    wait_collective_ns: int | None = Field(description="Waiting for a collective's last rank, summed over kernels.")
    wait_upstream_ns: int | None = Field(description="Receives spinning for the stage before, summed over kernels.")
    wait_downstream_ns: int | None = Field(description="Sends spinning for the stage behind, summed over kernels.")
    transfer_ns: int | None = Field(description="Communication less waiting, over kernels whose partners were found.")
    unresolved_ns: int | None = Field(description="Communication that is wait or transfer, nobody can say which.")
    exposed_wait_ns: int | None = Field(description="Exposed communication in which every kernel was only waiting.")
    exposed_transfer_ns: int | None = Field(description="Exposed communication in which data moved.")
    exposed_unresolved_ns: int | None = Field(description="Exposed communication that nobody can split.")
    overlap_wait_ns: int | None = Field(description="The part of overlap_ns in which communication only waited.")
    overlap_transfer_ns: int | None = Field(description="The part of overlap_ns in which data moved beside compute.")
    stage_idle_ns: int = Field(description="Nothing on the GPU because a boundary receive was late to be launched.")
    attributed_share: float | None = Field(ge=0, le=1, description="Kernel time in a layer / kernel time.")
    moe_share: float | None = Field(ge=0, le=1, description="MoE AllReduce time / classified AllReduce time.")
    dropped_rows: int = Field(description="GPU rows of the report left out for impossible times.")


class ReportInfo(_Model):
    """One report that was read."""

    name: str = Field(description="What ranks call it: its file without the suffix, in a run directory HOST/trace.")
    path: str = Field(description="As given, relative to the run.")
    host: str = Field(description="Machine label.")
    kind: str = Field(description="sqlite, parquetdir or arrowdir.")
    exporter: str | None = Field(description="Nsight Systems version that exported it.")
    schema_version: str | None = Field(description="Version of the export's schema.")
    clock: str = Field(description="Where UTC comes from: session start, already UTC, none.")
    diagnostics: list[str] = Field(description="Nsight's own warnings and errors.")
    size_bytes: int | None = Field(default=None, description="Of the file; null for a folder.")
    start_utc_ns: int | None = Field(default=None, description="When recording began; null: it does not say.")
    end_utc_ns: int | None = Field(default=None, description="When recording ended; null like start_utc_ns.")


class ProblemInfo(_Model):
    """An input that gave no rank."""

    path: str = Field(description="As given.")
    message: str = Field(description="What is wrong with it, and the way out.")


class WindowInfo(_Model):
    """The window asked for and the one used."""

    asked: str = Field(description="As --window says.")
    used: str = Field(description="The same where the trace allows it.")
    reason: str | None = Field(default=None, description="Why the one used is not the one asked for.")


class ClockReport(_Model):
    """One report's clock against its reference."""

    report: str = Field(description="Name of the report.")
    reference: str = Field(description="Name of the report whose clock it is held against.")
    offset_ns: int = Field(description="This report's clock minus the reference's, at the middle of the run.")
    drift_ppm: float = Field(description="How much faster it runs, parts per million; 0 where no drift stands out.")
    uncertainty_ns: int | None = Field(
        description="Of a time difference to the reference; null when nothing ties them."
    )
    reason: str | None = Field(description="Why it keeps UTC, null where it was aligned.")


class ClockEdge(_Model):
    """What two reports saw together."""

    a: str = Field(description="Name of a report.")
    b: str = Field(description="Name of the other.")
    kind: str = Field(description="ends: instances that end together; causality: bounds only.")
    count: int = Field(description="Pairs of events that both saw.")
    offset_ns: int = Field(description="b's clock minus a's.")
    drift_ppm: float = Field(description="b's clock against a's.")
    residual_p50_ns: int = Field(description="How far pairs lie from the line, median.")
    residual_p95_ns: int = Field(description="The same, 95th percentile.")
    uncertainty_ns: int = Field(description="Of a time difference between the two.")


class ClockInfo(_Model):
    """How the reports were put on one clock (docs/metrics.md section 5)."""

    reports: list[ClockReport]
    edges: list[ClockEdge]


class MatchedInfo(_Model):
    """Communication kernels of one role."""

    role: str = Field(description="Role, as in docs/metrics.md section 3.")
    matched: int = Field(description="Kernels whose partners were found.")
    unmatched: int = Field(description="Kernels without.")


class LayerInfo(_Model):
    """How layers were found, and for how much of the time (docs/metrics.md section 8)."""

    sources: list[str] = Field(description="nvtx, graph order, period; empty when no layer was found.")
    attributed_share: float | None = Field(description="Kernel time in a layer / kernel time, worst rank.")
    boundary_share: float | None = Field(description="Kernel time of pipeline sends and receives, which have no layer.")
    period_confidence: float | None = Field(description="Kernel time that fits the period, where layers come from it.")
    whole_forwards: int | None = Field(description="Whole forwards in the window, fewest of any rank.")
    timeline: str = Field(description="Which events table timeline holds.")


class SpInfo(_Model):
    """Sequence-parallel collectives of one implementation (docs/metrics.md section 12)."""

    name: str = Field(description="nsysk3 or sglang.")
    requested: bool | None = Field(description="Null where neither the manifest nor a mark says.")
    active: bool | None = Field(description="Its kernels ran in the window; null where the trace cannot tell.")
    fell_back: bool | None = Field(description="Requested, and all or part of it ran otherwise.")
    reason: str | None = Field(description="Why it fell back or did not run, in its own words where there are some.")
    kernels: int | None = Field(description="Launches of its communicating kernels in the window, all ranks.")
    calls: int | None = Field(default=None, description="Calls that nsysk3 marked, all ranks, in the whole capture.")
    fused_calls: int | None = Field(default=None, description="Of those, the ones that communicated in the kernel.")


class ResultDocument(_Model):
    """result.json."""

    schema_version: int = Field(default=SCHEMA_VERSION, description="Of this document.")
    nsysk3_version: str = Field(description="What wrote it.")
    simulated: str | None = Field(description="Set when no GPU made the traces.")
    manifest: dict[str, Any] | None = Field(description="run.json of the run directory, null for bare traces.")
    window: WindowInfo
    reports: list[ReportInfo]
    problems: list[ProblemInfo] = Field(
        description="Inputs that gave no rank, ranks that are missing, and what the reports contradict."
    )
    notes: list[str] = Field(description="What a reader of the numbers should know.")
    not_measured: dict[str, str] = Field(description="Metric to the reason it is null everywhere.")
    clock: ClockInfo
    matched: list[MatchedInfo] = Field(description="Communication kernels that found their partners, by role.")
    layers: LayerInfo
    sp: list[SpInfo] = Field(
        default_factory=list, description="Sequence-parallel collectives; empty where nothing is known of any."
    )
    sentences: list[str] = Field(description="The main findings in words.")
    summary: dict[str, Any] = Field(description="Medians over stable ranks.")
    ranks: list[RankMetrics]
    tables: dict[str, list[dict[str, Any]]] = Field(description="Every other table, by name, rows as objects.")
