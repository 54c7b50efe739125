"""Settings: where they come from, which wins, and that all of them are documented."""

from __future__ import annotations

import json
import shlex
import tomllib
from pathlib import Path

import pytest
from command import run
from conftest import ROOT
from launch_plans import EXAMPLES
from pydantic import BaseModel

from nsysk3.errors import InputError
from nsysk3.launch.plan import make_plan
from nsysk3.run.config import Settings, load_settings


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


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_example_can_be_planned(path: Path) -> None:
    example = load_settings(path, environ={})
    for pp in (1, 2):
        assert make_plan(example, pp=pp, run_id="r").pp == pp


def test_examples_say_nothing_that_settings_do_not_know() -> None:
    for path in EXAMPLES.glob("*.toml"):
        Settings.model_validate(tomllib.loads(path.read_text("utf-8")))
