"""Whoever does the steps, and wherever the events lie between them, the result is the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from scale_runs import MIXED, TWO, assert_same, four_nodes

import nsysk3
from nsysk3.errors import InputError
from nsysk3.result import Result
from nsysk3.scale import wire
from nsysk3.scale.crew import Alone
from nsysk3.scale.pool import Pool


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return four_nodes(tmp_path_factory.mktemp("scale"))


@pytest.fixture(scope="module")
def two() -> Iterator[Pool]:
    with Pool(2) as crew:
        yield crew


def alone(run: Any, **options: Any) -> Result:
    return nsysk3.analyze(nsysk3.load(run), **options)


@pytest.mark.parametrize("window", ["capture", "steady", "0.01s:0.1s"])
def test_processes_find_what_one_finds(simulated: Path, two: Pool, window: str) -> None:
    before = two.account.received
    assert_same(alone(simulated, window=window), nsysk3.analyze(simulated, window=window, crew=two))
    # Communication and finished tables travel, not the events.
    assert two.account.received - before < sum(file.stat().st_size for file in simulated.glob("nodes/*/*.sqlite")) / 2
    assert len(two.account.peaks) == 2


@pytest.mark.parametrize("run", [TWO, MIXED], ids=["two reports", "four unlike ones"])
def test_real_reports_too(run: Any, two: Pool) -> None:
    assert_same(alone(run), nsysk3.analyze(run, crew=two))


def test_events_in_scratch_files_are_the_same_events(
    simulated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    crew = Alone(hold=0)
    with crew:
        found = nsysk3.analyze(simulated, crew=crew)
        assert list(tmp_path.iterdir())
    assert_same(alone(simulated), found)
    assert list(tmp_path.iterdir()) == []


def test_bad_reports_among_good_ones_are_named_by_every_crew(tmp_path: Path, simulated: Path, two: Pool) -> None:
    (tmp_path / "text.sqlite").write_text("not a database")
    (tmp_path / "node.sqlite").symlink_to(simulated / "nodes/node601/trace.sqlite")
    (tmp_path / "short.sqlite").write_bytes((simulated / "nodes/node602/trace.sqlite").read_bytes()[:60_000])
    found = nsysk3.analyze(tmp_path, crew=two)
    assert_same(alone(tmp_path), found)
    assert sorted(Path(problem.path).name for problem in found.document.problems) == ["short.sqlite", "text.sqlite"]
    (tmp_path / "node.sqlite").unlink()
    with pytest.raises(InputError, match=r"text\.sqlite: .*; .*|short\.sqlite: .*; .*"):
        nsysk3.analyze(tmp_path, crew=two)


def test_what_travels_comes_back_as_it_was() -> None:
    frame = pl.DataFrame(
        {"at": range(10_000), "role": ["p2p", None] * 5_000}, schema={"at": pl.Int64, "role": pl.Enum(["p2p"])}
    )
    sent = {"frame": frame, "empty": frame.clear(), "series": frame["role"], "others": (1, None, "text", [2**70])}
    raw = wire.dumps(sent)
    back = wire.loads(raw)
    for name in ("frame", "empty", "series"):
        assert back[name].equals(sent[name], null_equal=True)
    assert back["frame"].schema == frame.schema
    assert back["series"].name == "role"
    assert back["others"] == sent["others"]
    assert len(raw) < frame.estimated_size() / 2
