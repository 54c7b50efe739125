"""The command and the environment of every host."""

from __future__ import annotations

import pytest
from launch_plans import configured, planned

from nsysk3.errors import InputError
from nsysk3.launch.commands import SP_SWITCHES
from nsysk3.launch.plan import make_plan
from nsysk3.launch.record import planned_manifest
from nsysk3.launch.shell import dry_run_text


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
