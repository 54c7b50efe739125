"""Which of SGLang's functions the plugin hooks, and what it expects of them.

``python -m nsysk3.plugin.check`` checks it against an SGLang.  Only names are written down here, so
that this can be read where SGLang is not installed.
"""

from __future__ import annotations

from dataclasses import dataclass

VERIFIED_VERSIONS = ("0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23")
HOOK_REGISTRY = "sglang.srt.plugins.hook_registry"
SCHEDULER = "sglang.srt.managers.scheduler"
_PP_MIXIN = "sglang.srt.managers.scheduler_pp_mixin"
_PROFILER = "sglang.srt.managers.scheduler_components.profiler_manager"
_PROFILER_V2 = "sglang.srt.utils.profile_utils"


@dataclass(frozen=True)
class Target:
    """A method to hook.

    ``marker`` is what the rank mark calls it and ``hook`` the method of Hooks that takes it.  ``parameters`` are the
    leading parameters that the hook reads; ``reads`` are names that the target's module must use, since the hook reads
    them too.
    """

    marker: str
    hook: str
    kind: str
    module: str
    owner: str
    function: str
    parameters: tuple[str, ...] = ("self",)
    reads: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """The dotted path as SGLang's HookRegistry takes it."""
        return f"{self.module}.{self.owner}.{self.function}"


@dataclass(frozen=True)
class Names:
    """Names that a module must define or use, though nothing there is hooked."""

    module: str
    names: tuple[str, ...]
    required: bool = True


@dataclass(frozen=True)
class FunctionTarget:
    """A function of a module that ``hook`` of SpHooks goes around; ``modules``: where it is, newest place first."""

    hook: str
    modules: tuple[str, ...]
    function: str
    parameters: tuple[str, ...]


# The send is hooked below _pp_send_proxy_to_next_stage, which 0.5.17 to 0.5.20 do not have, and the receive below
# _pp_recv_proxy_tensors, which the first stage calls for nothing.  Layers need no target: modules are found in the
# model when the first batch runs, which also spares processes without a model the import of SGLang's model runner.
TARGETS = (
    Target(
        "forward", "run_batch", "around", SCHEDULER, "Scheduler", "run_batch",
        ("self", "batch"),
        ("forward_ct", "tp_worker", "extend_num_tokens", "forward_mode", "reqs", "_profile_batch_predicate"),
    ),
    Target("forward", "profile_step", "after", _PROFILER, "SchedulerProfilerManager", "_profile_batch_predicate"),
    Target("mb", "launch_batch", "before", _PP_MIXIN, "SchedulerPPMixin", "_pp_launch_batch", ("self", "mb_id")),
    Target(
        "send", "send", "around", _PP_MIXIN, "SchedulerPPMixin", "_pp_send_dict_to_next_stage",
        ("self", "tensor_dict", "async_send", "msg_type"), ("proxy", "output"),
    ),
    Target(
        "recv", "receive", "around", _PP_MIXIN, "SchedulerPPMixin", "_pp_recv_typed_dict",
        ("self", "expected_kind"), ("proxy", "output", "mbs", "cur_batch_for_debug"),
    ),
    Target("window", "start_profile", "after", _PROFILER, "SchedulerProfilerManager", "_start_profile"),
    Target(
        "stop", "stop_profile", "around", _PROFILER, "SchedulerProfilerManager", "_stop_profile", ("self",),
        ("profile_in_progress", "profiler_activities", "CUDA_PROFILER", "cudaProfilerStop", "dp_tp_cpu_group"),
    ),
    Target("window", "start_profile", "after", _PROFILER_V2, "ProfileManager", "_do_start"),
    Target("stop", "stop_profile", "around", _PROFILER_V2, "ProfileManager", "_do_stop", ("self",), ("cpu_group",)),
)  # fmt: skip

USED_NAMES = (
    Names(HOOK_REGISTRY, ("HookRegistry", "register", "HookType", "BEFORE", "AFTER", "AROUND")),
    Names("sglang.srt.plugins", ("load_plugins", "sglang.srt.plugins")),
    Names(SCHEDULER, ("load_plugins", "run_scheduler_process")),
    Names("sglang.srt.environ", ("envs", "SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS")),
    Names("sglang.srt.managers.tp_worker", ("model_runner",)),
    Names("sglang.srt.runtime_context", ("get_parallel", "tp_rank", "pp_rank", "moe_ep_rank")),
    Names("sglang.srt.distributed.parallel_state", ("get_tp_group", "get_pp_group", "ranks")),
    Names("sglang.srt.models.kimi_k3", ("layers", "self_attn", "mlp", "is_block_write_layer", "embed_tokens",
          "KimiK3DeltaAttention", "KimiK3MLAAttention", "KimiK3MoE", "logits_processor"), required=False),
)  # fmt: skip

_ATTN_RESIDUAL = ("sglang.srt.layers.attn_residual",)
_SP_COLLECTIVE = ("sglang.srt.layers.communication.k3_sp_collective", "sglang.srt.layers.k3_sp_collective")
_READ = ("bank", "nvb", "score_proj", "score_norm", "out_norm")

# What NSYSK3_SP answers for (nsysk3.plugin.sp).  The collectives go together, or not at all.
SP_TARGETS = (
    FunctionTarget("aggregate", _ATTN_RESIDUAL, "_aggregate_fused", ("prefix_sum", *_READ)),
    FunctionTarget(
        "aggregate_add", _ATTN_RESIDUAL, "_aggregate_fused_add", ("prefix_a", "prefix_b", *_READ, "write_bank_row")
    ),
    FunctionTarget("enabled", _SP_COLLECTIVE, "enabled", ()),
    FunctionTarget("requires_symmetric_rs", _SP_COLLECTIVE, "requires_symmetric_rs", ("num_tokens", "device")),
    FunctionTarget(
        "o_proj_output_buffer", _SP_COLLECTIVE, "get_o_proj_output_buffer", ("num_tokens", "dtype", "hidden_size")
    ),
    FunctionTarget(
        "reduce_scatter_attn_res", _SP_COLLECTIVE, "reduce_scatter_attn_res",
        ("tensor", "residual", "bank", "cw", "ow", "nvb", "eps"),
    ),
    FunctionTarget(
        "attn_res_all_gather", _SP_COLLECTIVE, "attn_res_all_gather",
        ("prefix", "bank", "cw", "ow", "nvb", "eps", "write_prefix"),
    ),
)  # fmt: skip

SP_USED_NAMES = (
    Names(_ATTN_RESIDUAL[0], ("_use_fast", "_use_hip_fused", "get_cw", "variance_epsilon", "k3_sp_collective"),
          required=False),
    Names("sglang.srt.layers.layernorm", ("RMSNorm", "variance_epsilon", "variance_size_override"), required=False),
    Names("sglang.srt.layers.moe.utils", ("get_moe_a2a_backend", "is_none"), required=False),
    Names("sglang.srt.runtime_context", ("attn_tp_group", "get_server_args"), required=False),
    Names("sglang.srt.distributed.parallel_state", ("device_group", "world_size", "rank_in_group"), required=False),
    Names("sglang.srt.environ", ("SGLANG_K3_SP_ATTN_RES",), required=False),
    Names("sglang.srt.models.kimi_k3", ("k3_sp_collective", "requires_symmetric_rs", "get_o_proj_output_buffer",
          "register_o_proj_output", "output_tensor"), required=False),
)  # fmt: skip
