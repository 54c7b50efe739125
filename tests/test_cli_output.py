"""What the command line prints: where, how wide, in which encoding, for whom."""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from pathlib import Path

import pytest
from command import COMMAND, Ran, process
from command import run as command
from conftest import FIXTURES, GRAPH, TP2
from exports import ALLREDUCE, GEMM, Export, two_ranks

import nsysk3
from nsysk3.result import Result


def test_version_and_help() -> None:
    assert process("--version").stdout == f"nsysk3 {nsysk3.__version__}\n"
    ran = process("--help")
    assert (ran.returncode, ran.stderr) == (0, "")
    for name in ("analyze", "export", "rules"):
        assert f"  {name} " in ran.stdout
    assert max(map(len, ran.stdout.splitlines())) <= 100
    for name in ("analyze", "export", "rules explain"):
        assert command(*name.split(), "--help").code == 0


@cache
def summary(trace: str) -> Ran:
    """What is printed of a real trace."""
    return command("analyze", FIXTURES / f"{trace}.sqlite")


def cells(text: str, first: str) -> list[str]:
    """The words of the table row that begins with the given ones."""
    rows = [line.split() for line in text.splitlines() if line.split()[: len(first.split())] == first.split()]
    assert len(rows) == 1, rows
    return rows[0]


def test_the_summary_fits_100_columns_and_says_the_numbers() -> None:
    ran = command("analyze", TP2)
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert max(map(len, lines)) <= 100
    assert "\x1b" not in ran.out
    assert "…:" not in ran.out
    assert lines[0].startswith("2 ranks, 2 stable · window: capture")
    row = cells(ran.out, "0 0/0 vm:0")
    # window ms, compute %, overlap %
    assert row[3:6] == ["298.0", "79.4", "0.0"]
    assert row[-5:] == ["256", "57.4", "0.22", "0", "0.0"]
    budget = cells(ran.out, "compute alone")
    assert budget[2:4] == ["232.7", "78.1"]
    (reduce,) = [line.split() for line in lines if "ncclDevKernel_AllReduce_Sum_bf16_RING_LL" in line]
    assert reduce[:3] == ["61.4", "20.9", "256"]


@pytest.mark.parametrize(
    "trace", ["h200/pp2", "h200/graph", "h200/graphwhole", "sglang-h200/tp2-lw", "sglang-h200/pp2-lw"]
)
def test_every_real_summary_fits_100_columns_with_whole_numbers(trace: str) -> None:
    ran = summary(trace)
    assert ran.code == 0
    for line in ran.out.splitlines():
        assert len(line) <= 100, line
        # a name may be cut, a number or a heading never
        assert not [word for word in line.split() if word.endswith("…") and word[0].isdigit()], line
    assert "p…" not in ran.out
    assert "tot…" not in ran.out


def test_numbers_stay_whole_whatever_their_size(tmp_path: Path) -> None:
    export = Export().host("a-host-with-a-very-long-name.example.com")
    for device in range(3):
        export.kernel(GEMM, 0, 1e9, pid=11 + device, device=device)
        export.kernels(
            ALLREDUCE, [(1e9 + i * 1e6, 1e9 + i * 1e6 + 9e5) for i in range(1200)], pid=11 + device, device=device
        )
    path = export.write(tmp_path / "r.sqlite")
    text = command("analyze", path).out
    (row,) = [line for line in text.splitlines() if line.split()[:1] == ["0"]]
    for number in ("2,199,900.0", "45.5", "1,200", "1,080,000.0", "900.00"):
        assert number in row.split(), row


def test_ranks_that_are_not_stable_are_marked_with_the_reason(tmp_path: Path) -> None:
    export = two_ranks()
    export.rows["CUPTI_ACTIVITY_KIND_KERNEL"].pop()  # the second rank lost an AllReduce
    export.kernels(ALLREDUCE, [(20 + i, 20.5 + i) for i in range(4)], pid=13, device=2)
    ran = command("analyze", export.write(tmp_path / "r.sqlite"))
    assert "3 ranks, 2 stable" in ran.out
    assert "1*" in ran.out.split()
    assert "* not in medians: rank 1: 3" in ran.out


def test_what_a_trace_cannot_say_is_a_dash() -> None:
    row = cells(summary("h200/graphwhole").out, "0 0/0 vm:0")
    assert row[4:6] == ["-", "-"]
    assert "0.0" not in row
    assert row[-5:] == ["-"] * 5


def test_hostile_names_reach_no_terminal(tmp_path: Path) -> None:
    evil = "evil\x1b]0;pwned\x07\x1b[2J[bold red]markup[/]\u202ekernel\nnext(int)"
    export = Export().kernel(evil, 0, 100).host("ho\x1b[31mst").diagnostic("bad\x1b[5m news")
    path = export.write(tmp_path / "r\x1b[1m.sqlite")
    ran = command("analyze", path, path.with_name("no\x1b[1mne"))
    for text in (ran.out, ran.err):
        assert not [character for character in text if not character.isprintable() and character != "\n"]
    assert "[bold red]markup[/]" in ran.out
    assert ran.code == 2
    # the files hold the name as it is
    assert json.loads(command("analyze", path, "--json").out)["tables"]["unclassified"][0]["name"] == evil


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_any_encoding_of_the_terminal_will_do(encoding: str) -> None:
    ran = subprocess.run(
        [*COMMAND, "analyze", str(GRAPH)],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": encoding},
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert "2 ranks, 2 stable" in ran.stdout.decode(encoding)


def test_quiet_prints_nothing(tmp_path: Path) -> None:
    assert command("analyze", GRAPH, "--quiet") == (0, "", "")
    ran = command("analyze", GRAPH, "-q", "--out", tmp_path / "out")
    assert (ran.code, ran.out) == (0, "")
    assert (tmp_path / "out" / "result.json").exists()


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["tables", "json"])
def test_a_reader_that_goes_away_costs_no_result_and_no_noise(tmp_path: Path, options: list[str]) -> None:
    out = tmp_path / "out"
    read, write = os.pipe()
    os.close(read)  # nobody reads: the first write fails
    ran = subprocess.run(
        [*COMMAND, "analyze", str(GRAPH), "--out", str(out), *options],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write)
    assert ran.stderr == f"results written to {out}/\n"
    assert Result.load(out).rank_metrics.height == 2
