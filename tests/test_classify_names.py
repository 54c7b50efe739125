"""Names of kernels and of NCCL's calls to roles and categories."""

from __future__ import annotations

import pytest
from exports import FLASH, SENDRECV

from nsysk3.classify import RuleSet, nccl_op_role

RULES = RuleSet.load()

NAMES = [
    ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "AR", "allreduce"),
    ("ncclDevKernel_AllReduce_Sum_bf16_TREE_LL(ncclDevKernelArgsStorage<(unsigned long)4096>)", "AR", "allreduce"),
    (SENDRECV, "SENDRECV", "p2p"),
    ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "AG", "all_gather"),
    ("ncclDevKernel_AllGatherV_RING_LL(...)", "AG", "all_gather"),
    ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(...)", "RS", "reduce_scatter"),
    ("ncclDevKernel_Reduce_Sum_f32_RING_LL(...)", "REDUCE", "comm_other"),
    ("ncclDevKernel_Broadcast_RING_LL(...)", "BCAST", "broadcast"),
    ("ncclDevKernel_Generic(...)", "NCCL_OTHER", "comm_other"),
    ("ncclSymkDevKernel_AllReduce_RSxLDMC_AGxSTMC_sum_bf16(...)", "AR", "allreduce"),
    ("ncclSymkDevKernel_ReduceScatter_LDMC_sum_bf16(...)", "RS", "reduce_scatter"),
    ("ncclSymkDevKernel_AllGather_STMC(...)", "AG", "all_gather"),
    ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*)", "SENDRECV", "p2p"),
    ("ncclKernel_Broadcast_RING_LL_Sum_int8_t(ncclDevComm*)", "BCAST", "broadcast"),
    ("ncclKernel_Reduce_RING_LL_Sum_float(ncclDevComm*)", "REDUCE", "comm_other"),
    ("ncclReduceScatterRingLLKernel_sum_f32(ncclColl)", "RS", "reduce_scatter"),
    (
        "void sglang::sp_collective::reduce_scatter_res_kernel<(unsigned int)8, (bool)1, (bool)1>"
        "(sglang::sp_collective::Params)",
        "FUSED_RS_RES",
        "fused",
    ),
    ("void sglang::sp_collective::reduce_scatter_pull_kernel<(unsigned int)8>(...)", "FUSED_RS_RES", "fused"),
    ("void sglang::sp_collective::all_gather_direct_kernel<(bool)1>(...)", "AG", "all_gather"),
    ("void sglang::sp_collective::all_gather_kernel<(bool)1>(...)", "AG", "all_gather"),
    ("void sglang::attn_res_fused_tma_kernel<...>(...)", "ATTN_RES", "compute"),
    ("void sglang::attn_res_fused_pull_rs_kernel<...>(...)", "FUSED_RS_ATTNRES_NORM", "fused"),
    ("void sglang::attn_res_fused_direct_ag_kernel<...>(...)", "FUSED_ATTNRES_NORM_AG", "fused"),
    ("void sglang::all_reduce_push_res_kernel<...>(...)", "FUSED_AR_RES", "fused"),
    ("void sglang::all_reduce_push_norm_cluster_kernel<...>(...)", "FUSED_AR_NORM", "fused"),
    ("void sglang::all_reduce_pull_norm_kernel<...>(...)", "FUSED_AR_NORM", "fused"),
    (
        "void sglang::all_reduce_1shot_push_kernel<__nv_bfloat16, (unsigned int)2, (bool)1>(...)",
        "AR",
        "allreduce",
    ),
    ("void sglang::moe_finalize_all_reduce_kernel<...>(...)", "FUSED_MOEFINALIZE_AR", "fused"),
    ("void sglang::gemm_ag::gemm_ag_gemv_kernel<...>(...)", "FUSED_GEMV_AG", "fused"),
    ("void sglang::gemm_ag::spin_add3_kernel<...>(...)", "FUSED_AGWAIT_ADD3", "fused"),
    ("void sglang::nvlink_push_kernel<...>(...)", "AG", "all_gather"),
    ("sglang::memcpy_kernel(void*, const void*, unsigned int)", "COMM_STAGING", "copy"),
    ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, (int)2>(...)", "AR", "allreduce"),
    (
        "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<...>(...)",
        "FUSED_AR_NORM",
        "fused",
    ),
    (
        "void deep_ep::legacy::intranode::dispatch<(int)8, (int)768, (int)8192>(...)",
        "A2A_DISPATCH",
        "all_to_all",
    ),
    ("void deep_ep::intranode::notify_dispatch<(int)8>(...)", "A2A_DISPATCH", "all_to_all"),
    ("void deep_ep::internode_ll::combine<...>(...)", "A2A_COMBINE", "all_to_all"),
    ("void deep_ep::elastic::hybrid_dispatch_impl<(bool)1>(ncclDevComm, void *)", "A2A_DISPATCH", "all_to_all"),
    ("void deep_ep::elastic::dispatch_copy_epilogue_impl<(bool)1>(void *)", "A2A_LAYOUT", "compute"),
    ("void deep_ep::pp::pp_send_impl<(int)4>(ncclDevComm, ncclWindow_vidmem *)", "P2P", "p2p"),
    ("void deep_ep::intranode::barrier<(int)8>(int **, int)", "BARRIER", "barrier"),
    ("void <unnamed>::multimem_all_reduce_kernel<c10::BFloat16, (int)16>(...)", "AR", "allreduce"),
    ("void barrier_on_stream_kernel_threadgroup<(threadgroup_t)2>(int, int)", "BARRIER", "barrier"),
    ("void deep_gemm::sm100_fp8_fp4_mega_moe_impl<...>(...)", "FUSED_A2A_GEMM", "fused"),
    ("void deep_gemm::mega_moe_pre_dispatch_kernel<(int)128>(...)", "A2A_LAYOUT", "compute"),
    ("_rs_attn_res_kernel", "FUSED_RS_ATTNRES_NORM", "fused"),
    ("void k3::rs_attn_res<(int)2, (int)15, (bool)0, (int)1>(k3::Params)", "FUSED_RS_ATTNRES_NORM", "fused"),
    ("_gemm_rs_push_kernel", "FUSED_GEMM_RS", "fused"),
    ("_attn_res_ag_kernel", "FUSED_ATTNRES_NORM_AG", "fused"),
    ("_attn_res_kernel", "ATTN_RES", "compute"),
    ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "GEMM", "compute"),
    ("chunk_kda_fwd_kernel_inter_solve_fused", "KDA", "compute"),
    ("_causal_conv1d_fwd_kernel", "KDA_CONV", "compute"),
    (FLASH, "MLA_ATTN", "compute"),
    ("void flash::prepare_varlen_num_blocks_kernel<(int)1, (bool)1>(int, int)", "SCHED_META", "compute"),
    ("fused_moe_kernel", "MOE_GEMM", "compute"),
    ("void marlin_moe_wna16::Marlin<(long)1125899906909960>(...)", "MOE_GEMM", "compute"),
    ("void deep_gemm::sm90_fp8_gemm_1d2d_impl<(deep_gemm::GemmType)1>(...)", "MOE_GEMM", "compute"),
    ("void deep_gemm::sm90_fp8_gemm_1d2d_impl<(deep_gemm::GemmType)0>(...)", "GEMM", "compute"),
    ("void sglang::situ_and_mul_kernel<...>(...)", "MOE_ACT", "compute"),
    ("_score_kernel", "ATTN_RES", "compute"),
    ("void flashinfer::norm::RMSNormKernel<(unsigned int)8, __nv_bfloat16>(...)", "NORM", "compute"),
    ("triton_red_fused__to_copy_mean_pow_rsqrt_3", "NORM", "compute"),
    ("triton_red_fused_sum_1", "REDUCTION", "compute"),
    ("triton_poi_fused_add_0", "ELEMENTWISE", "compute"),
    ("void per_token_group_quant_8bit_kernel<c10::BFloat16>(...)", "QUANT", "compute"),
    ("_vocab_parallel_embedding_kernel", "EMBED", "compute"),
    ("void vllm::rotary_embedding_kernel<c10::BFloat16, (bool)1>(...)", "ROPE", "compute"),
    ("create_flashinfer_kv_indices_triton", "SCHED_META", "compute"),
    (
        "void at::native::vectorized_elementwise_kernel<(int)4, at::native::FillFunctor<float>>(...)",
        "ELEMENTWISE",
        "compute",
    ),
    # The operation in the template arguments of a generic kernel must not decide.
    ("void at::native::elementwise_kernel<(int)4, at::native::softmax_kernel::lambda>(...)", "ELEMENTWISE", "compute"),
    ("void at::native::reduce_kernel<(int)512, at::native::ArgMaxOps<float>>(T3)", "SAMPLING", "compute"),
    # Other libraries' kernels take NCCL's types; their names decide, not their arguments.
    ("void tool::pack<ncclDevKernel_AllReduce_tag>(ncclDevComm, ncclKernel_AllReduce_args)", "UNCLASSIFIED", "compute"),
    ("saxpy(double *, double *, int)", "UNCLASSIFIED", "compute"),
]


