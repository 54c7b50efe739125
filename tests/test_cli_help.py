"""How one finds one's way: help, what was meant, completion, pages of reference, and the habits all commands share."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
from command import COMMAND, process, run
from conftest import FIXTURES, ROOT
from hypothesis import given
from hypothesis import strategies as st
from typer.main import get_command

from nsysk3.cli import app
from nsysk3.run.closest import closest

TRACE = FIXTURES / "h200" / "graph.sqlite"


def commands() -> dict[str, Any]:
    """Every command by its words behind nsysk3."""
    found: dict[str, Any] = {}
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        found[name] = command
        found |= {f"{name} {below}": each for below, each in getattr(command, "commands", {}).items()}
    return found


COMMANDS = commands()
LONG = [
    name for command in COMMANDS.values() for each in command.params for name in each.opts if re.match("--.{5}", name)
]


def options(command: Any) -> set[str]:
    return {name for each in command.params for name in (*each.opts, *each.secondary_opts) if name.startswith("-")}


# --- help


@pytest.mark.parametrize("words", COMMANDS)
def test_help_fits_80_columns_and_leaves_nothing_unsaid(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    ran = run(*words.split(), "--help")
    assert (ran.code, ran.err) == (0, "")
    assert [line for line in ran.out.splitlines() if len(line) > 80] == []
    assert COMMANDS[words].help
    assert [each.name for each in COMMANDS[words].params if not each.help] == []


@pytest.mark.parametrize("words", COMMANDS)
def test_quiet_and_verbose_go_together(words: str) -> None:
    own = options(COMMANDS[words])
    assert ("--quiet" in own) == ("-q" in own)
    assert ("--verbose" in own) == ("-v" in own)
    assert "--quiet" not in own or "--verbose" in own


def test_verbose_says_the_steps_and_quiet_says_none() -> None:
    ran = run("layers", TRACE, "--verbose")
    assert re.search(r"^\[ +[\d.]+ s\] reading graph ", ran.err, re.MULTILINE)
    assert run("layers", TRACE).err == ""  # nobody watches
    both = run("layers", TRACE, "-q", "-v")
    assert both.code == 2
    assert "--quiet and --verbose" in both.err


def test_verbose_shows_where_an_internal_error_arose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsysk3.cli.results.saved_results", lambda path: 1 / 0)
    monkeypatch.delenv("NSYSK3_DEBUG", raising=False)
    ran = run("layers", TRACE)
    assert (ran.code, len(ran.err.splitlines())) == (70, 1)
    assert "--verbose shows where" in ran.err
    with pytest.raises(ZeroDivisionError):
        run("layers", TRACE, "-v")


# --- what was meant

WRONG = {
    "anlyze x": "nsysk3: no such command 'anlyze'; did you mean analyze?",
    "rules exlain x": "nsysk3 rules: no such command 'exlain'; did you mean explain?",
    "rules zzz": "nsysk3 rules: no such command 'zzz': there are explain, list",
    "runs/pp8": "nsysk3: no such command 'runs/pp8'; did you mean nsysk3 analyze runs/pp8?",
    "zzzzzz": "nsysk3: no such command 'zzzzzz'",
    "analyze --ot x y": "nsysk3 analyze: no such option --ot; did you mean --out?",
    "analyze --layer_regex=x y": "nsysk3 analyze: no such option --layer_regex; did you mean --layer-regex?",
    "report --layer-regex x y": "nsysk3 report: no such option --layer-regex; it is one of nsysk3 analyze",
    "export --type csv x": "nsysk3 export: --type: 'csv' is not one of 'sqlite', 'parquetdir'",
    "profile": "nsysk3 profile: missing option '--pp'",
    "rules explain": "nsysk3 rules explain: missing argument 'NAME'",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_command_line_is_one_line_and_its_usage(line: str) -> None:
    ran = run(*line.split())
    assert (ran.code, ran.out) == (2, "")
    said, usage = ran.err.splitlines()
    assert said == WRONG[line]
    assert usage.startswith("  usage: nsysk3")
    assert usage.endswith("(--help says more)")


def test_control_characters_of_a_command_line_do_not_reach_the_terminal() -> None:
    ran = run("analyze", "--\x1b[31mred", "x")
    assert ran.code == 2
    assert "\x1b" not in ran.err


@pytest.mark.parametrize("group", [[], ["rules"], ["recipes"]], ids=str)
def test_a_group_alone_shows_its_help(group: list[str]) -> None:
    ran = run(*group)
    assert ran.code == 2
    assert ran.err.startswith(" ".join(["Usage: nsysk3", *group]))


@given(st.sampled_from(LONG), st.data())
def test_one_wrong_letter_is_understood(option: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(3, len(option) - 1))
    change = data.draw(st.sampled_from(["", "x", option[at] * 2]))
    assert closest(option[:at] + change + option[at + 1 :], set(LONG)) is not None
    assert closest(option.replace("-", "_").upper(), set(LONG)) == option  # however it is written


def test_a_setting_that_nobody_knows_is_told_what_was_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for text, meant in (("[load]\nchunks = 3", "load.chunk?"), ("[lod]\nchunk = 3", "load?")):
        (tmp_path / "nsysk3.toml").write_text(text)
        ran = run("layers", TRACE)
        assert ran.code == 2
        assert f"did you mean {meant}" in ran.err
    (tmp_path / "nsysk3.toml").unlink()
    monkeypatch.setenv("NSYSK3_LOAD_CHUNKS", "3")
    assert "did you mean NSYSK3_LOAD_CHUNK?" in run("layers", TRACE).err


# --- one precedence


def test_the_command_line_wins_over_the_environment_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def shown(*more: str) -> str:
        return str(json.loads(run("analyze", TRACE, "--json", *more).out)["window"]["asked"])

    assert shown() == "capture"
    (tmp_path / "nsysk3.toml").write_text('[analyze]\nwindow = "0s:0.1s"\n[report]\nlang = "zh"\n')
    assert shown() == "0s:0.1s"
    monkeypatch.setenv("NSYSK3_ANALYZE_WINDOW", "0s:0.2s")
    assert shown() == "0s:0.2s"
    assert shown("--window", "0s:0.3s") == "0s:0.3s"
    for more, lang in (([], "zh"), (["--lang", "en"], "en")):
        run("report", TRACE, "--out", "r.html", *more)
        assert f'lang="{lang}"' in (tmp_path / "r.html").read_text("utf-8")


# --- pages of reference


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_that_of_the_commands(reference: ModuleType) -> None:
    for name, text in ((reference.MARKDOWN, reference.markdown()), (reference.MAN, reference.man())):
        assert (ROOT / "docs" / name).read_text("utf-8") == text, "run: python docs/reference.py"


def test_the_reference_has_every_command_and_option(reference: ModuleType) -> None:
    entries = {entry.words: entry for entry in reference.entries()}
    runnable = {words for words, each in COMMANDS.items() if getattr(each, "invoke_without_command", True)}
    assert set(entries) == runnable
    for words, entry in entries.items():
        shown = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", " ".join(name for name, _ in entry.options)))
        assert shown == options(COMMANDS[words]) - {"-h", "--help"}, words


@pytest.mark.skipif(shutil.which("groff") is None, reason="no groff")
def test_the_man_page_formats_without_a_warning() -> None:
    page = ROOT / "docs" / "man" / "nsysk3.1"
    ran = subprocess.run(["groff", "-man", "-ww", "-Tutf8", page], capture_output=True, text=True, check=True)
    assert ran.stderr == ""
    assert "nsysk3 analyze" in ran.stdout


# --- the shell


def test_bash_completes(tmp_path: Path) -> None:
    """In a real bash, through the script that --show-completion prints there."""
    script = tmp_path / "nsysk3"
    script.write_text(f"#!/bin/sh\nexec {sys.executable} -c 'from nsysk3.cli import main; main()' \"$@\"\n")
    script.chmod(0o755)
    wanted = {
        "nsysk3 ana": "analyze",
        "nsysk3 export": "export export-trace",
        "nsysk3 analyze --window ": "capture prefill steady",
        "nsysk3 export --type p": "parquetdir",
        "nsysk3 simulate --preset kimi-k3-6000d-pp1": "kimi-k3-6000d-pp1 kimi-k3-6000d-pp16",
        "nsysk3 simulate --fault li": "list",
        "nsysk3 analyze --recipe nsysk3_st": "nsysk3_stage_wait",
    }
    complete = """
        eval "$(_NSYSK3_COMPLETE=source_bash nsysk3)"
        for line; do
            COMP_WORDS=($line); [[ $line == *" " ]] && COMP_WORDS+=("")
            COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
            _nsysk3_completion nsysk3
            echo "${COMPREPLY[*]}"
        done
    """
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", "-c", complete, "bash", *wanted]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == list(wanted.values())


@pytest.mark.parametrize("arguments", [["rules", "list"], ["analyze", TRACE], ["analyze", TRACE, "--json"]], ids=len)
def test_a_reader_that_goes_away_ends_the_command_as_any_other(arguments: list[object]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    started = subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        stdout=writer, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    os.close(writer)
    assert started.communicate()[1] == ""
    assert started.returncode == -signal.SIGPIPE


# --- open


@pytest.fixture
def no_desktop(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY", "WSL_DISTRO_NAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_desktop")
def test_open_makes_the_page_once_and_prints_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traces = tmp_path / "run"
    traces.mkdir()
    shutil.copy(TRACE, traces)
    page = traces / "analysis" / "report.html"
    ran = run("open", traces)
    assert (ran.code, ran.out) == (0, f"{page}\n")
    assert "no browser" in ran.err
    assert (page.parent / "result.json").is_file()
    page.write_text("as it was")
    for same in (traces, traces / "analysis", page):
        assert run("open", same, "-q") == (0, f"{page}\n", "")
    assert page.read_text() == "as it was"
    os.utime(page, (0, 0))  # older than the results
    assert run("open", traces).code == 0
    assert 'lang="en"' in page.read_text("utf-8")
    assert run("open", traces, "--lang", "zh").code == 0
    assert 'lang="zh"' in page.read_text("utf-8")
    monkeypatch.chdir(tmp_path)
    assert run("open", traces / TRACE.name, "-q").out == "graph.sqlite.html\n"
    missing = run("open", tmp_path / "none")
    assert (missing.code, missing.out) == (2, "")


@pytest.mark.usefixtures("no_desktop")
def test_open_knows_a_sweep(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "kimi-k3-6000d", tmp_path / "sweep")
    ran = run("open", tmp_path / "sweep")
    page = tmp_path / "sweep" / "report.html"
    assert (ran.code, ran.out) == (0, f"{page}\n")
    assert page.read_text("utf-8").startswith("<!doctype html>")


def test_open_shows_the_page_where_there_is_a_browser(tmp_path: Path) -> None:
    page, told = tmp_path / "a page.html", tmp_path / "told"
    page.write_text("<p>")
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\nprintf %s "$1" > {told}\n')
    browser.chmod(0o755)
    ran = process("open", page, env={**os.environ, "BROWSER": f"{browser} %s"})
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, f"{page}\n", "")
    assert told.read_text() == page.as_uri()


def test_typer_still_names_its_errors_as_we_expect() -> None:
    from nsysk3.cli.usage import ClickError, UsageError

    assert (UsageError.__name__, ClickError.__name__) == ("UsageError", "ClickException")
    assert issubclass(typer.BadParameter, UsageError)
