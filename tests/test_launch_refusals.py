"""What cannot work is refused in one line, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import run

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
