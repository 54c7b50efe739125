"""What differs between two runs besides the numbers: ranks that pair, settings, layouts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from compare_results import LOAD, MS, made, manifest, pair, plain, published, rank, row, with_forwards, with_reports
from conftest import FIXTURES
from report_runs import real

from nsysk3.compare import compare
from nsysk3.result import Result

# --- the same run twice, and a run before and after


@pytest.mark.parametrize("kind", ["published", "forwards", "real"])
def test_a_run_does_not_differ_from_itself(kind: str) -> None:
    if kind == "real":
        run = real(FIXTURES / "h200" / "tp2.sqlite")
    elif kind == "published":
        run = published(8, 4, 66, 392.3, 5.83)
    else:
        run = with_forwards(2, 2, 5 + np.random.default_rng(2).normal(0, 1, (4, 10)))
    comparison = compare(run, [run])
    assert {each.deltas[0].verdict for each in comparison.rows} <= {
        "no difference shown",
        "not enough samples",
        "not known",
    }
    assert {each.deltas[0].change for each in comparison.rows} <= {0, None}
    assert comparison.comparability[0].paired


def test_before_and_after_ranks_pair() -> None:
    # Ranks differ by far more than the change: only pairing shows it.
    own = np.linspace(100, 900, 16)
    before, after, deeper = (
        made(
            [
                rank(world, 0, allreduce_total_ns=round((ms + gain) * MS), allreduce_count=9)
                for world, ms in enumerate(own)
            ],
            manifest=manifest(pp, 16 // pp),
        )
        for pp, gain in ((1, 0), (1, -5), (2, -5))
    )
    comparison = compare(before, [after, deeper], ["before", "after", "deeper"])
    assert [pair.paired for pair in comparison.comparability] == [True, False]
    assert [delta.verdict for delta in row(comparison, "allreduce_total_ns").deltas] == ["lower", "no difference shown"]


# --- settings


def test_only_pp_and_tp_differ() -> None:
    found = pair(with_reports(plain(manifest(1, 4))), with_reports(plain(manifest(4, 1))))
    assert (found.single_variable, found.differences, found.unknown) == (True, [], [])
    assert "besides PP and TP nothing that the manifests record differs" in found.summary


def test_ep_is_a_second_variable() -> None:
    found = pair(plain(manifest(8, 4)), plain(manifest(16, 2, ep=2)))
    assert found.single_variable is False
    assert "EP4 -> EP2" in found.differences
    assert "EP4 -> EP2: not a single-variable comparison" in found.summary


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"server": {"moe_runner_backend": "marlin"}}, "MoE runner backend flashinfer_mxfp4 -> marlin"),
        ({"server": {"chunked_prefill_size": 16384}}, "chunk 8192 -> 16384"),
        ({"server": {"image": "sglang:old"}}, "image sglang:k3 -> sglang:old"),
        ({"load": {**LOAD, "concurrency": 16}}, "concurrency 8 -> 16"),
        ({"versions": {"sglang": "0.5.23"}}, "SGLang version 0.5.17 -> 0.5.23"),
    ],
)
def test_what_differs_is_named(changed: dict[str, Any], said: str) -> None:
    other = manifest(4, 1)
    other |= {key: {**other[key], **value} for key, value in changed.items()}
    found = pair(plain(manifest(1, 4)), plain(other))
    assert found.single_variable is False
    assert said in found.differences


def test_settings_nobody_listed_are_compared_too() -> None:
    options = {"trace": "cuda,nvtx", "cuda-graph-trace": "node", "out_dir": "/a"}
    base, other = manifest(1, 4), manifest(4, 1, pp_max_micro_batch_size=1)
    base["server"]["pp_max_micro_batch_size"] = 2
    base["nsys"] = {"options": options}
    other["nsys"] = {"options": {**options, "cuda-graph-trace": "graph", "out_dir": "/b"}}
    found = pair(plain(base), plain(other))
    assert "pp_max_micro_batch_size 2 -> 1" in found.differences
    assert "options.cuda_graph_trace node -> graph" in found.differences
    assert not any("out_dir" in text for text in found.differences)


def test_without_a_manifest_nothing_is_claimed() -> None:
    found = pair(plain(None), plain(manifest(4, 1)))
    assert found.single_variable is None
    assert {"model", "chunk", "concurrency"} <= set(found.unknown)
    assert any("no manifest for" in line for line in found.summary)
    comparison = compare(plain(None), [plain(manifest(4, 1))])
    assert comparison.base.layout.source == "inferred"
    assert comparison.base.layout.text == "PP1 / TP4"
    assert "no manifest for PP1" in comparison.verdict[1]


def test_simulated_against_real_is_said() -> None:
    found = pair(plain(manifest(1, 4)), plain(manifest(4, 1), simulated="calibrated on published figures"))
    assert "one run is simulated, the other real" in found.differences
    both = compare(*(plain(manifest(pp, 4 // pp), simulated="made up") for pp in (1, 4)))
    assert both.verdict[1].startswith("Limits: all runs are simulated")


def test_windows_that_differ_are_named() -> None:
    found = pair(plain(manifest(1, 4)), plain(manifest(4, 1), window="prefill"))
    assert "window capture -> prefill" in found.differences


# --- layouts


def test_layouts_are_inferred_from_stages() -> None:
    comparison = compare(with_forwards(2, 2, np.ones((4, 3)), bare=True), [with_forwards(4, 1, np.ones((4, 3)))])
    assert comparison.base.layout.model_dump(exclude={"note"}) == {
        "pp": 2, "tp": 2, "ep": None, "ranks": 4, "source": "inferred", "text": "PP2 / TP2",
    }  # fmt: skip
    assert comparison.others[0].layout.source == "manifest"


def test_a_layout_nobody_knows_is_not_guessed() -> None:
    run = made([rank(world, pp_rank=None, p2p_count=3) for world in range(4)])
    comparison = compare(run, [run])
    assert comparison.base.layout.pp is None
    assert comparison.labels == ["base", "other"]
    assert not comparison.comparability[0].paired
    assert not row(comparison, "exposed_comm_share").deltas[0].like_for_like


def test_a_manifest_the_trace_contradicts_is_doubted() -> None:
    run = with_forwards(4, 1, np.ones((4, 3)))
    document = run.document.model_copy(update={"manifest": manifest(2, 2)})
    assert "the trace shows 4 stages" in (compare(Result(document, run.tables), [run]).base.layout.note or "")