@pytest.mark.parametrize(("name", "category", "role"), NAMES)
def test_known_names(name: str, category: str, role: str) -> None:
    match = RULES.match("", name)
    assert (match.category, match.role) == (category, role)


@pytest.mark.parametrize(
    "name",
    [
        "ncclAllReduceRingLLKernel_sum_f32(ncclColl)",
        "ncclKernel_AllReduce_RING_LL_Sum_half",
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL",
        "ncclSymDevKernel_AllReduce_AGxLL_R_Sum_bf16",
        "ncclSymkDevKernel_AllReduce_RSxLD_AGxST_Sum_bf16",
        "void ncclDevKernel_AllReduce_Sum_bf16_RING_LL<int>(int)",
    ],
)
def test_every_nccl_generation_is_an_allreduce(name: str) -> None:
    assert RULES.match(name, None).role == "allreduce"


def test_the_demangled_name_decides_where_the_short_one_cannot() -> None:
    assert RULES.match("device_kernel", FLASH).category == "MLA_ATTN"
    assert RULES.match("device_kernel", None).category == "UNCLASSIFIED"


def test_the_short_name_is_the_fallback() -> None:
    assert RULES.match("cross_device_reduce_2stage", None).role == "allreduce"
    assert RULES.match("cross_device_reduce_2stage", "[unknown]").role == "allreduce"


def test_no_rule_is_unclassified_compute() -> None:
    match = RULES.match("[unknown]", None)
    assert (match.role, match.category, match.rule) == ("compute", "UNCLASSIFIED", None)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ncclAllReduce", ("allreduce", "AR")),
        ("ncclAllGather", ("all_gather", "AG")),
        ("ncclAllGatherV", ("all_gather", "AG")),
        ("ncclReduceScatter", ("reduce_scatter", "RS")),
        ("ncclAlltoAll", ("all_to_all", "ALLTOALL")),
        ("ncclSend", ("p2p", "SENDRECV")),
        ("ncclRecv", ("p2p", "SENDRECV")),
        ("ncclBroadcast", ("broadcast", "BCAST")),
        ("ncclReduce", ("comm_other", "REDUCE")),
        ("ncclGather", ("comm_other", "GATHER")),
        ("ncclScatter", ("comm_other", "SCATTER")),
        ("ncclGroupStart", None),
        ("ncclCommInitRank", None),
        ("", None),
    ],
)
def test_nccl_operations(name: str, expected: tuple[str, str] | None) -> None:
    assert nccl_op_role(name) == expected
