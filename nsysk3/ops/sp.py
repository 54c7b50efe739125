"""Sequence parallelism of Kimi-K3's attention residual: one object for all its collectives on one group of ranks.

Every rank keeps the residual stream and its bank for its own rows only (``SequenceParallel.rows``).  Three operations
join that to the tensor-parallel attention: the reduce-scatter behind o_proj with everything that follows it up to the
normalised MLP input, the same with o_proj's GEMM before it, and the read before the attention with the all-gather
behind it.  Each has a path that communicates inside the kernel and one that does not; all ranks take the same.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from nsysk3.errors import InputError
from nsysk3.ops import reference
from nsysk3.ops.attn_res import attn_res_add_norm, attn_res_norm, check_shapes
from nsysk3.ops.collectives import all_gather_rows, reduce_scatter_rows
from nsysk3.ops.dispatch import BASELINE, GEMM_ROWS, MAX_ROWS, PULL, PUSH, Choice, find_table
from nsysk3.ops.pytorch import dist, torch
from nsysk3.ops.ranges import named_range

if TYPE_CHECKING:
    from nsysk3.ops.fused import FusedCollectives

logger = logging.getLogger("nsysk3.ops")

Mode = Literal["nccl", "fused", "auto"]
# Distinct decisions that are kept: a server sees every number of tokens there is.
_KEPT = 10_000


@dataclass(frozen=True)
class Decision:
    """Which path an operation took and why; ``tokens`` over all ranks, ``rows`` valid bank rows.

    ``separate``: o_proj's product, then reduce_scatter_attn_res, whose own decision follows.
    """

    op: str
    path: str
    reason: str
    tokens: int
    rows: int


class SequenceParallel:
    """The collectives of one tensor-parallel group.  All ranks of it must make the same calls in the same order.

    ``mode``: ``nccl``, collectives and then one launch for the rest; ``fused``, nsysk3's kernels wherever they can run;
    ``auto``, where they were measured faster too (nsysk3.ops.dispatch).  Making one is a collective operation unless
    the mode is nccl.  ``max_tokens`` (over all ranks) and ``max_rows`` bound what the kernels' buffers take; more is
    not an error, but goes through NCCL.

    In a CUDA graph everything works as without one, once each operation ran outside (that allocates its buffers).
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        hidden: int,
        max_tokens: int,
        max_rows: int,
        device: torch.device | str,
        mode: Mode = "auto",
    ) -> None:
        if mode not in ("nccl", "fused", "auto"):
            raise InputError(f"no mode {mode!r} of SequenceParallel: nccl, fused or auto")
        self.group, self.hidden, self.max_tokens, self.max_rows, self.mode = group, hidden, max_tokens, max_rows, mode
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.device = torch.device(device)
        self.decisions: list[Decision] = []
        self._seen: set[Decision] = set()
        self._told: set[tuple[str, str]] = set()
        self._calls = 0
        self._fused: FusedCollectives | None = None
        self._unable = "asked for" if mode == "nccl" else self._prepare()

    def rows(self, tokens: int) -> slice:
        """The rows of a batch of ``tokens`` that this rank owns."""
        return reference.local_rows(tokens, self.rank, self.world)

    def partial_buffer(self, tokens: int) -> torch.Tensor | None:
        """Where o_proj should write its partial [M, H] so that peers can read it there; None where it does not matter.

        Valid for the next reduce_scatter_attn_res on this stream, and for nothing after it.
        """
        if self._fused is None or not self.reads_partial(tokens):
            return None
        return self._fused.partial_buffer(tokens)

    @property
    def unable(self) -> str | None:
        """Why nothing here can take a fused path, None when something can."""
        return self._unable

    def reads_partial(self, tokens: int) -> bool:
        """Whether peers may read this batch's partial where it lies, for some number of bank rows."""
        every = (self._choose("rs_attn_res", tokens, rows, torch.bfloat16) for rows in range(self.max_rows + 1))
        return any(choice.path == PULL for choice in every)

    def takes(self, operation: str, tokens: int, rows: int, dtype: torch.dtype) -> bool:
        """Whether a call would take a fused path, for who has another way; where not, that is marked and remembered."""
        choice = self._choose(operation, tokens, rows, dtype)
        if choice.path == BASELINE:
            with self._call(operation, tokens, rows, choice):
                pass
        return choice.path != BASELINE

    def reduce_scatter_attn_res(
        self,
        partial: torch.Tensor,
        prefix: torch.Tensor | None,
        bank: torch.Tensor,
        rows: int,
        score_weight: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The MLP side's read: normed [Ml, H] and the new prefix [Ml, H].

        ``partial`` [M, H] is summed over ranks, ``prefix`` [Ml, H] added (None after a write layer), and the sum read
        together with the first ``rows`` of ``bank`` [Ml, NB, H].  ``score_weight`` and ``norm_weight``: [H].
        """
        tokens = partial.shape[0]
        self._check_local(tokens, prefix, bank, rows)
        choice = self._choose("rs_attn_res", tokens, rows, partial.dtype)
        with self._call("rs_attn_res", tokens, rows, choice):
            if choice.path != BASELINE and self._fused is not None:
                return self._fused.reduce_scatter_attn_res(
                    partial, prefix, bank, rows, score_weight, norm_weight, eps, choice.path
                )
            return self._separately(partial, prefix, bank, rows, score_weight, norm_weight, eps)

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
        """reduce_scatter_attn_res of x [M, K] times weight [H, K], this rank's share of o_proj's input and weight."""
        tokens = x.shape[0]
        self._check_local(tokens, prefix, bank, rows)
        choice = self._choose("linear_rs_attn_res", tokens, rows, x.dtype)
        if choice.path != BASELINE and self._fused is not None:
            with self._call("linear_rs_attn_res", tokens, rows, choice):
                return self._fused.linear_reduce_scatter_attn_res(
                    x, weight, prefix, bank, rows, score_weight, norm_weight, eps
                )
        # The product by itself; the reduce-scatter behind it decides, and tells, for itself.
        self._remember(Decision("linear_rs_attn_res", "separate", choice.reason, tokens, rows))
        out = self.partial_buffer(tokens) if x.dtype == torch.bfloat16 else None
        partial = torch.mm(x, weight.t()) if out is None else torch.mm(x, weight.t(), out=out)
        return self.reduce_scatter_attn_res(partial, prefix, bank, rows, score_weight, norm_weight, eps)

    def attn_res_all_gather(
        self,
        prefix: torch.Tensor,
        bank: torch.Tensor,
        rows: int,
        score_weight: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        write_row: int | None = None,
        *,
        tokens: int | None = None,
    ) -> torch.Tensor:
        """The attention side's read of this rank's rows, then all ranks' normed rows [M, H].

        ``prefix`` [Ml, H], ``bank`` [Ml, NB, H]; ``write_row`` stores prefix to that slot.  ``tokens``: M, where it is
        not P times Ml.  The result may lie in a buffer of this object: it is valid on this stream until the call after
        the next.
        """
        tokens = prefix.shape[0] * self.world if tokens is None else tokens
        self._check_local(tokens, prefix, bank, rows)
        choice = self._choose("attn_res_ag", tokens, rows, prefix.dtype)
        with self._call("attn_res_ag", tokens, rows, choice):
            if choice.path != BASELINE and self._fused is not None:
                return self._fused.attn_res_all_gather(prefix, bank, rows, score_weight, norm_weight, eps, write_row)
            normed = attn_res_norm(prefix, bank, rows, score_weight, norm_weight, eps, write_row)
            return normed if self.world == 1 else all_gather_rows(normed, tokens, self.group)

    def check(self) -> None:
        """Raise RunFailedError when a kernel gave up waiting for a peer since the last check; waits for the GPU."""
        if self._fused is not None:
            self._fused.check()

    def _separately(
        self,
        partial: torch.Tensor,
        prefix: torch.Tensor | None,
        bank: torch.Tensor,
        rows: int,
        score_weight: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        summed = partial if self.world == 1 else reduce_scatter_rows(partial, self.group)
        if prefix is None:
            # The sum may share memory with partial_buffer's, which the caller cannot keep.
            new_prefix = summed.clone() if self.world == 1 else summed
            return attn_res_norm(new_prefix, bank, rows, score_weight, norm_weight, eps), new_prefix
        return attn_res_add_norm(summed, prefix, bank, rows, score_weight, norm_weight, eps)

    def _prepare(self) -> str | None:
        """Ready the fused kernels; why they cannot be used here, the same on all ranks, None when they can."""
        if self.world == 1:
            return "one rank"
        from nsysk3.ops.fused import prepare

        self._fused, reason = prepare(self.group, self.hidden, self.max_tokens, self.device)
        return reason

    def _choose(self, operation: str, tokens: int, rows: int, dtype: torch.dtype) -> Choice:
        """The path of a call, by what all ranks know alike."""
        if (reason := self._against(operation, tokens, rows, dtype)) is not None or self._fused is None:
            return Choice(BASELINE, reason or "not ready", able=False)
        table = find_table(self._fused.device_name, self.world)
        if table is None:
            measured = Choice(BASELINE, f"nothing measured on {self.world} x {self._fused.device_name}")
        else:
            measured = table.choose(operation, tokens, rows)
        if self.mode == "fused" and measured.path == BASELINE:
            return Choice(PUSH, "asked for")
        return measured

    def _against(self, operation: str, tokens: int, rows: int, dtype: torch.dtype) -> str | None:
        if self._unable is not None:
            return self._unable
        if dtype != torch.bfloat16:
            return f"{str(dtype).removeprefix('torch.')}, not bfloat16"
        if tokens == 0 or tokens % self.world:
            return f"tokens do not divide over {self.world} ranks"
        if tokens > self.max_tokens:
            return f"more than {self.max_tokens} tokens"
        if rows > MAX_ROWS:
            return f"more than {MAX_ROWS} bank rows"
        if operation == "linear_rs_attn_res" and tokens // self.world < GEMM_ROWS:
            return f"fewer than {GEMM_ROWS} tokens a rank"
        if operation == "linear_rs_attn_res" and torch.cuda.is_current_stream_capturing():
            return "in a CUDA graph"  # it counts its calls on the host
        return None

    def _check_local(self, tokens: int, prefix: torch.Tensor | None, bank: torch.Tensor, rows: int) -> None:
        mine = self.rows(tokens)
        local = mine.stop - mine.start
        if bank.shape[0] != local or (prefix is not None and prefix.shape[0] != local):
            given = f"bank of {bank.shape[0]}" + ("" if prefix is None else f", prefix of {prefix.shape[0]}")
            raise InputError(f"rank {self.rank} owns {local} of {tokens} tokens; given: {given}")
        check_shapes(bank[:, 0] if prefix is None else prefix, bank, rows, None)

    @contextmanager
    def _call(self, operation: str, tokens: int, rows: int, choice: Choice) -> Iterator[None]:
        self._decide(operation, tokens, rows, choice)
        self._calls += 1
        mine = self.rows(tokens)
        text = (
            f"k3.{operation} M={tokens} Ml={mine.stop - mine.start} nvb={rows} P={self.world} epoch={self._calls} "
            f"path={choice.path} mode={self.mode} reason={choice.reason}"
        )
        with named_range(text, self.device.type == "cuda"):
            yield

    def _decide(self, operation: str, tokens: int, rows: int, choice: Choice) -> None:
        new = self._remember(Decision(operation, choice.path, choice.reason, tokens, rows))
        told = (choice.path, choice.reason)
        if not new or told in self._told or self.mode == "nccl" or self.rank:  # the other ranks decide alike
            return
        self._told.add(told)
        fell_back = choice.path == BASELINE and (self.mode == "fused" or not choice.able)
        said = "fell back" if fell_back else "by table" if choice.path == BASELINE else "is active"
        logger.log(
            logging.WARNING if fell_back and self.mode == "fused" else logging.INFO,
            "nsysk3 SP %s: %s by %s (%s; first at %d tokens, %d bank rows)",
            said, operation, choice.path, choice.reason, tokens, rows,
        )  # fmt: skip

    def _remember(self, decision: Decision) -> bool:
        """Whether it is a new one."""
        if decision in self._seen or len(self._seen) >= _KEPT:
            return False
        self._seen.add(decision)
        self.decisions.append(decision)
        return True
