"""The memory that the ranks of one group share, and the fused collectives over it (K1, K3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nsysk3.errors import InputError, RunFailedError
from nsysk3.ops import cuda
from nsysk3.ops.cuda_abi import MAX_PEERS, RingParams

_STATE_BYTES = 64
_FAMILIES = ("pull", "push", "gather", "gemm")


@dataclass(frozen=True)
class Layout:
    """Byte offsets in one rank's symmetric buffer."""

    world: int
    max_tokens: int

    @property
    def max_local(self) -> int:
        """Rows a rank can own."""
        return -(-self.max_tokens // self.world)

    ready = 0  # [world] words: the partial of rank p is complete
    done = 256  # [world] words: the gathered rows of rank p are there
    copied = 512  # [world] words: the rows that rank p's GEMM made for this one are there
    pushed = 768  # [world][max_local] words: a pushed row of rank p is there

    @property
    def half(self) -> int:
        """Bytes of one of the two halves of a double buffer of all tokens."""
        return self.world * self.max_local * cuda.ROW_BYTES

    @property
    def partials(self) -> int:
        """Two halves: what peers pull from."""
        return -(-(self.pushed + self.world * self.max_local * 4) // 1024) * 1024

    @property
    def staging(self) -> int:
        """Two halves of [world][max_local] rows: what peers push to."""
        return self.partials + 2 * self.half

    @property
    def gathered(self) -> int:
        """Two halves of all rows."""
        return self.staging + 2 * self.half

    @property
    def total(self) -> int:
        """Bytes of all."""
        return self.gathered + 2 * self.half


def workspace_bytes(world: int, max_tokens: int) -> int:
    """Bytes of symmetric memory one rank provides for up to ``max_tokens`` tokens over all ranks."""
    return Layout(world, max_tokens).total


class Workspace:
    """What the fused collectives of one group share: symmetric memory, epochs, which half is next.

    ``buffer``: this rank's symmetric memory (uint8); ``peers``: the addresses of every rank's, as mapped in this
    process.  The maker keeps both alive, and lets all ranks meet after making and before the first call.  All ranks
    make the same calls in the same order, each on one stream at a time.  Calls of kind pull and gather alternate
    buffers on the host: a CUDA graph must hold an even number of each.
    """

    def __init__(self, buffer: torch.Tensor, peers: Sequence[int], rank: int, max_tokens: int) -> None:
        self.world, self.rank, self.max_tokens = len(peers), rank, max_tokens
        self.layout = Layout(self.world, max_tokens)
        if not 2 <= self.world <= MAX_PEERS:
            raise InputError(f"the fused collectives join 2 to {MAX_PEERS} ranks, not {self.world}")
        if buffer.numel() * buffer.element_size() < self.layout.total:
            raise InputError(f"the workspace needs {self.layout.total} bytes")
        self.device = buffer.device
        self.peers = tuple(peers)
        self._bytes = buffer.view(torch.uint8)
        self._bytes[: self.layout.partials].zero_()
        self._states = torch.zeros(len(_FAMILIES), _STATE_BYTES // 4, dtype=torch.int32, device=self.device)
        self._calls = {"pull": 0, "gather": 0}
        self._last = ""
        torch.cuda.synchronize(self.device)

    def state(self, family: str) -> int:
        """Address of a family's k3::State."""
        return int(self._states.data_ptr()) + _FAMILIES.index(family) * _STATE_BYTES

    def rows_at(self, offset: int, rows: int) -> torch.Tensor:
        """[rows, H] of this rank's symmetric memory."""
        piece = self._bytes[offset : offset + rows * cuda.ROW_BYTES]
        return piece.view(torch.bfloat16).view(rows, cuda.HIDDEN)

    def clear(self, offset: int, size: int) -> None:
        """Zero bytes of this rank's symmetric memory, in stream order."""
        self._bytes[offset : offset + size].zero_()

    def partial(self, tokens: int) -> torch.Tensor:
        """Where the next pull call expects this rank's partial [M, H]."""
        self._local(tokens)
        return self.rows_at(self.layout.partials + (self._calls["pull"] & 1) * self.layout.half, tokens)

    def reduce_scatter_attn_res(
        self,
        partial: torch.Tensor,
        prefix: torch.Tensor | None,
        bank: torch.Tensor,
        rows: int,
        score_weight: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        *,
        out: torch.Tensor | None = None,
        prefix_out: torch.Tensor | None = None,
        write_row: int | None = None,
        path: str,
        grid: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K1: sum ``partial`` [M, H] over ranks, add ``prefix``, read the bank, norm: (normed, new prefix), [Ml, H].

        ``path``: pull (peers' partials are read; ``partial`` is this call's self.partial) or push (rows are sent to
        staging).
        """
        tokens = partial.shape[0]
        local = self._local(tokens)
        if not partial.is_contiguous() or partial.dtype != torch.bfloat16 or partial.shape[1] != cuda.HIDDEN:
            raise InputError(f"the partial must be contiguous bf16 [tokens, {cuda.HIDDEN}]")
        like = partial[:local]
        out = torch.empty_like(like) if out is None else out
        prefix_out = torch.empty_like(like) if prefix_out is None else prefix_out
        self._last = f"k3.rs_attn_res M={tokens} Ml={local} nvb={rows} P={self.world} path={path}"
        params = RingParams()
        cuda.fill_common(
            params,
            tokens=local,
            residual=prefix,
            prefix_out=prefix_out,
            bank=bank,
            rows=rows,
            score_weight=score_weight,
            norm_weight=norm_weight,
            out=out,
            eps=eps,
            write_row=write_row,
        )
        if path == "pull":
            self._pull(params, partial, local, grid)
        elif path == "push":
            self._push(params, partial, local, grid)
        else:
            raise InputError(f"no path {path!r}: pull or push")
        return out, prefix_out

    def attn_res_all_gather(
        self,
        prefix: torch.Tensor,
        bank: torch.Tensor,
        rows: int,
        score_weight: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        *,
        write_row: int | None = None,
        grid: int | None = None,
    ) -> torch.Tensor:
        """K3: attention residual and norm of this rank's rows [Ml, H], stored to every rank: normed [M, H].

        The result is symmetric memory, valid until the next but one call.
        """
        local = prefix.shape[0]
        tokens = local * self.world
        self._local(tokens)
        half = self.layout.gathered + (self._calls["gather"] & 1) * self.layout.half
        self._calls["gather"] += 1
        self._last = f"k3.attn_res_ag M={tokens} Ml={local} nvb={rows} P={self.world}"
        params = RingParams()
        cuda.fill_common(
            params,
            tokens=local,
            residual=None,
            prefix_out=None,
            bank=bank,
            rows=rows,
            score_weight=score_weight,
            norm_weight=norm_weight,
            out=None,
            eps=eps,
            write_row=write_row,
        )
        params.local[0], params.nlocal, params.nout = cuda.address(prefix), 1, self.world
        for p, base in enumerate(self.peers):
            params.outs[p] = base + half + self.rank * local * cuda.ROW_BYTES
            params.peer_done[p] = base + self.layout.done + self.rank * 4
        params.my_done = self.peers[self.rank] + self.layout.done
        self._own_epoch(params, "gather")
        cuda.launch_ring(params, cuda.GATHER, self.device.index, grid)
        return self.rows_at(half, tokens)

    def check(self) -> None:
        """Wait for the GPU; RunFailedError when a bounded wait gave up: a peer did not come in time."""
        torch.cuda.synchronize(self.device)
        bad = self._states[:, 5].tolist()
        if any(bad):
            self._states[:, 5].zero_()
            names = ", ".join(name for name, error in zip(_FAMILIES, bad, strict=True) if error)
            raise RunFailedError(f"rank {self.rank} gave up waiting for a peer after {cuda.SPIN_S} s in: {names}")

    def describe(self) -> str:
        """The last call, for an NVTX range."""
        return self._last

    def _local(self, tokens: int) -> int:
        if tokens % self.world or not 0 < tokens <= self.max_tokens:
            raise InputError(
                f"{tokens} tokens over {self.world} ranks: they must divide, and be at most {self.max_tokens}"
            )
        return tokens // self.world

    def _own_epoch(self, params: RingParams, family: str) -> None:
        params.state, params.own_epoch = self.state(family), 1
        params.error = params.state + 20

    def _pull(self, params: RingParams, partial: torch.Tensor, local: int, grid: int | None) -> None:
        if partial.data_ptr() != self.partial(local * self.world).data_ptr():
            raise InputError("a pull needs the partial in Workspace.partial of this call")
        half = self.layout.partials + (self._calls["pull"] & 1) * self.layout.half + self.rank * local * cuda.ROW_BYTES
        self._calls["pull"] += 1
        params.local[0], params.nlocal = self.peers[self.rank] + half, 1
        params.nremote = params.nready = self.world - 1
        for i, p in enumerate(self.others()):
            params.remote[i] = self.peers[p] + half
            params.gate_remote[i] = self.peers[self.rank] + self.layout.ready + p * 4
            params.ready[i] = self.peers[p] + self.layout.ready + self.rank * 4
        self._own_epoch(params, "pull")
        cuda.launch_ring(params, cuda.PULL, self.device.index, grid)

    def _push(self, params: RingParams, partial: torch.Tensor, local: int, grid: int | None) -> None:
        mine = self.peers[self.rank]
        start = cuda.address(partial) or 0
        params.local[0], params.nlocal = start + self.rank * local * cuda.ROW_BYTES, 1
        params.nremote = params.npush = self.world - 1
        params.gate, params.parity_stride = 1, self.layout.half // 2
        words = self.layout.max_local * 4
        for i, p in enumerate(self.others()):
            params.remote[i] = mine + self.slot(p)
            params.gate_remote[i] = mine + self.layout.pushed + p * words
            params.push_src[i] = start + p * local * cuda.ROW_BYTES
            params.push_dst[i] = self.peers[p] + self.slot(self.rank)
            params.push_flag[i] = self.peers[p] + self.layout.pushed + self.rank * words
        self._own_epoch(params, "push")
        cuda.launch_ring(params, cuda.PUSH, self.device.index, grid)

    def slot(self, source: int) -> int:
        """Offset of the staging, first half, for rows from rank ``source``."""
        return self.layout.staging + source * self.layout.max_local * cuda.ROW_BYTES

    def others(self) -> list[int]:
        """Peers, nearest above first, so that the ranks do not all start with the same one."""
        return [(self.rank + i) % self.world for i in range(1, self.world)]
