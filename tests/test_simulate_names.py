"""Names that simulate takes: listed, completed, and suggested to who mistyped one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from command import process, run

from nsysk3.simulate.faults import FAULTS


def test_faults_are_listed_without_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for more in ([], ["--out", "run"], ["--fault", "straggler"]):
        ran = run("simulate", *more, "--fault", "list")
        assert (ran.code, ran.err) == (0, "")
        assert [line.split()[0] for line in ran.out.splitlines()] == list(FAULTS)
    assert list(tmp_path.iterdir()) == []
    assert "missing option '--out'" in run("simulate", "--fault", "straggler").err


@pytest.mark.parametrize(
    ("option", "given", "said"),
    [
        ("fault", "stragler=3", "'stragler': did you mean straggler? There are lost-kernels, straggler, cut-window,"),
        ("fault", "zzz", "'zzz': there are lost-kernels, straggler,"),
        ("preset", "kimi-k3-6000d-p8", "'kimi-k3-6000d-p8': did you mean kimi-k3-6000d-pp8? There are kimi-k3-6000d-"),
        ("schema", "2024", "'2024': did you mean 2024.2? There are 2022.4,"),
    ],
)
def test_what_is_unknown_is_suggested_and_listed(option: str, given: str, said: str, tmp_path: Path) -> None:
    ran = run("simulate", "--out", tmp_path / "run", f"--{option}", given)
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert ran.err.startswith(f"nsysk3: --{option} {said}")
    assert not (tmp_path / "run").exists()


def completed(*words: str) -> list[str]:
    line = {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1), "_NSYSK3_COMPLETE": "complete_bash"}
    return process(env={**os.environ, **line}).stdout.split()


def test_bash_completes_faults_and_leaves_files_to_itself() -> None:
    assert completed("nsysk3", "simulate", "--fault", "") == ["list", *FAULTS]
    assert completed("nsysk3", "simulate", "--fault", "list", "--fault", "lost") == ["lost-kernels"]
    assert completed("nsysk3", "profile", "--config", "k") == []
    shown = process(env={**os.environ, "_NSYSK3_COMPLETE": "source_bash"}).stdout
    assert "complete -o default -F" in shown  # where we have nothing, names of files
