"""The presets give the published figures back, and everything they make says that it is simulated."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from command import run
from simulated import Simulated, make

from nsysk3.errors import InputError
from nsysk3.simulate.config import Config
from nsysk3.simulate.presets import PRESETS, preset
from nsysk3.simulate.setup import configure

CALIBRATED = "simulated, calibrated on published figures"
# Medians over stable ranks, as published: counts, ns and shares.
PUBLISHED: dict[str, dict[str, float]] = {
    "kimi-k3-6000d-pp1": {
        "allreduce_count": 557, "allreduce_total_ns": 4_160.6e6, "allreduce_p50_ns": 7.10e6,
        "exposed_comm_share": 0.5727, "moe_share": 0.5873,
    },
    "kimi-k3-6000d-pp8": {"allreduce_count": 66, "allreduce_total_ns": 392.3e6, "allreduce_p50_ns": 5.83e6},
}  # fmt: skip
_made: dict[str, Simulated] = {}


@pytest.fixture(params=PUBLISHED)
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Simulated]:
    """A preset with published trace figures, made once."""
    if request.param not in _made:
        _made[request.param] = make(tmp_path_factory.mktemp("preset"), preset=request.param)
    return request.param, _made[request.param]


def medians(made: Simulated) -> dict[str, Any]:
    return dict(made.result.document.summary["median"])


def test_published_figures_within_one_percent(published: tuple[str, Simulated]) -> None:
    name, made = published
    said = medians(made)
    for metric, value in PUBLISHED[name].items():
        assert said[metric] == pytest.approx(value, rel=0.01), metric
    assert said["allreduce_count"] == PUBLISHED[name]["allreduce_count"]
    assert said["overlap_ratio"] < 0.01
    assert made.result.document.summary["stable_ranks"] == 32


def test_the_published_remainder_of_pp8_is_split(published: tuple[str, Simulated]) -> None:
    """3.43 s of NCCL that is no AllReduce: what the real trace could not tell is nearly all Stage wait."""
    name, made = published
    if not name.endswith("pp8"):
        pytest.skip("PP1 has no pipeline")
    ranks = made.result.tables["rank_metrics"]
    roles = made.result.tables["roles"].filter(pl.col("role").is_in(["p2p", "all_gather"]))
    other = roles.group_by("rank").agg(pl.col("total_ns").sum())["total_ns"]
    every = pl.concat([other, pl.Series([0] * (32 - len(other)), dtype=pl.Int64)])
    assert every.median() == pytest.approx(3.43e9, rel=0.01)
    stage_wait = (ranks["wait_upstream_ns"] + ranks["wait_downstream_ns"]).median()
    true = pl.DataFrame(made.facts["ranks"])["p2p_wait_ns"].median()
    assert stage_wait == pytest.approx(true, rel=1e-4)
    assert 0.9 < stage_wait / 3.43e9 < 1  # type: ignore[operator]


def test_everything_says_simulated(published: tuple[str, Simulated]) -> None:
    _, made = published
    assert made.result.document.simulated == CALIBRATED
    assert json.loads((made.path / "run.json").read_text("utf-8"))["simulated"] == CALIBRATED
    assert made.facts["simulated"] == CALIBRATED
    lines = [json.loads(path.read_text("utf-8")) for path in sorted((made.path / "bench").glob("*.jsonl"))]
    assert {line["simulated"] for line in lines} == {CALIBRATED}
    assert {line["completed"] for line in lines} == {40}


@pytest.mark.parametrize("name", PRESETS)
def test_benchmark_lines_are_the_published_ones(name: str, tmp_path: Path) -> None:
    from nsysk3.simulate.bench import write_bench

    config = preset(name)
    write_bench(config, tmp_path / "bench", 10**10)
    lines = [json.loads(path.read_text("utf-8")) for path in sorted((tmp_path / "bench").glob("*.jsonl"))]
    served = dict(config.published)
    rates = sorted(line["input_throughput"] for line in lines)
    assert rates[1] == pytest.approx(served["input_tps"])
    assert rates[-1] / rates[0] - 1 < 0.007
    assert sorted(line["median_ttft_ms"] for line in lines)[1] == pytest.approx(served["ttft_p50_s"] * 1e3)
    assert lines[1]["p95_ttft_ms"] == pytest.approx(served["ttft_p95_s"] * 1e3)


def test_a_changed_preset_is_no_longer_calibrated(tmp_path: Path) -> None:
    made = make(tmp_path, preset="kimi-k3-6000d-pp8", layers=16, cut_layers=0)
    assert made.facts["simulated"] == "simulated"


def test_the_same_seed_is_the_same_run_and_another_is_not(tmp_path: Path) -> None:
    shape = {"pp": 2, "tp": 2, "nodes": 2, "layers": 4, "micro_batches": 2, "layer_us": 300.0}
    one, two, three = (make(tmp_path / str(n), **shape, seed=seed) for n, seed in enumerate((1, 1, 2)))
    assert one.truth.equals(two.truth)
    assert not one.truth.equals(three.truth)
    assert one.facts == two.facts
    assert one.run.events.equals(two.run.events)


def test_command_line(tmp_path: Path) -> None:
    out = tmp_path / "run"
    small = ("--pp", 2, "--tp", 2, "--nodes", 2, "--layers", 4, "--micro-batches", 2)
    ran = run("simulate", *small, "--out", out)
    assert ran.code == 0
    assert "simulated; PP2/TP2 on 2 nodes" in ran.out
    assert run("simulate", *small, "--out", out).code == 2
    assert run("simulate", *small, "--out", out, "--force", "-q").out == ""
    assert run("analyze", out).code == 0
    # A finished analysis beside the traces is no trace, and neither is the truth.
    again = run("analyze", out)
    assert again.code == 0
    assert "simulated" in again.out


@pytest.mark.parametrize(
    "options",
    [
        ("--preset", "kimi-k9"), ("--pp", 3, "--tp", 3, "--nodes", 2), ("--tp", 4, "--ep", 3), ("--schema", "1999.1"),
        ("--fault", "gremlins"), ("--fault", "straggler=99"), ("--fault", "lost-kernels=2"), ("--layers", 2, "--pp", 4),
        ("--scale", 0), ("--cut-layers", 99), ("--fault", "cut-window=0:0"), ("--fault", "lost-kernels=x"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_line_and_leaves_nothing(options: tuple[object, ...], tmp_path: Path) -> None:
    ran = run("simulate", *options, "--out", tmp_path / "run")
    assert ran.code == 2
    assert ran.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nsysk3.simulate import presets

    def small(name: str) -> Config:
        config = preset(name)
        return replace(config, model=replace(config.model, layers=8), cut_layers=0, nodes=1, tp=config.tp // 4, ep=1)

    monkeypatch.setattr(presets, "preset", small)
    ran = run("demo", "--out", tmp_path / "demo", "--no-open", "--quiet")
    assert ran.code == 0
    assert ran.out.count(CALIBRATED.replace(",", ":")) >= 2
    page = (tmp_path / "demo" / "compare.html").read_text("utf-8")
    assert "simulated" in page
    assert run("demo", "--out", tmp_path / "demo", "--no-open", "--quiet").code == 0


def test_a_directory_that_no_simulation_made_is_kept(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years")
    with pytest.raises(InputError, match="exists"):
        make_at(mine)
    assert (mine / "thesis.txt").read_text() == "years"


def make_at(out: Path) -> None:
    from nsysk3.simulate.run import simulate
    from nsysk3.simulate.setup import configure

    simulate(configure(None, (), {}), out, force=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", -1), ("offset_ms", -3.0), ("drift_ppm", -1.0), ("cut_layers", -1), ("layer_us", -5.0),
        ("layer_us", 0.0), ("in_flight", 0),
    ],
)  # fmt: skip
def test_what_no_run_can_have_is_refused(name: str, value: float) -> None:
    with pytest.raises(InputError, match=r"^simulate: "):
        configure(None, (), {"pp": 2, "tp": 2, "layers": 4, name: value})
