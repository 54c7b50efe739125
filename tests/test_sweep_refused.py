"""Sweeps with nothing to go back to, and options of a sweep that mean nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import run
from sweep_places import place
from sweep_points import point

from nsysk3.sweep.findings import find
from nsysk3.sweep.record import Record
from nsysk3.sweep.tables import verdict

SLOWER = "the only other layout measured, and slower by more than repeats differ"


@pytest.mark.parametrize(
    ("rates", "said"),
    [((100, 50), True), ((50, 100), True), ((100, 99.9), False), ((100, 50, 40), False)],
    ids=["shallow wins", "deep wins", "no difference", "a real fallback"],
)
def test_a_fallback_that_is_none_is_called_so(rates: tuple[float, ...], said: bool) -> None:
    points = [point(2**place, rate, spread=0.01, concurrency=c) for place, rate in enumerate(rates) for c in (4, 8)]
    findings = find(points, Record())
    fallback = next(text for text in verdict(findings) if text.startswith("Fallback: "))
    assert (SLOWER in fallback) == said


def test_what_cannot_be_accepted_is_said_before_any_plan(tmp_path: Path) -> None:
    here = place(tmp_path)
    assert here.sweep("--pp", 1, "--concurrency", 1, "--repeats", 1).code == 0
    mine = here.path / "out"
    ran = run("sweep", "report", mine, "--baseline", mine)
    assert (ran.code, ran.err) == (2, f"nsysk3: --baseline {mine}: is this sweep itself; give another one\n")
    ran = here.sweep("--resume", "--baseline", mine / ".." / "out", "--dry-run")
    assert (ran.code, "is this sweep itself" in ran.err) == (2, True)
    # PP 3 cannot be planned on four GPUs, which would be said first.
    words = ("--config", here.settings, "--pp", 3, "--out", here.path / "new", "--baseline", mine, "--dry-run")
    ran = run("sweep", *words, "--accept", "load.chnk")
    assert (ran.code, ran.out) == (2, "")
    assert "--accept load.chnk: no such item; did you mean 'load.chunk'?" in ran.err
    assert "PP 3" in run("sweep", *words).err or "--pp 3" in run("sweep", *words).err
