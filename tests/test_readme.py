"""What the README shows is what the commands print."""

from __future__ import annotations

import re

import pytest
from command import run
from conftest import ROOT

README = (ROOT / "README.md").read_text("utf-8")


def test_the_example_is_the_output_of_its_command() -> None:
    section = README.split("## What it prints")[1]
    command = re.search(r"`nsysk3 (analyze [^`]+)`", section)
    assert command
    words = [str(ROOT / word) if word.startswith("fixtures/") else word for word in command[1].split()]
    shown = section.split("```")[1].strip("\n").splitlines()
    printed = [line.rstrip() for line in run(*words).out.splitlines()]
    assert printed[: len(shown)] == shown


@pytest.mark.parametrize("name", sorted(set(re.findall(r"^nsysk3 ([a-z-]+)", README, re.MULTILINE))))
def test_every_command_shown_exists(name: str) -> None:
    assert run(name, "--help").code == 0
