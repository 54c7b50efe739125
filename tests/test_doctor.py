"""The doctor: what it finds on machines that have all, that lack one thing, and that cannot be reached."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import sshd
from command import run
from rich.console import Console

from nsysk3.doctor.examine import examine
from nsysk3.doctor.extras import EXTRAS, why_no_kernels
from nsysk3.doctor.here import look_here
from nsysk3.doctor.lines import HERE, Ability, Diagnosis, Line
from nsysk3.doctor.terminal import print_diagnosis
from nsysk3.run.config import Settings

NSYS = """case "$1 $2" in
--version*) echo "NVIDIA Nsight Systems version {version}.1.90";;
"profile --help") echo "--trace-fork-before-exec= --capture-range-end= --cuda-graph-trace= --cpuctxsw=";;
"export --help") echo "{export}";;
"recipe --help") echo "The following built-in recipes are available:";;
esac"""
GPUS = """case $1 in
*compute_cap*) echo 9.0; echo 9.0;;
--query-gpu*) for i in 0 1; do echo "$i, GPU-$i, NVIDIA H200, 143771, 3, 580.65"; done;;
esac"""
PYTHON = """case "$1 $2" in
-m*) echo "SGLang {sglang}: 9 hooks, all found"; exit {plugin};;
*nvidia-nccl*) echo "{nccl}";;
*cuda_build*) echo '{{"nvcc": "/usr/bin/nvcc", "built": false}}';;
*) echo '{packages}';;
esac"""


class Machine:
    """A folder of tools, all that PATH has besides a shell, that say what a test wants them to say."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "c.toml"
        for name in ("sh", "env", "cat", "sleep"):
            (folder / name).symlink_to(str(shutil.which(name, path=os.defpath)))
        self.nsys()
        self.tool("nvidia-smi", GPUS)
        self.python()
        self.settings()

    def tool(self, name: str, body: str) -> None:
        path = self.folder / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    def nsys(self, version: str = "2026.1", export: str = "--include-blobs parquetdir") -> None:
        self.tool("nsys", NSYS.format(version=version, export=export))

    def python(self, *, sglang: str | None = "0.5.23", nccl: str = "nvidia-nccl-cu12 2.27.5", plugin: int = 0) -> None:
        packages = {"sglang": sglang, "torch": "2.9.1", "nsysk3": "0.1.0"}
        said = json.dumps({"python": "3.12.3", "packages": packages})
        self.tool("serverpython", PYTHON.format(sglang=sglang, plugin=plugin, nccl=nccl, packages=said))

    def settings(self, more: str = "", cluster: str = 'hosts = ["localhost"]') -> None:
        model = self.folder / "model"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text('{"num_hidden_layers": 8, "num_attention_heads": 8}')
        (model / "m-1.safetensors").write_bytes(b"x" * 1000)
        self.config.write_text(
            f'[cluster]\nscratch = "{self.folder}"\nport = 0\npython = "{sys.executable}"\n{cluster}\n'
            f'[model]\npath = "{model}"\n[server]\npython = "{self.folder}/serverpython"\n{more}\n'.replace(
                "port = 0", f"port = {_free_port()}"
            )
        )

    def examine(self) -> Diagnosis:
        return examine(self.config, None, lambda _: None)


