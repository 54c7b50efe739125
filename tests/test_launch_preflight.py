"""Preflight: what is asked of hosts, and what the answers mean for a plan."""

from __future__ import annotations

import ast
import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import sshd
from loopback import free_port
from rich.console import Console

from nsysk3.errors import MissingToolError
from nsysk3.launch import probe
from nsysk3.launch.checks import GIB, Check
from nsysk3.launch.judge import differences, judge, judge_clock
from nsysk3.launch.open_hosts import open_hosts
from nsysk3.launch.plan import Plan, make_plan
from nsysk3.launch.preflight import Preflight, preflight, questions
from nsysk3.launch.preflight_table import print_preflight
from nsysk3.run.config import Settings

HELP = "--trace-fork-before-exec= --capture-range-end= --cuda-graph-trace= --cpuctxsw="


class Machine:
    """A folder of tools in front of PATH that say what a test wants them to say."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = folder / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text(json.dumps({"num_hidden_layers": 8, "num_attention_heads": 8}))
        (self.model / "m-1.safetensors").write_bytes(b"x" * 1000)
        self.gpus()
        self.tool("nsys", f'[ "$1" = --version ] && echo "NVIDIA Nsight Systems version 2025.3.1.90" || echo "{HELP}"')
        self.python()

    def tool(self, name: str, body: str) -> None:
        path = self.folder / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    def gpus(self, count: int = 2, used: int = 3, total: int = 85_651, processes: str = "") -> None:
        rows = "\n".join(f"{index}, GPU-{index}, RTX 6000D, {total}, {used}, 580.65" for index in range(count))
        self.tool("nvidia-smi", f"case $1 in --query-gpu*) cat <<E\n{rows}\nE\n;; *) cat <<E\n{processes}\nE\n;; esac")

    def python(self, sglang: str | None = "0.5.23", nsysk3: str | None = "0.1.0", plugin: int = 0) -> None:
        """The server's Python, as far as preflight asks it."""
        packages = {"sglang": sglang, "torch": "2.14.1", "nsysk3": nsysk3, "nvtx": None, "transformers": None}
        said = json.dumps({"python": "3.12.3", "packages": packages})
        self.tool("serverpython", f"case $1 in -c) echo '{said}';; *) echo 'x: no such class'; exit {plugin};; esac")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    tools = tmp_path / "tools"
    tools.mkdir()
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return Machine(tools)


def planned(machine: Machine, *args: str, hosts: tuple[str, ...] = ("alpha",), pp: int = 2, **sections: Any) -> Plan:
    document: dict[str, Any] = {
        "cluster": {"hosts": list(hosts), "launcher": "local", "address": "127.0.0.1", "port": free_port(),
                    "scratch": str(machine.folder), "python": sys.executable},
        "model": {"path": str(machine.model)},
        "server": {"python": str(machine.folder / "serverpython")},
    }  # fmt: skip
    for section, values in sections.items():
        document[section] = {**document.get(section, {}), **values}
    tp = 2 * len(hosts) // pp
    return make_plan(Settings.model_validate(document), pp=pp, tp=tp, run_id="r1", extra_args=args)


def looked(plan: Plan) -> Preflight:
    with open_hosts(plan.settings, plan.run_id, [node.host for node in plan.nodes]) as hosts:
        return preflight(plan, hosts)


def level(found: Preflight, name: str) -> str:
    levels = ["ok", "note", "warning", "fatal"]
    return max((check.level for check in found.checks if check.name == name), key=levels.index)


# --- on hosts


def test_a_host_that_has_all(machine: Machine) -> None:
    plan = planned(machine)
    found = looked(plan)
    assert found.problems == ()
    found.raise_if_fatal()
    texts = {check.name: check.text for check in found.checks}
    assert (texts["nsys"], texts["GPUs"], texts["driver"]) == ("2025.3.1.90", "2 idle", "580.65")
    assert texts["server"] == "sglang 0.5.23"
    assert found.versions()["gpu"] == "RTX 6000D"
    assert found.versions()["sglang"] == "0.5.23"
    assert [clock.host for clock in found.clocks] == ["alpha"]
    # It is this very machine: no offset beyond what the round trip leaves open.
    assert abs(found.clocks[0].offset_ns) <= found.clocks[0].uncertainty_ns
    assert not any(Path(machine.folder).glob("nsysk3-*"))  # nothing is left there


