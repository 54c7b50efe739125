"""The user's map of ranks, which goes before all that a trace says."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import run as command
from conftest import FIXTURES
from identities import gpus, ranks_of

from nsysk3.errors import InputError
from nsysk3.trace.load import load


def test_the_users_map_matches_by_report_host_pid_and_device(tmp_path: Path) -> None:
    gpus(11, 12, host="alpha").write(tmp_path / "a.sqlite")
    gpus(11, 12, host="beta").write(tmp_path / "b.sqlite")
    ranks = tmp_path / "ranks.toml"
    ranks.write_text(
        """
        [[rank]]
        report = "a*"
        pid = 11
        world_rank = 3
        pp = 1
        tp = 1
        [[rank]]
        host = "alpha"
        world_rank = 2
        pp = 1
        tp = 0
        ep = 4
        [[rank]]
        host = "beta"
        device = 1
        world_rank = 0
        [[rank]]
        world_rank = 1
        """
    )
    found = load(tmp_path, ranks=ranks).ranks
    columns = ("world_rank", "report_name", "pid", "pp_rank", "tp_rank", "ep_rank")
    assert found.select(*columns).rows() == [
        (0, "b", 12, None, None, None),
        (1, "b", 11, None, None, None),
        (2, "a", 12, 1, 0, 4),
        (3, "a", 11, 1, 1, None),
    ]
    assert set(found["rank_source"]) == {"user map"}


BAD_MAPS = {
    "not toml": ("[[rank]", "not a readable TOML rank map"),
    "not text": (b"\xff\xfe[[rank]]", "not a readable TOML rank map"),
    "no ranks": ("[other]\nx = 1", "no [[rank]] tables"),
    "not tables": ("rank = 3", "no [[rank]] tables"),
    "not a list": ("[rank]\nworld_rank = 3", "no [[rank]] tables"),
    "a list of numbers": ("rank = [1, 2]", "number 1 has no whole-number world_rank"),
    "no world rank": ("[[rank]]\nworld_rank = 0\n[[rank]]\npp = 1", "number 2 has no whole-number world_rank"),
    "text for a rank": ('[[rank]]\nworld_rank = "0"', "number 1 has no whole-number world_rank"),
    "true for a rank": ("[[rank]]\nworld_rank = true", "number 1 has no whole-number world_rank"),
    "text for a stage": ('[[rank]]\nworld_rank = 0\npp = "1"', "pp, tp and ep must be whole numbers"),
    "negative": ("[[rank]]\nworld_rank = -1", "number 1 has no whole-number world_rank"),
    "a key that is not one": ("[[rank]]\nworld_rank = 0\ngpu = 1", "unknown key 'gpu'"),
    "one rank for both": ("[[rank]]\nworld_rank = 0", "two GPUs are given the same world_rank"),
}


@pytest.mark.parametrize("name", BAD_MAPS)
def test_a_bad_map_is_one_line_that_names_it(tmp_path: Path, name: str) -> None:
    text, said = BAD_MAPS[name]
    ranks = tmp_path / "ranks.toml"
    ranks.write_bytes(text.encode() if isinstance(text, str) else text)
    trace = gpus(11, 12).write(tmp_path / "r.sqlite")
    ran = command("analyze", trace, "--ranks", ranks)
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert str(ranks) in ran.err
    assert said in ran.err


def test_a_map_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    trace = gpus(11).write(tmp_path / "r.sqlite")
    ran = command("analyze", trace, "--ranks", tmp_path / "none.toml")
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert str(tmp_path / "none.toml") in ran.err


def test_identity_of_the_real_sglang_trace_can_be_given(tmp_path: Path) -> None:
    ranks = tmp_path / "ranks.toml"
    ranks.write_text("".join(f"[[rank]]\ndevice = {d}\nworld_rank = {d}\npp = {d}\ntp = 0\n" for d in (0, 1)))
    run = load(FIXTURES / "sglang-h200" / "pp2-lw.sqlite", ranks=ranks)
    assert run.ranks.select("pp_rank", "rank_source").rows() == [(0, "user map"), (1, "user map")]


def test_identify_refuses_nothing_in_silence(tmp_path: Path) -> None:
    """A map that names only some GPUs leaves the others to the other sources, and never doubles a rank."""
    ranks = tmp_path / "ranks.toml"
    ranks.write_text("[[rank]]\npid = 11\nworld_rank = 1\n")
    trace = gpus(11, 12).mpi_rank(12, 0).mpi_rank(11, 5).write(tmp_path / "r.sqlite")
    found = ranks_of(load(trace, ranks=ranks))
    assert {pid: (world, source) for pid, (world, *_, source) in found.items()} == {
        11: (1, "user map"),
        12: (0, "MPI_RANKS"),
    }
    ranks.write_text("[[rank]]\npid = 11\nworld_rank = 0\n")
    with pytest.raises(InputError, match="world_rank"):
        load(trace, ranks=ranks)
