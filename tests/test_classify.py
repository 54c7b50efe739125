"""Kernel names to roles and categories."""

from __future__ import annotations

import json
import sqlite3
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsysk3.classify import COMM_ROLES, ROLES, Explanation, RuleSet, nccl_op_role
from nsysk3.errors import InputError

RULES = RuleSet.load()
FIXTURES = Path(__file__).parent.parent / "fixtures"
SENDRECV = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<(unsigned long)4096>)"
FLASH = "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<...>>>(...)"

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


def test_shipped_rules_are_well_formed() -> None:
    assert all(rule.role in ROLES for rule in RULES.rules)
    assert all(rule.category.isidentifier() and rule.category.isupper() for rule in RULES.rules)
    assert {rule.role for rule in RULES.rules if rule.category.startswith("FUSED")} == {"fused"}
    assert len({rule.pattern for rule in RULES.rules}) == len(RULES.rules)
    assert set(COMM_ROLES) < set(ROLES)
    assert len(ROLES) == 11


# --- A user's rules ---------------------------------------------------------------------------------------------------


def toml_file(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "my.toml"
    file.write_text(text, encoding="utf-8")
    return file


def json_file(tmp_path: Path, content: object, name: str = "engine.json") -> Path:
    file = tmp_path / name
    file.write_text(json.dumps(content), encoding="utf-8")
    return file


def test_user_rules_go_first(tmp_path: Path) -> None:
    file = toml_file(tmp_path, '[[rule]]\npattern = \'^nvjet_\'\ncategory = "O_PROJ"\nrole = "compute"\n')
    rules = RuleSet.load(file)
    match = rules.match("nvjet_sm90_tst", "nvjet_sm90_tst")
    assert match.category == "O_PROJ"
    assert match.rule is not None
    assert match.rule.source == f"{file} rule 1"
    assert rules.match("fused_moe_kernel", None) == RULES.match("fused_moe_kernel", None)


def test_a_user_rule_on_the_short_name_beats_a_shipped_rule_on_the_demangled_one(tmp_path: Path) -> None:
    file = toml_file(tmp_path, '[[rule]]\npattern = \'^device_kernel$\'\ncategory = "MINE"\nrole = "compute"\n')
    assert RuleSet.load(file).match("device_kernel", FLASH).category == "MINE"


LLAMA = {
    "gemm|nvjet": "gemm",
    "ncclDevKernel|cross_device_reduce|pack_ipc": "nccl_and_custom_ar",
    "CUDA mem": "non-gpu-H_D_memops",
    ".*": "misc",
}


def test_gputrc2graph_categories_and_roles(tmp_path: Path) -> None:
    rules = RuleSet.load(json_file(tmp_path, {"sglang": {"llama": LLAMA}}))

    def verdict(name: str) -> tuple[str, str]:
        match = rules.match(name, None)
        return match.category, match.role

    assert verdict("nvjet_sm90_tst") == ("gemm", "compute")
    assert verdict("ncclDevKernel_AllReduce_Sum_bf16_RING_LL") == ("nccl_and_custom_ar", "allreduce")
    assert verdict(SENDRECV) == ("nccl_and_custom_ar", "p2p")
    assert verdict("ncclDevKernel_Generic") == ("nccl_and_custom_ar", "comm_other")
    assert verdict("pack_ipc_buffers") == ("nccl_and_custom_ar", "comm_other")
    # Not named by the file: the shipped rules answer, or nobody does.
    assert verdict("ncclSymkDevKernel_AllGather_STMC") == ("AG", "all_gather")
    assert verdict("saxpy") == ("UNCLASSIFIED", "compute")


def test_gputrc2graph_cannot_turn_communication_into_compute(tmp_path: Path) -> None:
    rules = RuleSet.load(json_file(tmp_path, {"sglang": {"ds": {"gemm": "gemm", "reduce": "reduce"}}}))
    assert rules.match("void sglang::gemm_ag::gemm_ag_gemv_kernel<...>(...)", None).role == "fused"
    assert rules.match("void vllm::cross_device_reduce_1stage<...>(...)", None).role == "allreduce"


def test_gputrc2graph_drops_catch_alls_with_a_note(tmp_path: Path) -> None:
    catch_alls = dict.fromkeys((".*", "^", ".+", r"\w", "(foo)?", ".{5,}"), "misc")
    rules = RuleSet.load(json_file(tmp_path, {"vllm": {"m": {"gemm": "gemm"} | catch_alls}}))
    assert len(rules.rules) == len(RULES.rules) + 1
    assert len(rules.notes) == len(catch_alls)
    assert "'.*'" in rules.notes[0]


def test_gputrc2graph_takes_all_models_in_order_and_is_known_by_content(tmp_path: Path) -> None:
    content = {"sglang": {"a": {"gemm": "first"}, "b": {"gemm|nvjet": "second"}}, "vllm": {"c": {"moe": "third"}}}
    rules = RuleSet.load(json_file(tmp_path, content, "engine_model.txt"))
    assert [rule.category for rule in rules.rules[:3]] == ["first", "second", "third"]
    assert rules.match("gemm", None).category == "first"
    assert rules.match("nvjet_x", None).category == "second"


# --- Errors -----------------------------------------------------------------------------------------------------------

RULE = '[[rule]]\npattern = \'a\'\ncategory = "A"\nrole = "compute"\n'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[rule]\n", "not valid TOML"),
        ("x = " + "[" * 100_000, "not valid TOML"),
        ("", "[[rule]] tables"),
        ("rule = []\n", "[[rule]] tables"),
        ("rule = 3\n", "[[rule]] tables"),
        (RULE + "[other]\n", "[[rule]] tables"),
        ("rule = [1]\n", "rule 1: must be a [[rule]] table"),
        (RULE + RULE.replace("compute", "computing"), "rule 2: unknown role 'computing'"),
        (RULE + RULE.replace("'a'", "'(a'"), "rule 2: bad regular expression '(a'"),
        (RULE.replace("'a'", "'a{99999999999}'"), "rule 1: bad regular expression"),
        (RULE.replace("'a'", "'" + "(" * 5000 + ")" * 5000 + "'"), "rule 1: bad regular expression"),
        (RULE.replace("'a'", "''"), "rule 1: pattern must be non-empty text"),
        (RULE.replace("'a'", "3"), "rule 1: pattern must be non-empty text"),
        (RULE.replace("pattern = 'a'\n", ""), "rule 1: missing key 'pattern'"),
        (RULE.replace('category = "A"\n', ""), "rule 1: missing key 'category'"),
        (RULE.replace('role = "compute"\n', ""), "rule 1: missing key 'role'"),
        (RULE + "notes = 'x'\n", "rule 1: unknown key 'notes'"),
    ],
)
def test_bad_toml_is_one_clear_line(tmp_path: Path, text: str, says: str) -> None:
    file = toml_file(tmp_path, text)
    with pytest.raises(InputError) as caught:
        RuleSet.load(file)
    assert str(file) in str(caught.value)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"sglang": ', "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "top level"),
        ("{}", "top level"),
        ('{"sglang": {}}', "engine 'sglang'"),
        ('{"sglang": {"llama": []}}', "model 'llama'"),
        ('{"sglang": {"llama": {"gemm": 3}}}', "rule 1:"),
        ('{"sglang": {"llama": {"gemm": "gemm", "": "x"}}}', "rule 2:"),
        ('{"sglang": {"llama": {"gemm": "gemm", "(moe": "moe"}}}', "rule 2: bad regular expression '(moe'"),
    ],
)
def test_bad_json_is_one_clear_line(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "engine.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        RuleSet.load(file)
    assert str(file) in str(caught.value)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"[[rule]]\xff\xfe")
    for file, says in [(binary, "UTF-8"), (tmp_path / "absent.toml", "No such file"), (tmp_path, "directory")]:
        with pytest.raises(InputError, match=says) as caught:
            RuleSet.load(file)
        assert str(file) in str(caught.value)


