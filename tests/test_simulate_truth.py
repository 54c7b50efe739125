"""What the analysis says of a simulated run is what really happened in it: every metric of docs/metrics.md."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from simulated import Simulated, budget, make

from nsysk3.simulate.config import layer_split

# Shapes that differ in everything that matters, small enough for every one to take a second.
SHAPES = [
    {"pp": 1, "tp": 8, "nodes": 2, "layers": 10, "micro_batches": 4},
    {"pp": 4, "tp": 2, "nodes": 4, "layers": 13, "micro_batches": 7},
    {"pp": 8, "tp": 1, "nodes": 4, "layers": 24, "micro_batches": 5, "in_flight": 3},
    {"pp": 3, "tp": 4, "nodes": 3, "layers": 9, "micro_batches": 6, "layer_us": 400.0},
    {"pp": 2, "tp": 2, "nodes": 1, "layers": 8, "micro_batches": 5},
]
# A wait is a difference of moments on clocks that run up to 50 ppm fast or slow, 100 ppm apart.
RATE = 1e-4


@pytest.fixture(scope="module", params=range(len(SHAPES)))
def exact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Simulated:
    """Runs whose clocks are offset but neither drift nor wander: durations are exact."""
    shape = SHAPES[request.param]
    folder = tmp_path_factory.mktemp("exact")
    return make(folder, **shape, offset_ms=50.0, drift_ppm=0.0, wander_ns=0.0, seed=request.param)


def test_every_kernel_is_there_once_with_its_role_layer_and_forward(exact: Simulated) -> None:
    kernels = exact.kernels
    assert kernels["role"].null_count() == 0
    assert kernels["true_role"].null_count() == 0
    assert (kernels["role"].cast(pl.String) == kernels["true_role"]).all()
    layers = kernels.filter(pl.col("true_layer") >= 0)
    assert (layers["layer"] == layers["true_layer"]).all()
    assert (layers["forward"] == layers["true_forward"]).all()
    outside = kernels.filter(pl.col("true_layer") < 0)
    assert outside["layer"].null_count() == outside.height


def test_allreduce_counts_totals_medians_and_kinds(exact: Simulated) -> None:
    ranks = exact.result.tables["rank_metrics"].sort("world_rank")
    for row, true in zip(ranks.iter_rows(named=True), exact.facts["ranks"], strict=True):
        assert row["allreduce_count"] == true["allreduce_count"]
        assert row["allreduce_total_ns"] == true["allreduce_total_ns"]
        assert row["allreduce_p50_ns"] == true["allreduce_p50_ns"]
        assert row["p2p_total_ns"] == true["p2p_ns"]
    reduced = exact.kernels.filter(pl.col("true_role") == "allreduce")
    assert (reduced["collective_kind"].cast(pl.String) == reduced["true_purpose"]).all()
    moe = reduced.filter(pl.col("true_purpose") == "moe")
    for rank, share in ranks.select("world_rank", "moe_share").iter_rows():
        spent = [int((pl.Series(f["end"]) - pl.Series(f["start"])).sum()) for f in
                 (frame.filter(pl.col("rank") == rank) for frame in (moe, reduced))]  # fmt: skip
        assert share is None or share == pytest.approx(spent[0] / spent[1], abs=1e-12)


def test_instances_of_collectives_are_the_true_ones(exact: Simulated) -> None:
    found = exact.found.collectives.with_columns(pl.col("event").cast(pl.Int64))
    true = exact.kernels.select("event", "true_stage", "true_role", "true_instance")
    both = found.join(true, on="event")
    theirs = both.group_by("communicator", "role", "seq").agg(pl.struct("true_stage", "true_instance").n_unique())
    ours = both.group_by("true_stage", "role", "true_instance").agg(pl.struct("communicator", "seq").n_unique())
    assert (theirs["true_stage"] == 1).all()
    assert (ours["communicator"] == 1).all()


def test_pairs_are_the_true_ones_and_of_the_true_kind(exact: Simulated) -> None:
    pairs, kernels = exact.found.pairs, exact.kernels
    messages = kernels.filter(pl.col("true_role") == "p2p")
    assert 2 * pairs.height == messages.height
    true = kernels.select("event", "true_instance", "true_purpose", "true_bytes", "true_forward")
    for side in ("send", "recv"):
        pairs = pairs.join(true.rename(lambda name, side=side: f"{side}_{name}"), on=f"{side}_event")
    assert (pairs["send_true_instance"] == pairs["recv_true_instance"]).all()
    assert (pairs["send_true_forward"] == pairs["recv_true_forward"]).all()
    assert (pairs["kind"] == pairs["send_true_purpose"]).all()
    assert (pairs["bytes"] == pairs["send_true_bytes"]).all()


def test_waits_are_the_true_ones_within_the_clock_uncertainty(exact: Simulated) -> None:
    comm = exact.kernels.filter(pl.col("true_wait_kind") != "none")
    error = (comm["wait_ns"] - comm["true_wait_ns"]).abs()
    assert error.null_count() == 0
    assert (error <= comm["uncertainty_ns"]).all()
    resolved = comm.filter(pl.col("wait_state") != "unresolved")
    assert (resolved["wait_state"] == "wait_" + resolved["true_wait_kind"]).all()


def test_the_budget_is_the_painted_one(exact: Simulated) -> None:
    """Exactly where one report saw both sides; else each bucket within the uncertainty of the waits in it."""
    table = exact.result.tables["budget"]
    work = exact.truth.filter(pl.col("role") != "copy")
    doubts = exact.kernels.group_by("rank").agg(pl.col("uncertainty_ns").fill_null(0).sum(), pl.len())
    doubt = {rank: total for rank, total, _ in doubts.iter_rows()}
    for (rank,), mine in exact.truth.group_by("rank"):
        window = work.filter(pl.col("rank") == rank).select(pl.col("start_ns").min(), pl.col("end_ns").max()).row(0)
        true = budget(mine, *window)
        said = dict(table.filter(pl.col("rank") == rank).select("bucket", "ns").iter_rows())
        assert sum(said.values()) == window[1] - window[0]
        idle = sum(ns for name, ns in said.items() if name.startswith("idle_"))
        assert idle == true.pop("idle")
        assert said["compute"] == true.pop("compute")
        assert said["overlap"] == true.pop("overlap")
        exposed = {name: ns for name, ns in said.items() if name.startswith("exposed_")}
        assert sum(exposed.values()) == sum(ns for name, ns in true.items() if name.startswith("exposed_"))
        for name, ns in true.items():
            assert abs(said[name] - ns) <= doubt[rank], name


def test_stages_micro_batches_and_busy_time(exact: Simulated) -> None:
    config = exact.facts["config"]
    if config["pp"] == 1:
        pytest.skip("no pipeline")
    table = exact.result.tables["pipeline"]
    assert table["micro_batches"].unique().to_list() == [config["micro_batches"]]
    ideal = (config["pp"] - 1) / (config["micro_batches"] + config["pp"] - 1)
    assert table["ideal_bubble_share"].to_list() == pytest.approx([ideal] * table.height)
    busy = exact.truth.filter(~pl.col("role").is_in(["p2p", "copy"]))
    for rank, stage, said in table.select("rank", "stage", "busy_ns").iter_rows():
        assert stage == rank // config["tp"]
        mine = busy.filter(pl.col("rank") == rank)
        window = mine.select(pl.col("start_ns").min(), pl.col("end_ns").max()).row(0)
        true = budget(mine.with_columns(pl.lit(0, pl.Int64).alias("wait_ns")), *window)
        assert said == sum(ns for name, ns in true.items() if name != "idle")


def test_forwards_are_whole_and_as_many_as_micro_batches(exact: Simulated) -> None:
    forwards = exact.result.tables["forwards"]
    assert forwards["whole"].all()
    assert set(forwards.group_by("rank").len()["len"]) == {exact.facts["config"]["micro_batches"]}
    assert set(forwards["tokens"]) == {8192}


def test_layers_per_stage_follow_sglang() -> None:
    assert [len(part) for part in layer_split(93, 8)] == [11, 11, 11, 12, 12, 12, 12, 12]
    assert [len(part) for part in layer_split(93, 1)] == [93]
    assert layer_split(93, 16)[-1].stop == 93


CLOCKS = [
    (seed, faults)
    for seed in range(4)
    for faults in ((), ("lost-kernels=0.02",), ("cut-window=1:0.7",))
    if seed < 2 or not faults
]


@pytest.mark.parametrize(("seed", "faults"), CLOCKS)
def test_truth_lies_inside_the_stated_uncertainty(seed: int, faults: tuple[str, ...], tmp_path: Path) -> None:
    """Offsets up to 100 ms, drift up to 50 ppm, wander, lost kernels and cut windows: 95 % of the waits, and clocks."""
    shape = {"pp": 4, "tp": 4, "layers": 16, "micro_batches": 6} if seed % 2 else {"pp": 8, "tp": 2, "layers": 24}
    run = make(tmp_path, *faults, **shape, nodes=4, offset_ms=100.0, drift_ppm=50.0, wander_ns=2_000.0, seed=seed)
    comm = run.kernels.filter((pl.col("true_wait_kind") != "none") & pl.col("wait_ns").is_not_null())
    assert comm.height > 500
    allowed = comm["uncertainty_ns"] + 200 + RATE * comm["true_wait_ns"]
    inside = ((comm["wait_ns"] - comm["true_wait_ns"]).abs() <= allowed).mean()
    assert inside >= 0.95
    clocks, first = run.found.clocks, run.facts["clocks"][0]
    moments = np.linspace(run.facts["clocks"][0]["capture_ns"][0], run.facts["end_ns"], 21)
    for report, clock in enumerate(run.facts["clocks"]):
        apart = clock["offset_ns"] - first["offset_ns"]
        true = apart + (clock["drift_ppm"] - first["drift_ppm"]) * 1e-6 * moments
        shown = run.facts["epoch_ns"] - clocks.origin_ns
        said = clocks.offset_ns[report] + clocks.drift[report] * (moments + shown)
        assert np.isfinite(clocks.between[0, report])
        assert (np.abs(said - true) <= clocks.between[0, report]).mean() >= 0.95
