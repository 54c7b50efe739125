"""Who runs what where: ranks on hosts, layers on stages, weights on GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launch_plans import configured, planned

from nsysk3.errors import InputError
from nsysk3.launch.model import model_facts, read_model
from nsysk3.launch.plan import make_plan
from nsysk3.launch.topology import default_ep, place_ranks, stage_layers

K3 = {
    "num_hidden_layers": 93, "hidden_size": 7168, "vocab_size": 163840, "num_attention_heads": 96, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts": 896,
    "moe_intermediate_size": 3072, "routed_expert_hidden_size": 3584, "num_shared_experts": 2,
    "first_k_dense_replace": 1, "intermediate_size": 18432, "quantization_config": {"quant_method": "mxfp4"},
    "linear_attn_config": {"num_heads": 96, "head_dim": 128, "kda_layers": [n for n in range(1, 93) if n % 4]},
}  # fmt: skip


# --- topology


@given(st.integers(1, 6), st.integers(1, 12), st.integers(1, 16), st.integers(1, 16))
def test_a_layout_is_placed_whole_or_refused(nodes: int, pp: int, tp: int, ep: int) -> None:
    hosts = [f"n{number}" for number in range(nodes)]
    possible = pp * tp % nodes == 0 and (pp % nodes == 0 or nodes % pp == 0) and tp % ep == 0
    if not possible:
        with pytest.raises(InputError):
            place_ranks(hosts, pp, tp, ep)
        return
    placed = place_ranks(hosts, pp, tp, ep)
    ranks = [rank for node in placed for rank in node]
    # Every rank is somewhere once, and every host uses its first GPUs, each for one rank.
    assert [rank.world_rank for rank in ranks] == list(range(pp * tp))
    for host, node in zip(hosts, placed, strict=True):
        assert {rank.host for rank in node} == {host}
        assert sorted(rank.device for rank in node) == list(range(pp * tp // nodes))
    for stage in range(pp):
        group = [rank for rank in ranks if rank.pp == stage]
        assert [rank.world_rank for rank in group] == list(range(stage * tp, stage * tp + tp))
        assert [rank.tp for rank in group] == list(range(tp))
        assert [rank.ep for rank in group] == sorted(rank.ep or 0 for rank in group)
        assert all(sum(rank.ep == one for rank in group) == tp // ep for one in range(ep))
        # A stage needs no more hosts than its size does.
        assert len({rank.host for rank in group}) == max(nodes // pp, 1)


@pytest.mark.parametrize(
    ("pp", "tp", "ep", "first_host", "stage_hosts"),
    [
        (1, 32, 4, [(0, gpu) for gpu in range(8)], 4),
        (2, 16, 4, [(0, gpu) for gpu in range(8)], 2),
        (4, 8, 4, [(0, gpu) for gpu in range(8)], 1),
        (8, 4, 4, [(gpu // 4, gpu % 4) for gpu in range(8)], 1),
        (16, 2, 2, [(gpu // 2, gpu % 2) for gpu in range(8)], 1),
    ],
)
def test_the_published_layouts(pp: int, tp: int, ep: int, first_host: list[tuple[int, int]], stage_hosts: int) -> None:
    plan = planned(pp)
    assert (plan.tp, plan.ep) == (tp, ep)
    assert [(rank.pp, rank.tp) for rank in plan.nodes[0].ranks] == first_host
    assert [rank.device for rank in plan.nodes[0].ranks] == list(range(8))
    assert len({rank.host for rank in plan.ranks if rank.pp == 0}) == stage_hosts


@given(st.integers(1, 32))
def test_the_default_ep_divides_tp(tp: int) -> None:
    assert tp % default_ep(tp) == 0
    assert default_ep(tp) == min(4, tp) or tp % min(4, tp)


@given(st.integers(1, 200), st.integers(1, 24))
def test_stages_share_the_layers(layers: int, pp: int) -> None:
    if layers < pp:
        with pytest.raises(InputError, match="layers"):
            stage_layers(layers, pp)
        return
    stages = stage_layers(layers, pp)
    assert [layer for stage in stages for layer in stage] == list(range(layers))
    sizes = [len(stage) for stage in stages]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes)  # the larger ones are the last
    assert stage_layers(layers, pp, ",".join(map(str, reversed(sizes))))[0] == range(sizes[-1])


def test_the_layers_of_k3() -> None:
    assert [len(stage) for stage in stage_layers(93, 8)] == [11, 11, 11, 12, 12, 12, 12, 12]


@pytest.mark.parametrize("partition", ["11,11", "x", "", "0,93", "-1,94", "46,48"])
def test_a_partition_that_does_not_fit_is_refused(partition: str) -> None:
    with pytest.raises(InputError, match="SGLANG_PP_LAYER_PARTITION"):
        stage_layers(93, 2, partition)


# --- the model


@given(st.integers(1, 93), st.integers(1, 16))
def test_the_weights_of_the_stages_are_those_of_the_model(pp: int, tp: int) -> None:
    total = 1_500 * 10**9
    facts = model_facts("k3", K3, total)
    assert abs(sum(facts.gpu_bytes(stage_layers(93, pp), tp)) * tp - total) <= pp * tp


def test_weights_are_computed_from_the_sizes_where_there_are_no_files() -> None:
    dense = {"num_hidden_layers": 2, "hidden_size": 8, "vocab_size": 100, "num_attention_heads": 2,
             "num_key_value_heads": 1, "head_dim": 4, "intermediate_size": 16}  # fmt: skip
    layer = 2 * (8 * 4 * (2 * 2 + 2 * 1) + 3 * 8 * 16)
    assert model_facts("m", dense, None).gpu_bytes(stage_layers(2, 2), 1) == (layer + 1600, layer + 1600)
    unknown = {**dense, "quantization_config": {"quant_method": "something new"}}
    assert model_facts("m", unknown, None).gpu_bytes(stage_layers(2, 2), 1) == ()


KEYS = st.sampled_from([*sorted(K3), "text_config", "kda_layers", "head_dim", "num_heads"])
ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(KEYS, ODD))
def test_an_odd_config_is_no_reason_to_fail(config: dict[str, Any]) -> None:
    facts = model_facts("m", {**K3, **config}, None)
    assert all(0 <= size < float("inf") for size in facts.layer_bytes)


def test_a_model_that_cannot_be_split_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": K3}))
    (tmp_path / "model-1.safetensors").write_bytes(b"x" * 1000)
    facts = read_model(tmp_path)
    assert facts is not None
    assert (facts.layers, facts.heads, facts.experts, facts.weight_bytes) == (93, (96,), 896, 1000)
    model = {"path": str(tmp_path)}
    assert len(planned(8, model=model).layers) == 8
    for pp, tp, ep, words in (
        (1, 64, 4, "96 attention heads"),
        (1, 36, 9, "96 attention heads"),
        (128, 1, 1, "93 layers"),
        (1, 6, 6, "896 experts"),
        (1, 32, 1, None),
    ):
        free = configured(model=model, cluster={"hosts": ["n1"], "gpus_per_host": None})
        if words is None:
            assert make_plan(free, pp=pp, tp=tp, ep=ep, run_id="r").model == facts
        else:
            with pytest.raises(InputError, match=words):
                make_plan(free, pp=pp, tp=tp, ep=ep, run_id="r")