# --- Explaining -------------------------------------------------------------------------------------------------------


def test_explain_names_the_winner_and_the_rules_it_beat() -> None:
    name = "void sglang::gemm_ag::gemm_ag_gemv_kernel<(int)8>(int)"
    explanation = RULES.explain(name)
    assert isinstance(explanation, Explanation)
    assert explanation.winner is not None
    assert explanation.winner.rule.category == explanation.match.category == "FUSED_GEMV_AG"
    assert RULES.rules[explanation.winner.index - 1] is explanation.winner.rule
    begin, end = explanation.winner.span
    assert name[begin:end] == "gemm_ag_gemv_kernel"
    assert [hit.rule.category for hit in explanation.also] == ["GEMM"]
    text = str(explanation)
    assert "nsysk3 rules.toml rule" in text
    assert explanation.winner.rule.pattern in text.replace("\\\\", "\\")


def test_explain_of_a_name_no_rule_knows() -> None:
    explanation = RULES.explain("saxpy")
    assert explanation.winner is None
    assert explanation.match.category == "UNCLASSIFIED"
    assert "no rule matches" in str(explanation)


def test_explain_says_where_a_role_of_a_json_rule_comes_from(tmp_path: Path) -> None:
    rules = RuleSet.load(json_file(tmp_path, {"sglang": {"llama": LLAMA}}))
    explanation = rules.explain(SENDRECV)
    assert explanation.match == rules.match(SENDRECV, None)
    assert "role p2p" in str(explanation)
    assert "from the shipped rules" in str(explanation)


