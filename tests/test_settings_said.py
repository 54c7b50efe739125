"""What is wrong with a setting is said by the name that the user gave it: option, variable, or line of the file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from command import run
from conftest import ROOT, TP2
from typer.main import get_command

from nsysk3.cli import app
from nsysk3.errors import InputError
from nsysk3.run.config import Analyze, ignored_variables, load_settings
from nsysk3.scale.choose import crew_of

TOO_SMALL = "input should be greater than or equal to 1, not"


@pytest.fixture(autouse=True)
def nothing_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("analyze {trace} --workers 0", f"--workers (analyze.workers): {TOO_SMALL} 0"),
        ("profile --pp 1 --input-len 0", f"--input-len (load.input_len): {TOO_SMALL} 0"),
        ("profile --pp 1 --model=", "--model (model.path): string should have at least 1 character, not ''"),
        ("profile --pp 1 --container-cli docker --image=", "--image (container.image): string should have at least"),
        ("sweep --pp 1 --chunk 0", f"--chunk (load.chunk): {TOO_SMALL} 0"),
    ],
)
def test_an_option_is_called_as_it_was_typed(line: str, said: str) -> None:
    ran = run(*line.format(trace=TP2).split())
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert ran.err.startswith(f"nsysk3: {said}")


def test_every_option_that_is_a_setting_is_one_of_its_command() -> None:
    """Those are in the sources as "section.name": option; an error names the option that its last word makes."""
    commands = get_command(app).commands  # type: ignore[attr-defined]
    seen = set()
    for name in ("analyze", "profile", "sweep", "cleanup", "nccl_bench"):
        text = (ROOT / "nsysk3" / "cli" / f"{name}.py").read_text("utf-8")
        options = {each for one in commands[name.replace("_", "-")].params for each in one.opts}
        for dotted in re.findall(r'"(\w+\.\w+)": ', text):
            with pytest.raises(InputError) as raised:
                load_settings(environ={}, overrides={dotted: {"a": "table"}})
            assert str(raised.value).partition(f" ({dotted}): ")[0] in options
            seen.add(dotted)
    assert {"analyze.workers", "container.cli", "model.path", "cluster.hosts"} <= seen


def test_a_setting_is_called_by_its_variable_or_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nsysk3.toml").write_text("[analyze]\nworkers = 0\n")
    assert run("analyze", TP2).err == f"nsysk3: nsysk3.toml: analyze.workers: {TOO_SMALL} 0\n"
    monkeypatch.setenv("NSYSK3_ANALYZE_WORKERS", "0")
    assert run("analyze", TP2).err == f"nsysk3: NSYSK3_ANALYZE_WORKERS: analyze.workers: {TOO_SMALL} '0'\n"


@pytest.mark.parametrize("command", ["analyze", "layers", "report"])
def test_a_window_of_the_settings_is_not_blamed_on_the_option(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSYSK3_ANALYZE_WINDOW", "bad")
    assert run(command, TP2).err.startswith("nsysk3: analyze.window 'bad': give capture")
    if command != "report":
        assert run(command, TP2, "--window", "worse").err.startswith("nsysk3: --window 'worse': give capture")


@pytest.mark.parametrize(
    ("hosts", "said"),
    [("", "'': names no host"), (",", "',': names no host"), ("a,b,a", "(cluster.hosts): a is there twice")],
)
def test_hosts_that_are_none_or_twice(hosts: str, said: str) -> None:
    for command in ("doctor", "profile --pp 1", "sweep --pp 1", "cleanup run", "nccl-bench --pp 1"):
        ran = run(*command.split(), "--hosts", hosts)
        assert (ran.code, ran.out, ran.err) == (2, "", f"nsysk3: --hosts {said}\n"), command


def test_hosts_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSYSK3_CLUSTER_HOSTS", ",")
    assert run("profile", "--pp", 1).err == "nsysk3: NSYSK3_CLUSTER_HOSTS: cluster.hosts: names no host\n"


def test_patience_has_one_default() -> None:
    assert crew_of.__kwdefaults__["patience_s"] == Analyze().patience_s == 60


def test_a_variable_that_does_nothing_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSYSK3_WORKERS", "3")
    monkeypatch.setenv("NSYSK3_CAHCE", "secret")
    ran = run("analyze", TP2, "--json")
    assert ran.out.startswith("{")
    assert ran.err == (
        "nsysk3: NSYSK3_CAHCE: nothing reads it; did you mean NSYSK3_CACHE or NSYSK3_ANALYZE_CACHE?\n"
        "nsysk3: NSYSK3_WORKERS: nothing reads it; did you mean NSYSK3_ANALYZE_WORKERS?\n"
    )
    assert run("analyze", TP2, "--quiet").err == ""


def test_no_word_about_variables_that_are_read_or_are_somebody_elses() -> None:
    """Every name in the sources, tests and tools stands for one that is read, but for misspelt ones in tests."""
    places = [ROOT / "nsysk3", ROOT / "benchmarks", ROOT / ".ci"]
    files = [file for place in places for file in place.rglob("*") if file.suffix in (".py", ".sh", ".toml", ".md", "")]
    texts = [file.read_text("utf-8", "replace") for file in files if file.is_file()]
    texts += [file.read_text("utf-8") for file in (ROOT / "tests").glob("*.py") if file != Path(__file__)]
    named = {name for text in texts for name in re.findall(r"\bNSYSK3_[A-Z][A-Z_]*[A-Z]\b", text)}
    misspelt = {"NSYSK3_WORKERS", "NSYSK3_LOAD_CHNK", "NSYSK3_LOAD_CHUNKS"}
    assert {"NSYSK3_SP", "NSYSK3_UPDATE", "NSYSK3_CHROMIUM", "NSYSK3_RUN"} <= named
    foreign = {"NSYSK3_HOME", "NSYSK3_VENV", "NSYSK3_ROOT", "NSYSK3_VERSION", "NSYSK3_PREFIX"}
    assert list(ignored_variables(dict.fromkeys((named - misspelt) | foreign, "x"))) == []
