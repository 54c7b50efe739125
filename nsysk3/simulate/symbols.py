"""Kernel symbols as a K3 prefill on SGLang shows them in a trace, and the call that launches each."""

from __future__ import annotations

from typing import NamedTuple

# The CUDA calls that launch work, and whether Nsight files them under the runtime (0) or the driver (1).
LAUNCH_CALLS = {
    "cudaLaunchKernel_v7000": 0,
    "cuLaunchKernelEx": 1,
    "cudaLaunchKernelExC_v11060": 0,
    "cudaMemcpyAsync_v3020": 0,
    "cudaMemsetAsync_v3020": 0,
    "cudaGraphLaunch_v10000": 0,
}
RUNTIME, DRIVER, EXTENDED, COPY, SET, GRAPH = LAUNCH_CALLS


class Symbol(NamedTuple):
    """One kernel: ``short`` and ``full`` (demangled) names, and the call that launches it."""

    short: str
    full: str
    call: str


def _of(short: str, full: str | None = None, call: str = DRIVER) -> Symbol:
    return Symbol(short, full or short, call)


_NATIVE = "void at::native::"
_NCCL_ARGS = "(ncclDevKernelArgsStorage<(unsigned long)4096>)"

SYMBOLS = {
    "embed": _of("_vocab_parallel_embedding_kernel"),
    "norm": _of(
        "RMSNormKernel",
        "void flashinfer::norm::RMSNormKernel<(unsigned int)8, __nv_bfloat16>(T2 *, T2 *, T2 *, unsigned int, "
        "unsigned int, unsigned int, float, float)",
        EXTENDED,
    ),
    "gemm": _of("nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_TNN"),
    "gemm_small": _of("nvjet_sm90_tst_112x128_64x7_2x1_v_bz_TNN"),
    "gemm_out": _of("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT"),
    "gemm_head": _of("nvjet_sm90_tst_256x8_64x6_2x1_v_bz_TNT"),
    "copy": _of(
        "elementwise_kernel",
        _NATIVE + "elementwise_kernel<(int)128, (int)4, void at::native::gpu_kernel_impl_nocast<"
        "at::native::direct_copy_kernel_cuda(at::TensorIteratorBase &)::[lambda() (instance 3)]>>(int, T3)",
        RUNTIME,
    ),
    "add": _of(
        "vectorized_elementwise_kernel",
        _NATIVE + "vectorized_elementwise_kernel<(int)8, at::native::CUDAFunctor_add<c10::BFloat16>, "
        "std::array<char *, (unsigned long)3>>(int, T2, T3)",
        RUNTIME,
    ),
    "fill": _of(
        "vectorized_elementwise_kernel",
        _NATIVE + "vectorized_elementwise_kernel<(int)4, at::native::FillFunctor<int>, "
        "std::array<char *, (unsigned long)1>>(int, T2, T3)",
        RUNTIME,
    ),
    "index": _of(
        "index_elementwise_kernel",
        _NATIVE + "index_elementwise_kernel<(int)128, (int)4, void at::native::gpu_index_kernel<void "
        "at::native::index_put_kernel_impl<at::native::OpaqueType<(int)8>>>>(long, T3)",
        RUNTIME,
    ),
    "tokens": _of("write_req_to_token_pool_triton"),
    "position": _of("compute_position_kernel"),
    "conv": _of("_causal_conv1d_fwd_kernel"),
    "l2norm": _of("l2norm_fwd_kernel"),
    "kda_gate": _of("kda_gate_chunk_cumsum_vector_kernel"),
    "kda_intra": _of("chunk_kda_fwd_kernel_intra_token_parallel"),
    "kda_inter": _of("chunk_kda_fwd_kernel_inter_solve_fused"),
    "kda_wu": _of("_recompute_w_u_fwd_kernel"),
    "kda_h": _of("chunk_gated_delta_rule_fwd_kernel_h_blockdim64"),
    "kda_o": _of("chunk_gla_fwd_kernel_o"),
    "gated_norm": _of("layer_norm_gated_fwd_kernel"),
    "kv_store": _of(
        "set_mla_kv_buffer_kernel",
        "void <unnamed>::set_mla_kv_buffer_kernel<(long)1024, (long)128, (int)8, (bool)1, long>"
        "(<unnamed>::SetMlaKVBufferParams)",
        EXTENDED,
    ),
    "flash": _of(
        "device_kernel",
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<"
        "flash::CollectiveMainloopFwdSm90<(int)2, cute::tuple<cute::C<(int)1>>>>>>(T1::Params)",
        EXTENDED,
    ),
    "mla_gate": _of(
        "mla_output_gate_kernel",
        "void <unnamed>::mla_output_gate_kernel<(int)256, (bool)1>(<unnamed>::MlaOutputGateParams)",
        EXTENDED,
    ),
    "res_score": _of("_score_kernel"),
    "res_combine": _of("_combine_kernel"),
    "situ": _of(
        "situ_and_mul_kernel",
        "void <unnamed>::situ_and_mul_kernel<__nv_bfloat16, (bool)1, (bool)1>(<unnamed>::SituAndMulParams)",
        EXTENDED,
    ),
    "router": _of("_router_triton_kernel"),
    "moe_align": _of(
        "moe_align_block_size_kernel",
        "void moe_align_block_size_kernel<int>(const T1 *, int *, int *, int *, int, int, unsigned long, int *, bool, "
        "bool, int, int)",
        RUNTIME,
    ),
    "moe_gemm": _of("fused_moe_kernel"),
    "moe_sum": _of(
        "moe_sum_reduce_warp_per_token_vec_kernel",
        "void moe_sum_reduce_warp_per_token_vec_kernel<(int)8>(const c10::BFloat16 *, c10::BFloat16 *, long, long, "
        "long, long, long, long, float)",
        RUNTIME,
    ),
    "add3": _of("add3_kernel", "void sglang::add3_kernel<(bool)1, (bool)1>(sglang::Add3Params)", EXTENDED),
    "argmax": _of(
        "reduce_kernel",
        _NATIVE + "reduce_kernel<(int)512, (int)1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>, "
        "unsigned int, long, (int)4, (int)4>>(T3)",
        RUNTIME,
    ),
    "allreduce": _of(
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL" + _NCCL_ARGS
    ),
    "all_gather": _of("ncclDevKernel_AllGather_RING_LL", "ncclDevKernel_AllGather_RING_LL" + _NCCL_ARGS),
    "reduce_scatter": _of(
        "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL" + _NCCL_ARGS
    ),
    "sendrecv": _of("ncclDevKernel_SendRecv", "ncclDevKernel_SendRecv" + _NCCL_ARGS),
    # Not kernels: copies have tables of their own.
    "htod": _of("MEMCPY_HTOD", call=COPY),
    "dtoh": _of("MEMCPY_DTOH", call=COPY),
    "memset": _of("MEMSET", call=SET),
}
SYMBOL_KEYS = tuple(SYMBOLS)
