"""Sweeps that go on with other settings, and sweeps that are merged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import run
from loopback import free_port
from sweep_places import REQUESTS, Place, keys, place


@pytest.fixture
def here(tmp_path: Path) -> Place:
    return place(tmp_path)


def test_other_settings_are_refused_item_by_item(here: Place) -> None:
    assert here.sweep("--pp", 1, "--concurrency", 1, "--repeats", 1).code == 0
    kept = (here.path / "out" / "results.csv").read_bytes()
    text = here.settings.read_text()
    here.settings.write_text(
        text.replace("chunk = 256", "chunk = 128").replace('"400"', '"300"') + '[env]\nNCCL_ALGO = "Ring"\n'
    )
    ran = here.sweep("--resume", "--input-len", 1024, "--layout-args", "PP1=--log-level info")
    assert ran.code == 2
    for words in ("load.chunk was 256, is 128", "load.input_len was 512, is 1024", '"300"', "env.NCCL_ALGO was not set",
                  "--layout-args of PP1/TP4/EP4"):  # fmt: skip
        assert words in ran.err
    # What changes nothing that is measured may change, and the matrix may grow.
    here.settings.write_text(
        text.replace("start_timeout_s = 60", "start_timeout_s = 50").replace(
            f"port = {here.port}", f"port = {free_port()}"
        )
    )
    ran = here.sweep("--resume", "--repeats", 2)
    assert ran.code == 0, ran.err
    assert keys(here.rows()) == [(1, 1, 1), (1, 1, 2)]
    assert (here.path / "out" / "results.csv").read_bytes().startswith(kept)
    assert here.sweep("--pp", 1).code == 2  # without --resume the folder is somebody's


def test_a_server_of_another_version_is_told_for_ever(here: Place) -> None:
    """Repeats of two versions stand in one median."""
    words = ("--pp", 1, "--concurrency", 1)
    assert here.sweep(*words, "--repeats", 1).code == 0
    path = here.path / "out/metadata/sweep.json"
    path.write_text(path.read_text().replace('"version": "0.5.23"', '"version": "9.9"'))
    raw = here.path / "out/raw/pp1_tp4_ep4_c1_r1.jsonl"
    for repeats in (2, 3):
        raw.write_text("")  # what nobody can check any more is measured again
        ran = here.sweep(*words, "--repeats", repeats, "--resume")
        assert ran.code == 0
        assert f"raw/{raw.name} is empty: C=1 repeat 1 is measured again" in ran.err
        assert json.loads(raw.read_text())["completed"] == REQUESTS
        assert "version was 9.9 when it was started before, is 0.5.23 now" in " ".join(ran.out.split())


def test_baseline_is_merged_after_a_check_item_by_item(here: Place) -> None:
    few = ("--concurrency", 1, "--repeats", 1)
    assert here.sweep("--pp", 1, *few, out="first").code == 0
    first = here.path / "first"
    refused = here.sweep("--pp", 2, *few, "--baseline", first, "--input-len", 256, "--chunk", 128)
    assert refused.code == 2
    assert "load.input_len is 256 here, 512 there; server" not in refused.err
    assert {"load.input_len is 256 here, 512 there", "load.chunk is 128 here, 256 there"} <= {
        part.strip() for part in refused.err.split("differs:")[1].split(". To merge")[0].split(";")
    }
    assert not (here.path / "out").exists()
    ran = here.sweep("--pp", 2, *few, "--baseline", first)
    assert ran.code == 0, ran.err
    assert "baseline" in ran.out
    assert "PP1 -> PP2" in ran.out
    first.rename(here.path / "moved")  # what is needed was copied
    assert run("sweep", "report", here.path / "out").out == ran.out
    # The same after the fact, and a difference that was accepted stays in the report.
    assert here.sweep("--pp", 4, *few, "--input-len", 256, out="third").code == 0
    third = ("sweep", "report", here.path / "third", "--baseline", here.path / "moved")
    assert run(*third).code == 2
    shown = run(*third, "--accept", "load.input_len")
    assert shown.code == 0
    assert "although it differs: load.input_len is 256 here, 512 there" in shown.out
