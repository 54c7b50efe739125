"""What holds for any name: it gets a role, it is explained, it takes no time; and for real traces."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from conftest import FIXTURES
from growth import growth
from hypothesis import given
from hypothesis import strategies as st

from nsysk3.classify import ROLES, Explanation, RuleSet

RULES = RuleSet.load()


# --- Explaining


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


def test_explain_cannot_be_used_to_write_to_the_terminal() -> None:
    assert "\x1b" not in str(RULES.explain("\x1b[2J gemm"))


# --- Laws


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
    def match(length: int) -> None:
        name = word * (length // len(word))
        RULES.match(name, "void " + name)

    assert growth(match, 300, times=300) < 60  # 4,096 characters count: 14 in one sweep, 190 where it goes back


# --- Real traces


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
