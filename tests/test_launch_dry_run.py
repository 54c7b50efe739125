"""What is printed to be run by hand, and written down, is what is run."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

from command import run
from hypothesis import given, settings
from hypothesis import strategies as st
from launch_plans import EXAMPLES, planned

from nsysk3.launch.record import planned_manifest
from nsysk3.launch.shell import command_text, dry_run_text
from nsysk3.run.manifest import read_manifest, write_manifest
from nsysk3.run.redact import redact_argv

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
