"""The metrics that are compared, in the order in which they are shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nsysk3.compare.model import Group, Scope, Unit

_STAGE_WAIT = (
    "with a pipeline the communication time holds Stage wait inside SendRecv, without one it cannot: across PP degrees "
    "the two do not measure the same thing"
)
_FEWER_LAYERS = "a rank of a deeper pipeline holds fewer layers, so that fewer launches on it are the layout itself"
_SHORTER = "a rank of a deeper pipeline holds fewer layers, so that a shorter forward on it is the layout itself"


@dataclass(frozen=True)
class Metric:
    """One metric: its name in docs/metrics.md, and how it may be compared."""

    name: str
    label: str
    group: Group
    better: Literal["lower", "higher"] | None = "lower"
    scopes: tuple[Scope, ...] = ("window", "forward", "1k_tokens")
    apart: str | None = None
    """Why runs of different PP degrees are not like for like; at one degree of the group given, ``comm`` for apart."""
    shared: bool = False
    """Whether the ranks of a run share the event that is measured, so that they are one sample of it."""

    @property
    def unit(self) -> Unit:
        """Told by the name's ending."""
        return "ns" if self.name.endswith("_ns") else "count" if self.name.endswith("_count") else "share"


_ONCE: tuple[Scope, ...] = ("window",)

METRICS = (
    Metric("allreduce_count", "AllReduce calls", "headline", None),
    Metric("allreduce_total_ns", "AllReduce total", "headline"),
    Metric("allreduce_p50_ns", "AllReduce p50", "headline", scopes=("window", "forward")),
    Metric("overlap_ratio", "Overlap with compute", "headline", "higher", _ONCE),
    Metric("window_ns", "Wall time", "forward", shared=True),
    Metric("forward_p50_ns", "Forward p50", "forward", scopes=("forward",), apart=_SHORTER),
    Metric("forward_p95_ns", "Forward p95", "forward", scopes=("forward",), apart=_SHORTER, shared=True),
    Metric("allreduce_wait_ns", "AllReduce wait", "allreduce"),
    Metric("allreduce_transfer_ns", "AllReduce transfer", "allreduce"),
    Metric("allreduce_p95_ns", "AllReduce p95", "allreduce", scopes=_ONCE),
    Metric("moe_share", "MoE share of AllReduce time", "allreduce", None, _ONCE),
    Metric("reduce_scatter_count", "ReduceScatter calls", "scatter", None, apart=_FEWER_LAYERS),
    Metric("reduce_scatter_total_ns", "ReduceScatter total", "scatter", None),
    Metric("all_gather_count", "AllGather calls", "scatter", None, apart=_FEWER_LAYERS),
    Metric("all_gather_total_ns", "AllGather total", "scatter", None),
    Metric("p2p_count", "P2P kernels", "p2p", None),
    Metric("p2p_total_ns", "P2P total", "p2p"),
    Metric("wait_upstream_ns", "P2P upstream wait", "p2p"),
    Metric("wait_downstream_ns", "P2P downstream wait", "p2p"),
    Metric("p2p_transfer_ns", "P2P transfer", "p2p"),
    Metric("stage_wait_ns", "Exposed Stage wait", "stage"),
    Metric("bubble_ns", "Bubble", "stage"),
    Metric("bubble_share", "Bubble share", "stage", scopes=_ONCE),
    Metric("compute_ns", "Compute", "time", None),
    Metric("fused_ns", "Fused", "time", None),
    Metric("copy_ns", "Copies", "time"),
    Metric("overlap_transfer_ns", "Transfer beside compute", "time", None),
    Metric("overlap_wait_ns", "Wait beside compute", "time", None),
    Metric("exposed_transfer_ns", "Exposed transfer", "time"),
    Metric("exposed_wait_ns", "Exposed wait", "time"),
    Metric("exposed_unresolved_ns", "Exposed unresolved", "time", None),
    Metric("idle_ns", "Idle", "time"),
    Metric("stage_idle_ns", "Idle for another stage", "time"),
    Metric("kernel_count", "Kernels", "launches", None, apart=_FEWER_LAYERS),
    Metric("layer_kernel_count", "Launches a layer", "launches", None, ("forward",)),
    Metric("fused_count", "Fused kernels", "launches", None, apart=_FEWER_LAYERS),
    Metric("exposed_comm_share", "Exposed communication share", "apart", scopes=_ONCE, apart=_STAGE_WAIT),
    Metric("comm_share", "NCCL wall share", "apart", scopes=_ONCE, apart=_STAGE_WAIT),
    Metric("exposed_comm_ns", "Exposed communication", "apart", apart=_STAGE_WAIT),
    Metric("comm_ns", "Communication", "apart", apart=_STAGE_WAIT),
)
BY_NAME = {metric.name: metric for metric in METRICS}
SCOPE_LABELS: dict[Scope, str] = {"window": "per window", "forward": "per forward", "1k_tokens": "per 1,000 tokens"}
