"""Files of rules: the shipped one, a user's in TOML or as gputrc2graph has them, and what is wrong with others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from exports import FLASH, SENDRECV

from nsysk3.classify import COMM_ROLES, ROLES, RuleSet
from nsysk3.errors import InputError

RULES = RuleSet.load()


def toml_file(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "my.toml"
    file.write_text(text, encoding="utf-8")
    return file


def json_file(tmp_path: Path, content: object, name: str = "engine.json") -> Path:
    file = tmp_path / name
    file.write_text(json.dumps(content), encoding="utf-8")
    return file


def test_shipped_rules_are_well_formed() -> None:
    assert all(rule.role in ROLES for rule in RULES.rules)
    assert all(rule.category.isidentifier() and rule.category.isupper() for rule in RULES.rules)
    assert {rule.role for rule in RULES.rules if rule.category.startswith("FUSED")} == {"fused"}
    assert len({rule.pattern for rule in RULES.rules}) == len(RULES.rules)
    assert set(COMM_ROLES) < set(ROLES)
    assert len(ROLES) == 11


# --- A user's rules


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


def test_explain_says_where_a_role_of_a_json_rule_comes_from(tmp_path: Path) -> None:
    rules = RuleSet.load(json_file(tmp_path, {"sglang": {"llama": LLAMA}}))
    explanation = rules.explain(SENDRECV)
    assert explanation.match == rules.match(SENDRECV, None)
    assert "role p2p" in str(explanation)
    assert "from the shipped rules" in str(explanation)


# --- Errors


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