FAULTS: dict[str, tuple[Any, str, str, str]] = {
    "no-nsys": (lambda m: (m.folder / "nsys").write_text("x"), "nsys", "fatal", "nsys"),
    "old-nsys": (lambda m: m.tool("nsys", "echo 2020.1.1 --cpuctxsw"), "nsys", "fatal", "--cuda-graph-trace"),
    "no-gpu": (lambda m: m.tool("nvidia-smi", "echo no driver >&2; exit 9"), "GPUs", "fatal", "no driver"),
    "few-gpus": (lambda m: m.gpus(1), "GPUs", "fatal", "1 GPU, but the plan needs 2"),
    "busy-gpus": (
        lambda m: m.gpus(used=4000, processes="GPU-1, 77, trainer, 4000"), "GPUs", "fatal", "trainer (pid 77)",
    ),
    "mixed-gpus": (lambda m: m.tool("nvidia-smi", "echo '0, G0, A, 9, 0, 5'; echo '1, G1, B, 9, 0, 5'"),
                   "GPUs", "warning", "A, B"),
    "no-model": (lambda m: (m.model / "config.json").unlink(), "model", "fatal", "config.json"),
    "no-weights": (lambda m: (m.model / "m-1.safetensors").unlink(), "model", "fatal", "dummy"),
    "half-model": (
        lambda m: (m.model / "model.safetensors.index.json").write_text('{"weight_map": {"w": "m-2.safetensors"}}'),
        "model", "fatal", "m-2.safetensors",
    ),
    "no-sglang": (lambda m: m.python(sglang=None), "server", "fatal", "has no sglang"),
    "no-python": (lambda m: (m.folder / "serverpython").unlink(), "server", "fatal", "not found"),
    "no-plugin": (lambda m: m.python(nsysk3=None), "server", "warning", "there are no markers"),
    "odd-sglang": (lambda m: m.python(plugin=1), "server", "warning", "no such class"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_with_a_host_is_said_with_the_way_out(fault: str, machine: Machine) -> None:
    change, name, wanted, words = FAULTS[fault]
    plan = planned(machine)
    change(machine)
    found = looked(plan)
    assert level(found, name) == wanted
    problem = next(check for check in found.problems if check.name == name)
    assert problem.problem is not None
    assert words in problem.problem
    assert "\n" not in problem.problem
    if wanted == "fatal":
        with pytest.raises(MissingToolError, match="alpha"):
            found.raise_if_fatal()
    else:
        found.raise_if_fatal()


def test_a_port_that_is_taken(machine: Machine) -> None:
    with closing(socket.socket()) as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        plan = planned(machine, cluster={"port": other.getsockname()[1]})
        found = looked(plan)
    (problem,) = found.problems
    assert (problem.name, problem.level) == ("ports", "fatal")
    assert "cluster.port" in (problem.problem or "")


def test_devices_and_interfaces_that_are_not_there(machine: Machine) -> None:
    plan = planned(machine, env={"NCCL_IB_HCA": "mlx99_0,mlx99_1"}, cluster={"interface": "bond99"})
    problems = {check.name: check.problem or "" for check in looked(plan).problems if check.level == "fatal"}
    assert set(problems) == {"RDMA", "network"}
    assert "mlx99_0, mlx99_1" in problems["RDMA"]
    assert "no interface bond99" in problems["network"]
    assert level(looked(planned(machine, cluster={"interface": "lo"})), "network") == "ok"


def test_every_problem_of_every_host_is_shown_at_once(machine: Machine) -> None:
    plan = planned(machine, hosts=("alpha", "beta", "gamma"), pp=3, cluster={"interface": "bond99"})
    machine.python(sglang=None)
    found = looked(plan)
    fatal = [(check.host, check.name) for check in found.problems if check.level == "fatal"]
    assert sorted(fatal) == sorted((host, name) for host in ("alpha", "beta", "gamma") for name in ("server", "network")
                                   for _ in range(1 + (name == "network")))  # fmt: skip
    with pytest.raises(MissingToolError, match="8 more, above"):
        found.raise_if_fatal()
    out = StringIO()
    print_preflight(found, Console(file=out, width=100))
    text = out.getvalue()
    header, *rows = text.splitlines()
    assert header.split() == ["alpha", "beta", "gamma"]
    assert {"nsys", "GPUs", "server", "network", "clock"} <= {row.split(" ")[0] for row in rows}
    assert text.count("fatal: ") == 9
    assert {check.host for check in found.checks if check.name == "clock"} == {"alpha", "beta", "gamma"}
    assert {check.host for check in found.checks if check.name == "ports"} == {"alpha"}  # only the first listens


def test_four_hosts_are_asked_through_ssh(machine: Machine, tmp_path: Path) -> None:
    machine.python(sglang=None)
    with sshd.hosts(tmp_path) as there:
        cluster = {"hosts": list(there.names), "launcher": "ssh", "ssh_options": list(there.options)}
        server = {"engine": "torch", "python": str(machine.folder / "serverpython")}
        path = {"path": str(machine.folder / "nsys")}  # the PATH of a session on a host is not ours
        args = ("--device", "cpu", "--scale", "small")  # which every machine has the memory for
        plan = planned(machine, *args, hosts=there.names, pp=8, cluster=cluster, server=server, nsys=path)
        found = looked(plan)
    assert [check for check in found.problems if check.level == "fatal"] == []
    assert tuple(found.answers) == there.names
    assert {(check.host, check.text) for check in found.checks if check.name == "nsys"} == {
        (name, "2025.3.1.90") for name in there.names
    }
    assert [clock.host for clock in found.clocks] == list(there.names)
    assert all(abs(clock.offset_ns) <= clock.uncertainty_ns for clock in found.clocks)  # they are this machine


def test_an_address_that_nobody_knows(machine: Machine) -> None:
    found = looked(planned(machine, cluster={"address": "no-such-host.invalid"}))
    (problem,) = found.problems
    assert "cluster.address" in (problem.problem or "")


def test_in_a_container_the_container_is_asked(machine: Machine) -> None:
    """A program that runs what follows the image, as docker would, with tools that the host lacks."""
    inside = machine.folder / "inside"
    inside.mkdir()
    for tool in ("nsys", "serverpython"):
        (machine.folder / tool).rename(inside / tool)
    (inside / "python3").symlink_to(sys.executable)
    inspected = json.dumps([{"Id": "sha256:abc", "RepoDigests": ["r@sha256:def"]}])
    run = f'while [ "$1" != img:1 ]; do shift; done; shift; PATH={inside}:$PATH exec "$@"'
    machine.tool("docker", f"case $1 in --version) echo Docker 28;; image) echo '{inspected}';; *) {run};; esac")
    container = {"cli": "docker", "image": "img:1", "digest": "sha256:def"}
    plan = planned(machine, container=container, server={"python": "python3"})
    found = looked(plan)
    assert found.answers["alpha"]["nsys"]["path"] == str(inside / "nsys")
    assert (level(found, "nsys"), level(found, "model"), level(found, "image")) == ("ok", "ok", "ok")
    assert found.versions()["image_digest"] == "sha256:abc"
    other = planned(machine, container={**container, "digest": "sha256:other"}, server={"python": "python3"})
    assert level(looked(other), "image") == "fatal"
    machine.tool("docker", '[ "$1" = --version ] && echo Docker 28 || { echo "no such image" >&2; exit 1; }')
    fatal = {check.name: check.problem or "" for check in looked(plan).problems if check.level == "fatal"}
    assert {"image", "nsys", "model"} <= set(fatal)
    assert "load or pull it" in fatal["image"]


# --- the probe itself


def test_the_probe_runs_on_old_pythons_and_needs_nothing() -> None:
    source = Path(probe.__file__).read_text("utf-8")
    tree = ast.parse(source, feature_version=(3, 8))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in imported} <= set(sys.stdlib_module_names)


def test_a_tool_that_hangs_is_given_up(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_TIMEOUT_S", 0.2)
    machine.tool("nvidia-smi", "exec sleep 600")
    assert "no answer" in probe.answer({"gpus": None})["gpus"]["error"]


def test_an_answer_that_breaks_hides_no_other(machine: Machine) -> None:
    machine.tool("nvidia-smi", "printf '\\377\\376 garbage, a, b, c, d, e\\n'")
    found = probe.answer({"gpus": None, "no_such_question": 1, "disk": "/no/such/folder/at/all"})
    assert found["gpus"]["gpus"][0]["index"] is None
    assert "error" in found["no_such_question"]
    assert found["disk"]["free"] > 0  # of what is there above it


# --- what answers mean


@contextmanager
def answers(machine: Machine, plan: Plan) -> Iterator[dict[str, Any]]:
    """What a good host answers, to be changed."""
    asked = questions(plan, plan.nodes[0])
    found = probe.answer({**asked[0], **asked[1]})
    found["infiniband"] = {"devices": {f"mlx5_{n}": {"1": {"state": "ACTIVE", "gid": "::ffff:1"}} for n in range(4)}}
    found["verbs"] = {"nodes": ["uverbs0"]}
    found["memory"] = {"shm": 32 * GIB, "memlock": None}
    yield found


def verdicts(plan: Plan, found: dict[str, Any], name: str) -> list[tuple[str, str]]:
    return [(each.level, each.problem or "") for each in judge(plan, plan.nodes[0], found) if each.name == name]


@pytest.mark.parametrize(
    ("hca", "change", "wanted", "words"),
    [
        ("mlx5_0,mlx5_3", {}, "ok", ""),
        ("mlx5", {}, "ok", ""),
        ("=mlx5", {}, "fatal", "names mlx5"),
        ("mlx5_0:1,mlx5_9:1", {}, "fatal", "names mlx5_9"),
        ("^mlx5_9", {}, None, ""),
        ("mlx5_0", {"verbs": {"nodes": []}}, "fatal", "uverbs"),
        ("mlx5_0", {"memory": {"shm": 32 * GIB, "memlock": 65536}}, "warning", "locked memory"),
        (
            "mlx5_0",
            {"infiniband": {"devices": {"mlx5_0": {"1": {"state": "DOWN", "gid": "::1"}}}}},
            "fatal",
            "no active",
        ),
        (
            "mlx5_0",
            {"infiniband": {"devices": {"mlx5_0": {"1": {"state": "ACTIVE", "gid": "0000:0000:0000:0000"}}}}},
            "fatal",
            "NCCL_IB_GID_INDEX=3 is empty",
        ),
    ],
)
def test_rdma(hca: str, change: dict[str, Any], wanted: str | None, words: str, machine: Machine) -> None:
    plan = planned(machine, env={"NCCL_IB_HCA": hca, "NCCL_IB_GID_INDEX": "3"})
    with answers(machine, plan) as found:
        said = verdicts(plan, {**found, **change}, "RDMA")
    assert [each for each in said if each[0] == wanted and words in each[1]] or (wanted is None and not said)


@pytest.mark.parametrize(
    ("total_mib", "share", "wanted"), [(80_000, None, "ok"), (900, None, "fatal"), (4000, "0.2", "fatal")]
)
def test_weights_that_do_not_fit(total_mib: int, share: str | None, wanted: str, machine: Machine) -> None:
    config = {"num_hidden_layers": 8, "num_attention_heads": 8, "hidden_size": 64, "vocab_size": 128,
              "intermediate_size": 64}  # fmt: skip
    machine.gpus(total=total_mib)
    (machine.model / "config.json").write_text(json.dumps(config))
    with (machine.model / "m-1.safetensors").open("wb") as file:
        file.truncate(2 * 1100 * 2**20)  # a hole: 1.1 GiB a GPU
    plan = planned(machine, *(["--mem-fraction-static", share] if share else []))
    assert max(plan.gpu_bytes) / 2**20 == pytest.approx(1100, rel=0.1)
    with answers(machine, plan) as found:
        worst = [each for each in verdicts(plan, found, "GPUs") if each[0] == "fatal"]
    assert bool(worst) == (wanted == "fatal")
    assert all("of weights on each GPU" in each[1] for each in worst)


def test_gpus_are_counted_as_the_server_counts_them(machine: Machine) -> None:
    machine.gpus(4)
    plan = planned(machine, env={"CUDA_VISIBLE_DEVICES": "3,GPU-2"})
    with answers(machine, plan) as found:
        for gpu in found["gpus"]["gpus"][:2]:
            gpu["used_mib"] = 50_000
        assert [each[0] for each in verdicts(plan, found, "GPUs")] == ["ok"]
        found["gpus"]["gpus"][3]["used_mib"] = 50_000
        (busy,) = verdicts(plan, found, "GPUs")
        assert "GPU 3 in use" in busy[1]
        one = planned(machine, env={"CUDA_VISIBLE_DEVICES": "3"})
        assert verdicts(one, found, "GPUs")[0][0] == "fatal"


def test_little_room_is_said(machine: Machine) -> None:
    plan = planned(machine)
    with answers(machine, plan) as found:
        for free, wanted in ((100 * GIB, "ok"), (10 * GIB, "warning"), (GIB, "fatal")):
            found["disk"]["free"] = free
            assert verdicts(plan, found, "disk")[0][0] == wanted
        found["disk"]["writable"] = False
        assert verdicts(plan, found, "disk")[0][0] == "fatal"
        found["disk"]["folder"] = str(machine.folder.parent)  # the nearest that is there
        assert "make it" in str(verdicts(plan, found, "disk"))
        found["memory"]["shm"] = 64 * 2**20  # docker's default
        assert verdicts(plan, found, "shm")[0][0] == "warning"


def test_hosts_that_differ(machine: Machine) -> None:
    plan = planned(machine)
    with answers(machine, plan) as one, answers(machine, plan) as two:
        assert list(differences({"a": one, "b": two})) == []
        two["gpus"]["driver"] = "550.1"
        two["packages"]["packages"]["sglang"] = "0.5.17"
        names = {check.name for check in differences({"a": one, "b": two})}
    assert names == {"driver", "sglang"}


def test_a_clock_that_is_not_known_well_is_said() -> None:
    assert judge_clock("a", 10**12, 10**5).level == "ok"  # far off and well known is fine
    assert judge_clock("a", 0, 10**8).level == "warning"


def test_the_table_shows_the_worst_of_each_cell() -> None:
    checks = (Check("a", "GPUs", "ok", "8 idle"), Check("a", "GPUs", "warning", "mixed", "different GPUs"))
    out = StringIO()
    print_preflight(Preflight(checks, {"a": {}}, ()), Console(file=out, width=80))
    assert "mixed !" in out.getvalue()
    assert "8 idle" not in out.getvalue()
    assert "warning: a: different GPUs" in out.getvalue()