def _free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    tools = tmp_path / "tools"
    tools.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tools))
    for name in ("NSYSK3_NSYS", "NSYSK3_CONFIG", "CUDA_VISIBLE_DEVICES", "NCCL_NVTX_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    return Machine(tools)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing every library is looked at by tests of its own."""
    monkeypatch.setattr("nsysk3.doctor.here._packages", lambda: Line(HERE, "packages", "ok", "all"))


def line(found: Diagnosis, name: str) -> Line:
    return next(each for each in found.lines if each.name == name)


def works(found: Diagnosis) -> dict[str, bool | None]:
    return {each.name: each.works for each in found.abilities}


# --- a whole machine


def test_a_machine_that_has_all(machine: Machine) -> None:
    ran = run("doctor", "--config", machine.config, "--json")
    assert ran.code == 0, ran.out
    document = json.loads(ran.out)
    lines = {each["name"]: each for each in document["lines"]}
    assert {each["state"] for each in lines.values()} <= {"ok", "warning"}
    assert lines["packages"]["where"] is None
    assert lines["nsys export"]["text"].endswith("NCCL payloads, parquetdir, recipes")
    assert (lines["GPUs"]["text"], lines["driver"]["text"]) == ("2 idle", "580.65")
    assert lines["SGLang hooks"]["text"] == "SGLang 0.5.23: 9 hooks, all found"
    assert lines["NCCL NVTX"]["text"] == "NCCL 2.27.5: communicators, ranks, sizes, peers"
    abilities = {each["name"]: (each["works"], each["text"]) for each in document["abilities"]}
    assert abilities["profile here"] == (True, "such as --pp 1 --tp 2")
    assert [name for name, (able, _) in abilities.items() if able is not True] == ["profile on hosts"]
    assert document["failed"] == []


@pytest.mark.usefixtures("machine")
def test_a_machine_that_has_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading exports needs nothing besides: exit code 0, every line with its state, nothing but the report on it."""
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setenv("PATH", str(empty))
    monkeypatch.setenv("COLUMNS", "80")
    ran = run("doctor")
    assert (ran.code, ran.err) == (0, "")
    assert [text for text in ran.out.splitlines() if len(text) > 80] == []
    for name in ("export", "profile here", "sweep", "kernels"):
        assert f"no   {name} " in ran.out
    assert "yes  analyze " in ran.out
    assert "install Nsight Systems" in ran.out


FAULTS: dict[str, tuple[Any, str, str, str, set[str]]] = {
    # name: what is done to the machine, the line that tells, its state, words of it, what no longer works
    "no-nsys": (lambda m: (m.folder / "nsys").unlink(), "nsys export", "cannot", "NSYSK3_NSYS",
                {"export", "profile here"}),
    "old-nsys": (lambda m: m.nsys("2022.4", "sqlite"), "nsys export", "warning", "no NCCL payloads", set()),
    "no-gpu": (lambda m: (m.folder / "nvidia-smi").unlink(), "GPUs", "cannot", "nvidia-smi",
               {"profile here", "sweep", "kernels"}),
    "busy-gpu": (lambda m: m.tool("nvidia-smi", GPUS.replace(", 3, 580", ", 9000, 580")), "GPUs", "cannot", "9,000 MiB",
                 {"profile here", "sweep"}),
    "other-gpu": (lambda m: m.tool("nvidia-smi", GPUS.replace("9.0", "12.0")), "kernels", "ok", "12.0", {"kernels"}),
    "no-sglang": (lambda m: m.python(sglang=None), "server", "cannot", "has no sglang", {"profile here", "sweep"}),
    "odd-sglang": (lambda m: m.python(plugin=1), "server", "ok", "0.5.23", set()),
    "old-nccl": (lambda m: m.python(nccl="nvidia-nccl-cu12 2.21.5"), "NCCL NVTX", "warning", "2.25 or newer", set()),
    "no-model": (lambda m: m.settings() or (m.folder / "model" / "config.json").unlink(), "model", "cannot",
                 "config.json", {"profile here", "sweep"}),
    "odd-settings": (lambda m: m.settings('[container]\ncli = "docker"'), "settings", "ok", "c.toml",
                     {"profile here", "sweep"}),
}  # fmt: skip


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_lacking_is_said_with_the_way_out_and_what_it_forbids(fault: str, machine: Machine) -> None:
    change, name, state, words, lost = FAULTS[fault]
    change(machine)
    found = machine.examine()
    told = line(found, name)
    assert told.state == state
    assert words in told.text + (told.fix or "")
    assert {name for name, able in works(found).items() if able is False} == lost
    assert bool(found.failed) == ("profile here" in lost)  # --config was asked for
    assert all("\n" not in each.text for each in (*found.lines, *found.abilities))


@pytest.mark.usefixtures("quick")
def test_settings_that_are_wrong_hide_nothing_else(machine: Machine) -> None:
    machine.config.write_text("[server]\nengin = 'torch'\n")
    found = machine.examine()
    assert line(found, "settings").state == "cannot"
    assert "did you mean server.engine?" in line(found, "settings").text
    assert "cluster.python" in line(found, "probe").text  # of the defaults, where PATH has no python3
    (machine.folder / "python3").symlink_to(sys.executable)
    found = machine.examine()
    assert line(found, "GPUs").text == "2 idle"
    assert "engin" in found.failed[0]
    found = examine(None, None, lambda _: None)  # nothing was asked for by name
    assert found.failed == ()


@pytest.mark.usefixtures("quick", "machine")
def test_hosts_that_are_no_hosts_are_a_wrong_argument() -> None:
    ran = run("doctor", "--hosts", ",")
    assert (ran.code, ran.out) == (2, "")


@pytest.mark.usefixtures("quick")
def test_this_python_is_offered_where_it_has_what_the_servers_lacks(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    machine.python(sglang=None)
    assert line(machine.examine(), "server").fix == f"set server.python to {sys.executable}, which has it"


# --- libraries


@pytest.mark.parametrize(
    ("body", "words", "fix"),
    [
        ("raise ModuleNotFoundError('no', name='polars')", "missing: polars", "pip install 'polars>="),
        ("raise ImportError('libx.so: cannot open')", "libx.so: cannot open", "pip install 'polars>="),
        (f"import os; os.kill(os.getpid(), {int(signal.SIGILL)})", "importing polars ends Python (SIGILL)", "rtcompat"),
    ],
)
def test_a_library_that_does_not_import(
    body: str, words: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "polars.py").write_text(body)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    told = next(iter(look_here()))
    assert (told.name, told.state) == ("packages", "cannot")
    assert words in told.text
    assert fix in (told.fix or "")


# --- hosts


@pytest.mark.usefixtures("quick")
def test_hosts_are_reached_and_each_says_its_own(machine: Machine, tmp_path: Path) -> None:
    system = os.defpath + ":/usr/sbin"
    os.environ["PATH"] += f":{system}"
    with sshd.hosts(tmp_path, 2) as there:
        names = [*there.names, "no-such-host.invalid"]
        machine.settings(cluster=f"hosts = {names}\nssh_options = {list(there.options)}")
        found = machine.examine()
        text = run("doctor", "--config", machine.config)
        shut = run("doctor", "--hosts", "no-such-host.invalid", "-q")
    reached = {each.where: each.state for each in found.lines if each.name == "reach"}
    assert reached == {there.names[0]: "ok", there.names[1]: "ok", "no-such-host.invalid": "cannot"}
    clocks = {each.where: each.text for each in found.lines if each.name == "clock"}
    assert set(clocks) == set(there.names)
    assert all("±" in each for each in clocks.values())
    assert all(abs(clock.offset_ns) <= clock.uncertainty_ns for clock in found.clocks)  # they are this machine
    assert {each.where for each in found.lines if each.name == "server"} == set(there.names)
    assert works(found)["profile on hosts"] is False
    assert found.failed == (f"profile on {', '.join(names)}",)
    assert text.code == shut.code == 3
    assert "reach failed (no-such-host.invalid)" in " ".join(text.out.split())
    assert text.out.count("0.5.23") <= 2  # said once of both: the server, and its hooks
    assert "Traceback" not in text.err + shut.err


def test_equal_lines_of_hosts_are_shown_once() -> None:
    hosts = [f"node{number}" for number in range(16)]
    lines = [Line(host, "reach", "cannot", f"no route to {host}", f"`ssh {host} true`") for host in hosts]
    lines += [Line(host, "driver", "ok", "580" if host != "node7" else "570") for host in hosts]
    found = Diagnosis((Line(HERE, "nsysk3", "ok", "0.1"), *lines), (Ability("analyze", True, "all"),))
    out = StringIO()
    print_diagnosis(found, Console(file=out, width=80))
    text = out.getvalue()
    assert text.count("no route to HOST") == 1
    assert "`ssh HOST true`" in text
    assert "node7: 570" in text
    assert max(map(len, text.splitlines())) <= 80


def test_what_hosts_say_cannot_move_the_cursor() -> None:
    found = Diagnosis((Line("a", "reach", "cannot", "\x1b[2Jgone [bold]x[/]"),), (Ability("export", None, "\x1b[31m"),))
    out = StringIO()
    print_diagnosis(found, Console(file=out, width=80))
    assert "\x1b" not in out.getvalue()
    assert "[bold]x[/]" in out.getvalue()


# --- what answers mean

ANSWERS: dict[str, Any] = {
    "nsys": {"version": "2026.1", "lacks": []},
    "nsys_features": {"blobs": True, "parquetdir": True, "recipes": False},
    "packages": {"packages": {"torch": "2.9.1", "nsysk3": "0.1.0", "sglang": "0.5.23"}},
    "permissions": {"paranoid": 4, "counters_for_admin_only": True, "powers": False},
    "nccl": {"version": "2.27.5", "from": "wheel", "off": False},
    "kernels": {"nvcc": "/usr/bin/nvcc", "built": False, "capable": ["9.0", "9.0"]},
    "containers": {"found": {"docker": {"version": "28.0"}}},
}


def said(name: str, settings: dict[str, Any] | None = None, **changes: dict[str, Any]) -> Line | None:
    answers = {**ANSWERS, **{key: {**ANSWERS[key], **change} for key, change in changes.items()}}
    lines = [each for extra in EXTRAS for each in extra(Settings.model_validate(settings or {}), "a", answers)]
    return next((each for each in lines if each.name == name), None)


@pytest.mark.parametrize(
    ("options", "permissions", "state"),
    [
        ([], {}, "ok"),
        (["--sample=none", "--cpuctxsw=none"], {}, "ok"),
        (["--sample=process-tree"], {}, "warning"),
        (["--sample=process-tree"], {"paranoid": 2}, "ok"),
        (["--sample=process-tree"], {"powers": True}, "ok"),
        (["--sample=process-tree"], {"paranoid": None}, "warning"),
        (["--gpu-metrics-devices=all"], {}, "warning"),
        (["--gpu-metrics-devices=all"], {"counters_for_admin_only": False}, "ok"),
    ],
)
def test_permissions_matter_only_to_who_asks_for_more(
    options: list[str], permissions: dict[str, Any], state: str
) -> None:
    told = said("perf", {"nsys": {"options": options}}, permissions=permissions)
    assert told
    assert told.state == state
    assert (told.fix is None) == (state == "ok")


@pytest.mark.parametrize(
    ("version", "off", "state", "words"),
    [
        ("2.27.5", False, "ok", "communicators"),
        ("2.25.1", False, "ok", "communicators"),
        ("2.21.5", False, "warning", "no communicators"),
        ("2.14.3", False, "warning", "no payloads"),
        ("2.27.5", True, "warning", "NCCL_NVTX_DISABLE"),
        (None, False, "warning", "not known"),
    ],
)
def test_what_nccl_will_say(version: str | None, off: bool, state: str, words: str) -> None:
    told = said("NCCL NVTX", nccl={"version": version, "off": off})
    assert told
    assert (told.state, words in told.text) == (state, True)


@pytest.mark.parametrize(
    ("kernels", "packages", "words"),
    [
        ({}, {}, None),
        ({"capable": []}, {}, "no GPU"),
        ({"capable": ["9.0", "8.0"]}, {}, "8.0, 9.0"),
        ({"nvcc": None}, {}, "nvcc"),
        ({"nvcc": None, "built": True}, {}, None),
        ({"nvcc": None, "why": "No module named 'nsysk3'"}, {}, "No module"),
        ({"error": "python3: no answer in 25 s"}, {}, "no answer"),
        ({}, {"torch": None}, "no torch"),
        ({}, {"nsysk3": None}, "no nsysk3"),
    ],
)
def test_why_the_kernels_cannot_run(kernels: dict[str, Any], packages: dict[str, Any], words: str | None) -> None:
    answers = {
        "kernels": {**ANSWERS["kernels"], **kernels},
        "packages": {"packages": {**ANSWERS["packages"]["packages"], **packages}},
    }
    why = why_no_kernels(answers)
    assert (why is None) == (words is None)
    assert (words or "") in (why or "")


def test_a_container_program_that_does_not_answer() -> None:
    broken = {"found": {"docker": {"error": "docker: permission denied"}}}
    told = said("containers", containers=broken)
    assert told
    assert told.state == "ok"  # nobody asked for it
    told = said("containers", {"container": {"cli": "docker", "image": "x"}}, containers=broken)
    assert told
    assert (told.state, "group" in (told.fix or "")) == ("cannot", True)


def test_answers_that_are_errors_break_no_line() -> None:
    errors = {name: {"error": "gone"} for name in ANSWERS}
    lines = [each for extra in EXTRAS for each in extra(Settings(), "a", errors)]
    assert all(each.state != "cannot" for each in lines)
    assert why_no_kernels(errors) == "gone"
