"""nsysk3's kernels inside SGLang: what answers in place of SGLang's functions, on by ``NSYSK3_SP=1``.

Two things, each local to a few functions of SGLang (targets.SP_TARGETS), before the model is built:

* the attention residual's aggregation in one launch instead of three to five, on any GPU that has SGLang's Triton path;
* Kimi-K3's sequence-parallel collectives on GPUs without NVLink multicast, where SGLang itself has only NCCL.  They
  need an expert all-to-all (--moe-a2a-backend), without which SGLang does not shard rows, and one launch of them takes
  a path that communicates inside the kernel only where that was measured faster; ``NSYSK3_SP=fused``, wherever it can.

Whatever does not fit is left to SGLang: its own function runs, or None says to it that NCCL should.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nsysk3.ops.sp import SequenceParallel

logger = logging.getLogger("nsysk3.plugin")

# SGLang asks it at every use: whether layers keep their slices of the residual, and its kernels' fused forms are used.
_CARRY = "SGLANG_K3_SP_ATTN_RES"
_HIDDEN = 7168
_LEAST_TOKENS = 8192
Original = Callable[..., Any]


class SpHooks:
    """One scheduler process's answers.  Every method is an AROUND hook: SGLang's own function comes first."""

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self._sp: SequenceParallel | None = None
        self._asked = False
        self._told: set[str] = set()

    def aggregate(
        self,
        original: Original,
        prefix_sum: Any,
        bank: Any,
        nvb: int,
        score_proj: Any,
        score_norm: Any,
        out_norm: Any,
    ) -> Any:
        """Attention residual and norm: SGLang's _aggregate_fused."""
        if not _in_one_launch(prefix_sum, bank, out_norm):
            return original(prefix_sum, bank, nvb, score_proj, score_norm, out_norm)
        read = self._read(prefix_sum, None, bank, nvb, score_proj, score_norm, out_norm)
        return original(prefix_sum, bank, nvb, score_proj, score_norm, out_norm) if read is None else read[0]

    def aggregate_add(
        self,
        original: Original,
        prefix_a: Any,
        prefix_b: Any,
        bank: Any,
        nvb: int,
        score_proj: Any,
        score_norm: Any,
        out_norm: Any,
        write_bank_row: bool = False,
    ) -> Any:
        """The same with the pending add before it: SGLang's _aggregate_fused_add."""
        if (
            write_bank_row
            or _sglang_has_a_kernel(prefix_a.shape[1], nvb)
            or not _in_one_launch(prefix_a, bank, out_norm)
        ):
            return original(prefix_a, prefix_b, bank, nvb, score_proj, score_norm, out_norm, write_bank_row)
        read = self._read(prefix_a, prefix_b, bank, nvb, score_proj, score_norm, out_norm)
        if read is None:
            return original(prefix_a, prefix_b, bank, nvb, score_proj, score_norm, out_norm, write_bank_row)
        return read

    def enabled(self, original: Original) -> bool:
        """Whether there are SP collectives: SGLang's own, else these.  All ranks ask while the model is built."""
        if original():
            return True
        if not self._asked:
            self._asked = True
            self._sp = self._quietly(self._make)
        return self._sp is not None

    def requires_symmetric_rs(self, original: Original, num_tokens: int, *args: Any, **kwargs: Any) -> bool:
        """Whether o_proj should write where peers can read."""
        if self._sp is None:
            return bool(original(num_tokens, *args, **kwargs))
        return self._sp.reads_partial(num_tokens)

    def o_proj_output_buffer(self, original: Original, num_tokens: int, dtype: Any, hidden_size: int = _HIDDEN) -> Any:
        """Where it writes: only asked for when requires_symmetric_rs said so."""
        if self._sp is None:
            return original(num_tokens, dtype, hidden_size)
        buffer = self._sp.partial_buffer(num_tokens)
        return buffer if buffer is not None else _empty(num_tokens, hidden_size, dtype)

    def reduce_scatter_attn_res(
        self, original: Original, tensor: Any, residual: Any, bank: Any, cw: Any, ow: Any, nvb: int, eps: float
    ) -> Any:
        """o_proj's sum, the pending add, the read and its norm on this rank's rows; None: not taken."""
        sp = self._sp
        if sp is None:
            return original(tensor, residual, bank, cw, ow, nvb, eps)
        if not _rows(tensor) or not sp.takes("rs_attn_res", tensor.shape[0], nvb, tensor.dtype):
            return None
        if residual is not None and residual.shape[0] == tensor.shape[0]:
            residual = residual[sp.rows(tensor.shape[0])]
        return sp.reduce_scatter_attn_res(tensor, residual, bank, nvb, cw, ow, eps)

    def attn_res_all_gather(
        self,
        original: Original,
        prefix: Any,
        bank: Any,
        cw: Any,
        ow: Any,
        nvb: int,
        eps: float,
        *,
        write_prefix: bool = False,
    ) -> Any:
        """The read of this rank's rows, its norm and the gather of all rows; None: not taken."""
        sp = self._sp
        if sp is None:
            return original(prefix, bank, cw, ow, nvb, eps, write_prefix=write_prefix)
        if not _rows(prefix) or not sp.takes("attn_res_ag", prefix.shape[0] * sp.world, nvb, prefix.dtype):
            return None
        return sp.attn_res_all_gather(prefix, bank, nvb, cw, ow, eps, nvb if write_prefix else None)

    def _read(self, prefix: Any, addend: Any, bank: Any, nvb: int, projection: Any, norm: Any, out_norm: Any) -> Any:
        """Normed and prefix, or None where that fails: it is this GPU's alone, so SGLang's own can still run."""

        def work() -> Any:
            from nsysk3.ops import attn_res

            weights = _score_weight(projection, norm), out_norm.weight, norm.variance_epsilon
            last = out_norm.variance_epsilon
            with _range(f"k3.attn_res M={prefix.shape[0]} nvb={nvb}"):
                if addend is None:
                    return attn_res.attn_res_norm(prefix, bank, nvb, *weights, norm_eps=last), prefix
                return attn_res.attn_res_add_norm(prefix, addend, bank, nvb, *weights, norm_eps=last)

        return self._quietly(work, "SGLang's kernels")

    def _make(self) -> SequenceParallel | None:
        """The collectives of this rank's attention group.  Collective: all ranks of the group come here."""
        import torch

        from nsysk3.ops.sp import SequenceParallel

        context = importlib.import_module("sglang.srt.runtime_context")
        backend = importlib.import_module("sglang.srt.layers.moe.utils").get_moe_a2a_backend()
        group = context.get_parallel().attn_tp_group
        if backend.is_none() or group.world_size < 2:
            logger.info("nsysk3 SP is off: SGLang shards rows only with an expert all-to-all and TP > 1")
            return None
        os.environ.setdefault(_CARRY, "1")
        chunk = self._quietly(lambda: int(context.get_server_args().chunked_prefill_size)) or 0
        made = SequenceParallel(
            group.device_group,
            hidden=_HIDDEN,
            max_tokens=max(chunk, _LEAST_TOKENS),
            max_rows=8,
            device=torch.device("cuda", torch.cuda.current_device()),
            mode=self._mode,  # type: ignore[arg-type]
        )
        if made.unable is not None:
            logger.warning("nsysk3 SP fell back: NCCL (%s)", made.unable)
            return None
        logger.info("nsysk3 SP can run (TP%d, mode %s)", made.world, self._mode)
        return made

    def _quietly(self, work: Callable[[], Any], instead: str = "NCCL") -> Any:
        """``work()``, or None and one line in the log where it raises."""
        try:
            return work()
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            if cause not in self._told:
                self._told.add(cause)
                logger.warning("nsysk3 SP fell back: %s (%s)", instead, cause)
            return None


