"""Plans: who runs what where, what is refused before anything starts, and what is printed to be run by hand."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from command import run
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from nsysk3.errors import InputError
from nsysk3.launch.commands import SP_SWITCHES
from nsysk3.launch.model import model_facts, read_model
from nsysk3.launch.plan import Plan, make_plan
from nsysk3.launch.record import planned_manifest
from nsysk3.launch.shell import command_text, dry_run_text
from nsysk3.launch.topology import default_ep, place_ranks, stage_layers
from nsysk3.run.config import Settings, load_settings
from nsysk3.run.manifest import read_manifest, write_manifest
from nsysk3.run.redact import redact_argv

EXAMPLES = ROOT / "nsysk3" / "launch" / "examples"
K3 = {
    "num_hidden_layers": 93, "hidden_size": 7168, "vocab_size": 163840, "num_attention_heads": 96, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts": 896,
    "moe_intermediate_size": 3072, "routed_expert_hidden_size": 3584, "num_shared_experts": 2,
    "first_k_dense_replace": 1, "intermediate_size": 18432, "quantization_config": {"quant_method": "mxfp4"},
    "linear_attn_config": {"num_heads": 96, "head_dim": 128, "kda_layers": [n for n in range(1, 93) if n % 4]},
}  # fmt: skip


def configured(**sections: Any) -> Settings:
    """Settings of four hosts with eight GPUs each, and what a test changes in them."""
    document: dict[str, Any] = {
        "cluster": {"hosts": ["n1", "n2", "n3", "n4"], "gpus_per_host": 8}, "model": {"path": "/models/k3"},
    }  # fmt: skip
    for section, values in sections.items():
        document[section] = {**document.get(section, {}), **values}
    return Settings.model_validate(document)


def planned(pp: int = 8, *args: str, **sections: Any) -> Plan:
    return make_plan(configured(**sections), pp=pp, run_id="r1", extra_args=args)


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


# --- the commands


def option(argv: tuple[str, ...], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_every_host_runs_its_own_command() -> None:
    plan = planned(8, "--moe-runner-backend", "marlin", env={"NCCL_DEBUG": "WARN"}, cluster={"interface": "bond0"})
    for number, node in enumerate(plan.nodes):
        assert option(node.argv, "--node-rank") == str(number)
        assert option(node.argv, "--dist-init-addr") == "n1:20000"
        assert [option(node.argv, f"--{name}-size") for name in ("pp", "tp", "ep")] == ["8", "4", "4"]
        assert node.argv[-2:] == ("--moe-runner-backend", "marlin")
        assert node.argv[:2] == ("nsys", "profile")
        assert option(node.argv, "-o") == node.report == f"{node.scratch}/trace"
        assert node.argv[len(node.argv) - len(node.server_argv) :] == node.server_argv
        assert node.env["NCCL_DEBUG"] == "WARN"
        assert node.env["GLOO_SOCKET_IFNAME"] == node.env["NCCL_SOCKET_IFNAME"] == "bond0"
        assert node.env["TMPDIR"] == node.scratch  # nothing of it is left in /tmp
    assert len({node.scratch for node in plan.nodes}) == 4
    assert (plan.url, plan.steps) == ("http://n1:30000", 16 + 2 * 8)
    assert plan.expected["moe_runner_backend"] == "marlin"
    assert plan.expected["pp_size"] == 8


def test_without_the_profiler_the_same_server_runs() -> None:
    with_it = planned(8)
    without = make_plan(with_it.settings, pp=8, run_id="r1", profiled=False)
    assert [node.argv for node in without.nodes] == [node.server_argv for node in with_it.nodes]
    assert {node.report for node in without.nodes} == {None}
    assert "start_profile" not in dry_run_text(without)


def test_without_gpus_there_is_no_capture_range() -> None:
    """Nothing calls cudaProfilerStart there: a capture that waits for it would stay empty."""
    ranged = "--capture-range=cudaProfilerApi"
    assert all(ranged in node.argv for node in planned(8, server={"engine": "torch"}).nodes)
    for node in planned(8, "--device", "cpu", server={"engine": "torch"}).nodes:
        assert ranged not in node.argv
        assert option(node.argv, "-o") == node.report


def test_one_machine_listens_to_itself_only() -> None:
    plan = make_plan(configured(cluster={"hosts": ["localhost"], "gpus_per_host": 2}), pp=2, run_id="r1")
    assert option(plan.nodes[0].argv, "--host") == "127.0.0.1"
    assert "--dist-init-addr" not in plan.nodes[0].argv
    assert plan.url == "http://127.0.0.1:30000"
    named = configured(cluster={"hosts": ["me@n1"], "gpus_per_host": 2, "address": "fd00::1"})
    assert make_plan(named, pp=2, run_id="r1").url == "http://[fd00::1]:30000"


@pytest.mark.parametrize(
    ("sp", "values", "torch"), [("off", "000", "off"), ("sglang", "110", "nccl"), ("nsysk3", "111", "nsysk3")]
)
def test_sequence_parallelism_is_switched_in_the_environment(sp: str, values: str, torch: str) -> None:
    plan = planned(8, server={"sp": sp})
    env = plan.nodes[0].env
    assert "".join(env[name] for name in SP_SWITCHES) == values
    assert any("fell back" in note for note in plan.notes) == (sp != "off")
    features = {feature.name: feature.requested for feature in planned_manifest(plan).features or ()}
    assert ("NSYSK3_SP" in features) == (sp == "nsysk3")
    own = planned(8, server={"sp": sp, "engine": "torch"})
    assert option(own.nodes[0].argv, "--sp") == torch
    assert not any(name.startswith("SGLANG") for name in own.nodes[0].env)
    spread = planned(8, "--moe-a2a-backend", "deepep", server={"sp": sp})
    assert not any("fell back" in note for note in spread.notes)


def test_an_all_to_all_backend_makes_ep_equal_to_tp() -> None:
    plan = planned(4, "--moe-a2a-backend=deepep")
    assert (plan.tp, plan.ep, plan.expected["ep_size"]) == (8, 8, 8)
    with pytest.raises(InputError, match="leave --ep out"):
        make_plan(configured(), pp=4, ep=4, run_id="r1", extra_args=["--moe-a2a-backend", "deepep"])


def test_nsys_options_of_the_user_replace_ours() -> None:
    plan = planned(8, nsys={"options": ["--trace=cuda,nvtx,osrt", "--sample", "process-tree"], "path": "/opt/nsys"})
    argv = plan.nodes[0].argv
    assert argv[0] == "/opt/nsys"
    assert "-t" not in argv
    assert "-s" not in argv
    assert "--trace=cuda,nvtx,osrt" in argv


def test_a_container_gets_environment_names_and_the_model() -> None:
    container = {"cli": "docker", "image": "img:1", "options": ["--gpus", "all"]}
    plan = planned(8, container=container, env={"HF_TOKEN": "hf_secret"})
    for node in plan.nodes:
        assert node.argv[:2] == ("docker", "run")
        assert node.container == f"nsysk3-r1-{node.node_rank}"
        assert f"--name={node.container}" in node.argv
        assert "--label=nsysk3.run=r1" in node.argv
        assert {f"--env={name}" for name in node.env} <= set(node.argv)
        assert "/models/k3:/models/k3:ro" in node.argv
        assert option(node.argv, "--network") == "host"
        assert node.argv.index("img:1") < node.argv.index("nsys")
        assert not any("hf_secret" in word for word in node.argv)  # a command line is for all to see
        assert node.env["HF_TOKEN"] == "hf_secret"
    own = {**container, "options": ["--network=none", "-v", "/data/k3:/models/k3"]}
    argv = planned(8, container=own).nodes[0].argv
    assert "--network" not in argv
    assert "/models/k3:/models/k3:ro" not in argv


# --- what is printed


WORDS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12)


def shell_words(script: str) -> list[list[str]]:
    """The commands that bash would run for a script, each as the words it would get."""
    tell = (
        "for each in env curl mkdir cd; do eval \"$each() { printf '%s\\\\0' $each \\\"\\$@\\\" $'\\\\n'; }\"; done\n"
    )
    done = subprocess.run(["bash", "-c", tell + script], capture_output=True, check=True)
    return [line.strip("\0").split("\0") for line in done.stdout.decode().split("\n\0") if line]


@settings(max_examples=25, deadline=None)
@given(st.lists(WORDS.map(lambda text: f"--x{text}"), max_size=4), st.dictionaries(st.sampled_from("ABCD"), WORDS))
def test_what_is_printed_is_what_is_run(args: list[str], env: dict[str, str]) -> None:
    plan = planned(8, *redact_argv(args), env=env)
    commands = shell_words(dry_run_text(plan))
    runs = [command for command in commands if command[0] == "env"]
    assert len(runs) == len(plan.nodes)
    for node, words in zip(plan.nodes, runs, strict=True):
        pairs = {f"{name}={value}" for name, value in node.env.items()}
        assert set(words[1 : 1 + len(pairs)]) == pairs
        assert tuple(words[1 + len(pairs) :]) == node.argv
        # The same without a shell, as a script would read command.txt.
        split = shlex.split(command_text(node).replace("\\\n", ""))
        assert tuple(split[-len(node.argv) :]) == node.argv
    assert [command[0] for command in commands[-1:]] == ["curl"]
    assert json.loads(commands[-1][-1]) == {"activities": ["CUDA_PROFILER"], "num_steps": plan.steps}


def test_secrets_are_in_no_text(tmp_path: Path) -> None:
    plan = planned(
        8, "--api-key", "s3cr3t-a", "--model-config=token=s3cr3t-b", "--proxy", "http://me:s3cr3t-c@proxy:80",
        env={"HF_TOKEN": "s3cr3t-d", "AWS_SECRET_ACCESS_KEY": "s3cr3t-e", "NCCL_DEBUG": "INFO"},
        container={"cli": "docker", "image": "i", "options": ["-e", "DB_PASSWORD=s3cr3t-f"]},
    )  # fmt: skip
    write_manifest(tmp_path, planned_manifest(plan))
    text = dry_run_text(plan) + (tmp_path / "run.json").read_text()
    assert "s3cr3t" not in text
    assert "INFO" in text
    assert "s3cr3t-a" in plan.nodes[0].argv  # but the server gets it


def test_the_manifest_of_a_plan_is_read_again(tmp_path: Path) -> None:
    plan = planned(8)
    write_manifest(tmp_path, planned_manifest(plan))
    found = read_manifest(tmp_path)
    assert found == planned_manifest(plan)
    assert found is not None
    assert found.topology is not None
    assert (found.status, found.topology.pp, tuple(found.ranks)) == ("planned", 8, plan.ranks)


def test_the_example_prints_what_one_would_run_by_hand() -> None:
    ran = run("profile", "--config", EXAMPLES / "kimi-k3-6000d.toml", "--pp", 8, "--dry-run")
    assert (ran.code, ran.err) == (0, "")
    assert run("profile", "--config", "kimi-k3-6000d", "--pp", 8, "--dry-run").code == 0  # found by its name
    assert subprocess.run(["bash", "-n"], input=ran.out, text=True, check=False).returncode == 0
    commands = [words for words in shell_words(ran.out) if words[0] == "env"]
    assert len(commands) == 4
    for number, words in enumerate(commands):
        environment = dict(word.split("=", 1) for word in words[1 : words.index("docker")])
        assert environment["NCCL_SOCKET_IFNAME"] == environment["GLOO_SOCKET_IFNAME"] == "bond0"
        assert environment["NCCL_IB_HCA"] == "mlx5_0,mlx5_1,mlx5_2,mlx5_3"
        assert environment["NCCL_IB_GID_INDEX"] == "3"
        assert {f"--env={name}" for name in environment} <= set(words)
        text = " ".join(words)
        for wanted in (
            "python3 -m sglang.launch_server", "--model-path /data/hf_models/Kimi-K3", "--tp-size 4", "--pp-size 8",
            "--ep-size 4", "--nnodes 4", f"--node-rank {number}", "--dist-init-addr 192.0.2.1:20000",
            "--moe-runner-backend flashinfer_mxfp4", "--chunked-prefill-size 8192", "--mem-fraction-static 0.88",
            "--disable-radix-cache", "--device /dev/infiniband", "--capture-range=cudaProfilerApi",
        ):  # fmt: skip
            assert wanted in text
    assert "pp-max-micro-batch-size" not in ran.out
    assert "node4" in ran.out


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_example_can_be_planned(path: Path) -> None:
    example = load_settings(path, environ={})
    for pp in (1, 2):
        assert make_plan(example, pp=pp, run_id="r").pp == pp


# --- what one should know


def test_a_micro_batch_of_one_is_warned_about_loudly() -> None:
    queue = planned(4, "--pp-max-micro-batch-size", "1", load={"concurrency": 16})
    (warning,) = queue.warnings
    assert "at most 4 run and 12 wait" in warning
    ran = run("profile", "--config", "kimi-k3-6000d", "--pp", 8, "--dry-run", "--", "--pp-max-micro-batch-size", 1)
    assert "# WARNING: --pp-max-micro-batch-size 1" in ran.out
    assert planned(4, load={"concurrency": 16}).warnings == ()
    assert planned(1, "--pp-max-micro-batch-size", "1").warnings == ()


def test_deep_pipelines_get_advice_and_no_options() -> None:
    (note,) = [note for note in planned(16).notes if "watchdog" in note]
    assert "--disable-decode-cuda-graph" in note
    assert "--watchdog-timeout" not in planned(16).nodes[0].argv
    told = planned(16, "--disable-decode-cuda-graph", "--watchdog-timeout", "3600")
    assert not any("watchdog" in note for note in told.notes)
    assert not any("watchdog" in note for note in planned(8).notes)


@given(st.integers(1, 64), st.integers(1, 200), st.integers(1, 100_000), st.integers(1, 20_000))
def test_a_load_is_long_enough_for_its_window(concurrency: int, forwards: int, length: int, chunk: int) -> None:
    load = {"concurrency": concurrency, "input_len": length, "chunk": chunk}
    plan = planned(8, load=load, window={"forwards": forwards})
    assert plan.requests >= 5 * concurrency
    assert plan.requests * -(-length // chunk) >= plan.steps
    assert plan.warnings == ()


def test_a_load_that_is_too_short_is_warned_about() -> None:
    assert any("end short" in warning for warning in planned(8, load={"requests": 4}).warnings)


# --- settings


def test_the_command_line_wins_over_the_environment_over_the_file(tmp_path: Path) -> None:
    given_to = {"load.chunk": (1, 2, 3), "cluster.hosts": (["a"], ["b", "c"], ["d"]), "model.path": ("x", "y", "z"),
                "window.overhead": ("off", "server", "load"), "nsys.path": ("1", "2", "3"),
                "server.args": (["--a"], ["--b", "c d"], ["--e"]), "server.markers": (False, False, True)}  # fmt: skip
    for dotted, (in_file, in_environment, on_command_line) in given_to.items():
        section, name = dotted.split(".")

        def value(found: Settings, section: str = section, name: str = name) -> object:
            return getattr(getattr(found, section), name)

        path = tmp_path / "nsysk3.toml"
        path.write_text(f"[{section}]\n{name} = {json.dumps(in_file)}\n")
        text = shlex.join(in_environment) if isinstance(in_environment, list) else str(in_environment)
        environ = {f"NSYSK3_{section}_{name}".upper(): text}
        assert value(load_settings(path, environ={})) == in_file
        assert value(load_settings(path, environ=environ)) == in_environment
        assert value(load_settings(path, environ=environ, overrides={dotted: on_command_line})) == on_command_line
        assert value(load_settings(path, environ=environ, overrides={dotted: None})) == in_environment
        assert value(load_settings(None, environ={**environ, "NSYSK3_CONFIG": str(path)})) == in_environment


def test_the_file_is_found_where_one_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_settings(environ={}) == Settings()
    (tmp_path / "nsysk3.toml").write_text("[load]\nchunk = 77\n")
    assert load_settings(environ={}).load.chunk == 77
    assert load_settings(environ={"NSYSK3_NSYS": "/opt/nsys"}).nsys.path == "/opt/nsys"


def leaves() -> list[str]:
    """Every setting by its dotted name."""
    found = []
    for section, field in Settings.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found += [f"{section}.{name}" for name in kind.model_fields]
        else:
            found.append(section)
    return found


def test_every_setting_is_documented() -> None:
    text = (ROOT / "docs" / "launching.md").read_text("utf-8")
    assert [name for name in leaves() if f"`{name}`" not in text] == []
    shown = [line.split("`")[1] for line in text.splitlines() if line.startswith("| `") and "." in line.split("`")[1]]
    assert [name for name in shown if name not in leaves()] == []


def test_every_option_is_documented() -> None:
    text = (ROOT / "docs" / "launching.md").read_text("utf-8")
    for command in ("profile", "cleanup"):
        words = run(command, "--help").out.split()
        options = {word.strip("[],.:") for word in words if word.startswith("--")} - {"--", "--help"}
        assert sorted(name for name in options if name not in text) == []


# --- refusals

TOML = """
[cluster]
hosts = ["n1", "n2", "n3", "n4"]
gpus_per_host = 8
[model]
path = "/models/k3"
"""


@pytest.mark.parametrize(
    ("arguments", "changes", "words"),
    [
        ("--pp 3", "", "does not divide the 32 GPUs"),
        ("--pp 0", "", "--pp 0"),
        ("--pp 8 --tp 8", "", "PP 8 x TP 8 = 64 GPUs"),
        ("--pp 8 --ep 3", "", "try --ep 4"),
        ("--pp 8 --ep 0", "", "--ep 0"),
        ("--pp 3 --tp 4 --hosts n1,n2", "[cluster]\n[model]\npath = '/m'", "one of the two numbers must divide"),
        ("--pp 8 --chunk 8191 -- --page-size 64", "", "multiple of --page-size 64"),
        ("--pp 8 -- --page-size x", "", "whole number"),
        ("--pp 8 -- --tp-size 4", "", "use --tp"),
        ("--pp 8 -- --model-path=/other", "", "use --model"),
        ("--pp 8 stray", "", "unexpected argument 'stray'"),
        ("--pp 8 --hosts n1,n1", "", "n1 is there twice"),
        ("--pp 8 --hosts -oProxyCommand=x", "", "no name of a host"),
        ("--pp 8 --hosts /nowhere/hosts", "", "no such file"),
        ("--pp 8 --hosts ,", "", "names no host"),
        ("--pp 8 --container-cli docker", "", "container.image is not"),
        ("--pp 8 --image x", "", "container.cli is not"),
        ("--pp 8 --input-len 0", "", "load.input_len"),
        ("--pp 8 --config /nowhere.toml", "", "cannot be read"),
        ("--pp 8 --hosts n1,n2", "[model]\npath = '/m'", "give --tp"),
        ("--pp 8", "[cluster]\ngpus_per_host = 8", "no model"),
        ("--pp 8", "[cluster]\nhots = []", "cluster.hots: no such setting"),
        ("--pp 8", "[cluster]\nport = 'x'", "cluster.port"),
        ("--pp 8", "[server]\nengine = 'vllm'", "server.engine"),
        ("--pp 8", "cluster = 3", "cluster"),
        ("--pp 8", "[cluster", "not TOML"),
        ("--pp 8", TOML + "[env]\nSGLANG_PLUGINS = 'other'", "keeps nsysk3's plugin out"),
        ("--pp 8", TOML + "[env]\nSGLANG_K3_SP_COLLECTIVE = '1'", "use --sp"),
        ("--pp 8", TOML + "[env]\nNSYSK3_MARKERS = '0'", "use server.markers"),
        ("--pp 8", TOML + "[nsys]\noptions = ['-o', 'x']", "is nsysk3's to set"),
        ("--pp 8", TOML.replace("8\n", "8\nport = 20000\n"), "are both 20000"),
        ("--pp 8", TOML.replace("8\n", "8\nscratch = 'here'\n"), "cluster.scratch"),
        ("--pp 8", TOML.replace("8\n", "8\npython = ''\n"), "cluster.python"),
        ("--pp 8", TOML + "[env]\n'A=B' = '1'", "env.A=B"),
        ("--pp 8", TOML + '[env]\nA = "a\\u0000b"', "env.A: value error, holds a NUL"),
        ("--pp 8", TOML + '[server]\nargs = ["a\\u0000b"]', "server.args.0"),
        ("--pp 8", TOML + "[server]\nstart_timeout_s = inf", "server.start_timeout_s"),
        ("--pp 8", TOML + "[container]\ndigest = 'abc'", "container.digest"),
        ("--pp 1000000 --tp 1", "[cluster]\n[model]\npath = '/m'", "are more"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_in_one_line(
    arguments: str, changes: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nsysk3.toml").write_text(changes or TOML)
    options, _, server = arguments.partition(" -- ")
    ran = run("profile", *options.split(), "--dry-run", *(["--", *server.split()] if server else []))
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert ran.err.startswith("nsysk3: ")
    assert words in ran.err


def test_a_misspelt_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSYSK3_LOAD_CHNK", "1")
    ran = run("profile", "--pp", 1, "--dry-run")
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert "NSYSK3_LOAD_CHNK" in ran.err


def test_a_value_that_may_be_secret_is_not_repeated(tmp_path: Path) -> None:
    path = tmp_path / "nsysk3.toml"
    path.write_text("[env]\nHF_TOKEN = 123456789\n")
    with pytest.raises(InputError) as caught:
        load_settings(path, environ={})
    assert "123456789" not in str(caught.value)


def test_a_run_directory_is_never_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nsysk3.toml").write_text(TOML)
    for content in ("run.json", "other"):
        folder = tmp_path / content.split(".")[0]
        folder.mkdir()
        (folder / content).write_text("{}")
        ran = run("profile", "--pp", 8, "--out", folder)
        assert (ran.code, ran.err.count("\n")) == (2, 1)
        assert "give another --out" in ran.err


def test_hosts_are_read_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nsysk3.toml").write_text(TOML)
    (tmp_path / "hosts").write_text("# all\nalpha slots=8\n\n  beta\ngamma # old\ndelta\n")
    ran = run("profile", "--pp", 8, "--dry-run", "--hosts", "hosts")
    assert [line.split(":")[0] for line in ran.out.splitlines() if "node rank" in line] == [
        "# alpha", "# beta", "# gamma", "# delta",
    ]  # fmt: skip


# --- where the analysis is not installed


def test_a_plan_needs_little(tmp_path: Path) -> None:
    """Hosts that only launch have neither polars nor plotly."""
    blocked = ("polars", "plotly", "sqlalchemy", "adbc_driver_sqlite", "pandas", "pyarrow", "numpy", "jinja2", "torch")
    script = (
        f"import sys\nfor name in {blocked!r}: sys.modules[name] = None\n"
        "sys.argv = ['nsysk3', 'profile', '--config', 'kimi-k3-6000d', '--pp', '8', '--dry-run']\n"
        "import nsysk3.launch.preflight, nsysk3.launch.preflight_table\n"
        "from nsysk3.cli import main; main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("sglang.launch_server") == 4


def test_examples_say_nothing_that_settings_do_not_know() -> None:
    for path in EXAMPLES.glob("*.toml"):
        Settings.model_validate(tomllib.loads(path.read_text("utf-8")))