def test_explain_cannot_be_used_to_write_to_the_terminal() -> None:
    assert "\x1b" not in str(RULES.explain("\x1b[2J gemm"))


# --- NCCL operations by their NVTX name -------------------------------------------------------------------------------


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


# --- Laws -------------------------------------------------------------------------------------------------------------

FRAGMENTS = st.sampled_from(["nccl", "Kernel_", "AllReduce", "void ", "at::native::", "<unnamed>::", "gemm", "<", "_"])
TEXT = st.one_of(st.text(), st.lists(st.one_of(FRAGMENTS, st.text(max_size=5))).map("".join))


@given(short=TEXT, demangled=st.none() | TEXT)
def test_any_name_gets_a_known_role_and_always_the_same(short: str, demangled: str | None) -> None:
    match = RULES.match(short, demangled)
    assert match.role in ROLES
    assert match.category
    assert match == RULES.match(short, demangled)


@given(name=TEXT)
def test_explain_agrees_with_match(name: str) -> None:
    explanation = RULES.explain(name)
    assert explanation.match == RULES.match(name, None)
    assert str(explanation)


@pytest.mark.parametrize(
    "word",
    [
        "a",
        "_",
        "<",
        "void ",
        "nccl",
        "Ep",
        "EpDispatch",
        "mooncake::",
        "mscclpp::",
        "deep_ep::",
        "deep_ep::bucket::",
        "nvshmem",
        "hybrid_ep::",
        "routing",
        "create_",
        "set_",
        "scaled_",
        "triton_red_fused",
        "triton_tem_fused",
        "void at::native::reduce_kernel<",
        "merge_1x1_to_",
        "at::native::elementwise",
        "quantize",
        "11x",
    ],
)
def test_hostile_names_take_no_time(word: str) -> None:
    name = word * (100_000 // len(word))
    started = time.perf_counter()
    RULES.match(name, "void " + name)
    assert time.perf_counter() - started < 0.5


# --- Real traces ------------------------------------------------------------------------------------------------------

KERNEL_TIME = """
    SELECT s.value, d.value, SUM(k.end - k.start) FROM CUPTI_ACTIVITY_KIND_KERNEL k
    LEFT JOIN StringIds s ON s.id = k.shortName LEFT JOIN StringIds d ON d.id = k.demangledName GROUP BY 1, 2
"""


def kernel_time(file: Path) -> list[tuple[str, str | None, int]]:
    """Rows (short name, demangled name, ns in kernels of that name) of a trace; empty if it has no kernel table."""
    connection = sqlite3.connect(f"file:{file}?mode=ro&immutable=1", uri=True)
    try:
        if not connection.execute("PRAGMA table_info(CUPTI_ACTIVITY_KIND_KERNEL)").fetchall():
            return []
        return [(short or "", demangled, ns) for short, demangled, ns in connection.execute(KERNEL_TIME)]
    finally:
        connection.close()


def test_real_traces_are_classified() -> None:
    traces = {file: rows for file in sorted(FIXTURES.glob("**/*.sqlite")) if (rows := kernel_time(file))}
    if not traces:
        pytest.skip(f"no trace with kernels under {FIXTURES}")
    for file, rows in traces.items():
        total = sum(ns for _, _, ns in rows)
        unknown = sum(ns for short, demangled, ns in rows if RULES.match(short, demangled).rule is None)
        assert unknown < 0.01 * total, file
