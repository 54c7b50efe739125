"""The paths that communicate inside the kernel: symmetric memory of a group, and nsysk3's CUDA kernels over it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsysk3.errors import NsysK3Error
from nsysk3.ops import capture, reference
from nsysk3.ops.attn_res import as_type, cuda_unavailable, dense, readable
from nsysk3.ops.dispatch import PULL, PUSH
from nsysk3.ops.peers import Place, first_reason, gather, no_peer_access, place, symmetric_bytes
from nsysk3.ops.pytorch import dist, torch

if TYPE_CHECKING:
    from nsysk3.ops.cuda import Workspace
    from nsysk3.ops.gemm import GemmReduceScatter


def prepare(
    group: dist.ProcessGroup, hidden: int, max_tokens: int, device: torch.device
) -> tuple[FusedCollectives | None, str | None]:
    """The fused collectives of ``group``, or why there are none; the same answer on all ranks.  Collective."""
    unable = _unable(hidden, dist.get_world_size(group), device)
    if (reason := first_reason(gather(unable, group, device))) is not None:
        return None, reason
    places: list[Place] = gather(place(device), group, device)
    if len({each.host for each in places}) > 1:
        return None, "ranks on several hosts"
    if len({each.gpu for each in places}) > 1:
        return None, "different GPUs in one group"
    if (reason := first_reason(gather(no_peer_access(places, device), group, device))) is not None:
        return None, reason
    made: FusedCollectives | None = None
    try:
        made, failed = FusedCollectives(group, max_tokens, device), None
    except (RuntimeError, NsysK3Error, ImportError) as error:
        failed = f"no symmetric memory ({(str(error) or type(error).__name__).splitlines()[0]})"
    reason = first_reason(gather(failed, group, device))  # also the barrier that a workspace needs before its first use
    return (None, reason) if reason is not None else (made, None)


class FusedCollectives:
    """nsysk3's kernels over one group's symmetric memory."""

    def __init__(self, group: dist.ProcessGroup, max_tokens: int, device: torch.device) -> None:
        from nsysk3.ops import cuda

        size = cuda.workspace_bytes(dist.get_world_size(group), max_tokens)
        buffer, self._handle = symmetric_bytes(size, group, device)
        rank = dist.get_rank(group)
        self._workspace: Workspace = cuda.Workspace(buffer, list(self._handle.buffer_ptrs), rank, max_tokens)
        self._gemm: GemmReduceScatter | None = None
        self._order = capture.BufferOrder(self._barrier)
        self._staged_by: str | None = None
        self.device_name = torch.cuda.get_device_name(device)

    def partial_buffer(self, tokens: int) -> torch.Tensor:
        """Symmetric memory [M, H] for the next pull."""
        self._order.before_write()
        return self._workspace.partial(tokens)

    def reduce_scatter_attn_res(
        self,
        partial: torch.Tensor,
        prefix: torch.Tensor | None,
        bank: torch.Tensor,
        rows: int,
        score_weight: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        path: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K1 by ``path``.  A pull from a tensor that is not partial_buffer's copies it there first."""
        if path == PULL:
            shared = self._workspace.partial(partial.shape[0])
            if partial.data_ptr() != shared.data_ptr():
                self._order.before_write()
                shared.copy_(partial)
                partial = shared
        elif path == PUSH:
            self._stage(PUSH)
        return self._workspace.reduce_scatter_attn_res(
            dense(partial), _dense(prefix), readable(bank), rows, as_type(score_weight, torch.float32),
            as_type(norm_weight, torch.bfloat16), eps, path=path,
        )  # fmt: skip

    def linear_reduce_scatter_attn_res(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        prefix: torch.Tensor | None,
        bank: torch.Tensor,
        rows: int,
        score_weight: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K2."""
        from nsysk3.ops.gemm import GemmReduceScatter

        if self._gemm is None:
            self._gemm = GemmReduceScatter(self._workspace)
        self._stage("gemm")
        return self._gemm.linear_reduce_scatter_attn_res(
            x.contiguous(), weight.contiguous(), _dense(prefix), readable(bank), rows,
            as_type(score_weight, torch.float32), as_type(norm_weight, torch.bfloat16), eps,
        )  # fmt: skip

    def attn_res_all_gather(
        self,
        prefix: torch.Tensor,
        bank: torch.Tensor,
        rows: int,
        score_weight: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        write_row: int | None,
    ) -> torch.Tensor:
        """K3."""
        self._order.before_write()
        read = readable(bank)
        normed = self._workspace.attn_res_all_gather(
            dense(prefix), read, rows, as_type(score_weight, torch.float32),
            as_type(norm_weight, torch.bfloat16), eps, write_row=write_row,
        )  # fmt: skip
        if write_row is not None and read is not bank:
            reference.write_bank(bank, write_row, prefix)
        return normed

    def _stage(self, by: str) -> None:
        """Before rows are sent to staging, which several forms share without knowing of each other's turns."""
        self._order.before_write()
        if self._staged_by not in (by, None):
            self._barrier()
        self._staged_by = by

    def _barrier(self) -> None:
        """All ranks on the stream: what each had launched before is done."""
        self._handle.barrier(channel=0)

    def check(self) -> None:
        """Raise RunFailedError when a kernel gave up waiting; synchronises."""
        self._workspace.check()


def _dense(prefix: torch.Tensor | None) -> torch.Tensor | None:
    return None if prefix is None else dense(prefix)


def _unable(hidden: int, world: int, device: torch.device) -> str | None:
    """Why this rank cannot take part, peers aside."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return "no GPU"
    if (reason := cuda_unavailable()) is not None:
        return reason
    from nsysk3.ops import cuda

    if hidden != cuda.HIDDEN:
        return f"hidden size {hidden}, not {cuda.HIDDEN}"
    return f"{world} ranks, more than {cuda.MAX_PEERS}" if world > cuda.MAX_PEERS else None
