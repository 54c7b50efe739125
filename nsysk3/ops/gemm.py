"""K2: o_proj's GEMM, reduce-scatter, attention residual and norm, with the communication under the GEMM.

The GEMM runs by owner, the peers' rows first and this rank's last.  A copy engine takes a peer's finished rows to its
staging while the next ones are computed, and leaves word there.  The consumer is K0 over the rows of all ranks, behind
the GEMM on the whole GPU: what it waits for then is only what is still on its way.
"""

from __future__ import annotations

import torch

from nsysk3.errors import InputError
from nsysk3.ops import cuda
from nsysk3.ops.cuda_abi import RingParams
from nsysk3.ops.cuda_workspace import Workspace

MIN_LOCAL = 512


class GemmReduceScatter:
    """K2 for one workspace.  Owns streams and a buffer for the partial rows; counts its calls on the host."""

    def __init__(self, ws: Workspace) -> None:
        self.ws = ws
        self._copies = {p: torch.cuda.Stream(ws.device, priority=-1) for p in range(ws.world) if p != ws.rank}
        self._buffer = torch.empty(0, cuda.HIDDEN, dtype=torch.bfloat16, device=ws.device)
        self._calls = 0

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
        *,
        write_row: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K2 of x [M, K] and this rank's weight [H, K]: (normed, new prefix), both [Ml, H].

        InputError unless M divides over the ranks with at least MIN_LOCAL rows each.
        """
        ws = self.ws
        tokens, local = x.shape[0], x.shape[0] // ws.world
        if tokens % ws.world or local < MIN_LOCAL or tokens > ws.max_tokens:
            raise InputError(f"{tokens} rows: K2 needs {MIN_LOCAL} to {ws.layout.max_local} whole rows a rank")
        self._calls += 1
        half = (self._calls & 1) * ws.layout.half
        if self._buffer.shape[0] < tokens:
            self._buffer = torch.empty(tokens, cuda.HIDDEN, dtype=torch.bfloat16, device=ws.device)
        partial = self._buffer[:tokens]
        out, prefix_out = (torch.empty(local, cuda.HIDDEN, dtype=x.dtype, device=x.device) for _ in range(2))
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
        mine = ws.peers[ws.rank]
        params.nlocal, params.target = ws.world, self._calls & 0xFFFFFFFF
        params.state = ws.state("gemm")
        params.error = params.state + 20
        params.local[0] = partial.data_ptr() + ws.rank * local * cuda.ROW_BYTES  # behind its product in stream order
        main, transposed = torch.cuda.current_stream(), weight.t()
        for i, p in enumerate((*ws.others(), ws.rank), 1):
            piece = slice(p * local, (p + 1) * local)
            torch.mm(x[piece], transposed, out=partial[piece])
            if p != ws.rank:
                self._send(p, partial[piece], half)
                params.local[i] = mine + ws.slot(p) + half
                params.gate_local[i] = mine + ws.layout.copied + p * 4
        cuda.launch_ring(params, cuda.LOCAL, ws.device.index, variant=cuda.MANY)
        for stream in self._copies.values():
            main.wait_stream(stream)
        return out, prefix_out

    def _send(self, p: int, piece: torch.Tensor, half: int) -> None:
        """Finished rows to their owner by copy engine, and word of it."""
        ws, library, stream = self.ws, cuda.library(), self._copies[p]
        stream.wait_stream(torch.cuda.current_stream())
        to, size = ws.peers[p] + ws.slot(ws.rank) + half, piece.numel() * piece.element_size()
        cuda.check_launch(library.k3_memcpy(to, piece.data_ptr(), size, stream.cuda_stream))
        word = ws.peers[p] + ws.layout.copied + ws.rank * 4
        cuda.check_launch(library.k3_write_value(word, self._calls & 0xFFFFFFFF, stream.cuda_stream))