def _rows(tensor: Any) -> bool:
    return bool(tensor.ndim == 2 and tensor.shape[0] > 0 and tensor.shape[1] == _HIDDEN and tensor.is_contiguous())


def _in_one_launch(prefix: Any, bank: Any, norm: Any) -> bool:
    """Whether SGLang's norm is the plain one, and the tensors are a GPU's."""
    other = ("variance_size_override", "override_orig_dtype", "_quant_linear")
    plain = type(norm).__name__ == "RMSNorm" and all(getattr(norm, name, None) is None for name in other)
    return bool(plain and prefix.is_cuda and prefix.shape[0] > 0 and bank.dtype == prefix.dtype)


def _sglang_has_a_kernel(hidden: int, rows: int) -> bool:
    """Whether SGLang has a one-launch kernel of its own for this GPU: newer NVIDIA's, AMD's."""
    module = sys.modules["sglang.srt.layers.attn_residual"]
    return bool(module._use_fast(hidden) or module._use_hip_fused(hidden, rows))


def _score_weight(projection: Any, norm: Any) -> Any:
    return sys.modules["sglang.srt.layers.attn_residual"].get_cw(projection, norm)


def _empty(rows: int, width: int, dtype: Any) -> Any:
    import torch

    return torch.empty((rows, width), dtype=dtype, device="cuda")


def _range(text: str) -> Any:
    from nsysk3.ops.ranges import named_range

    return named_range(text, True)
