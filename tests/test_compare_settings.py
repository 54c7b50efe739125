"""Runs of one layout that differ in a setting: single variables, replaced AllReduce, kernel counts."""

from __future__ import annotations

from io import StringIO
from typing import Any

import numpy as np
import polars as pl
import pytest
from compare_results import MS, made, manifest, pair, rank, with_forwards, with_reports
from compare_results import row as row_of
from rich.console import Console

from nsysk3.compare import Comparison, compare
from nsysk3.compare.model import Row
from nsysk3.report.catalogue import catalogue
from nsysk3.report.compare_terminal import TITLES, grouped, print_comparison
from nsysk3.report.markdown import render_comparison
from nsysk3.result import Result

SWITCHES = ("NSYSK3_SP", "SGLANG_K3_SP_COLLECTIVE", "SGLANG_K3_SP_ATTN_RES")
LABELS = ["SP off", "SP by NCCL", "SP by nsysk3"]
ENVIRONMENT = {"off": "000", "sglang": "011", "nsysk3": "111"}


def run(sp: str, *, pp: int = 1, counted: bool = True, **server: Any) -> Result:
    """Two ranks and eight forwards; with sequence parallelism 6 of 8 AllReduce become RS and AG, or fused kernels."""
    env = dict(zip(SWITCHES, ENVIRONMENT[sp], strict=True))
    result = with_forwards(pp, 2 // pp, np.full((2, 8), 8.0 if sp == "off" else 1.0), calls=8 if sp == "off" else 2)
    said = manifest(pp, 2 // pp, sp=sp, **{"env": env, **server})
    kernels = {"off": 100, "sglang": 112, "nsysk3": 88}[sp]
    roles = [(r, "allreduce", 64 if sp == "off" else 16, 1) for r in (0, 1)]
    roles += [(r, op, 48, 48 * MS) for r in (0, 1) for op in ("reduce_scatter", "all_gather") if sp == "sglang"]
    roles += [(r, "fused", 48, 48 * MS) for r in (0, 1) if sp == "nsysk3"]
    layers = result.forwards.select("rank", "forward").join(pl.DataFrame({"layer": [0, 1, 2]}), how="cross")
    layers = layers.with_columns(
        kernel_count=kernels // 4 + pl.col("layer"), exposed_comm_ns=MS, fused_ns=MS if sp == "nsysk3" else 0
    )
    tables = {
        **result.tables,
        "rank_metrics": result.rank_metrics.with_columns(kernel_count=pl.lit(8 * kernels, pl.Int64)),
        "forwards": result.forwards.with_columns(kernels=pl.lit(kernels, pl.Int64)),
        "roles": pl.DataFrame(roles, schema=["rank", "role", "count", "total_ns"], orient="row").cast(
            {"rank": pl.Int32}
        ),
        "layers": layers if counted else layers.drop("kernel_count"),
    }
    return Result(result.document.model_copy(update={"manifest": said}), tables)


@pytest.fixture(scope="module")
def three() -> Comparison:
    return compare(run("off"), [run("sglang"), run("nsysk3")], LABELS)


def row(comparison: Comparison, metric: str, scope: str = "forward") -> Row:
    return row_of(comparison, metric, scope)


def printed(comparison: Comparison) -> str:
    out = StringIO()
    print_comparison(comparison, Console(file=out, width=100, force_terminal=False))
    return out.getvalue()


def known(result: Result, **versions: str) -> Result:
    """The result with everything told that two runs should have in common."""
    ranks = [each.model_copy(update={"gpu_name": "H200"}) for each in result.document.ranks]
    return with_reports(Result(result.document.model_copy(update={"ranks": ranks}), result.tables), **versions)


def test_one_setting_that_differs_is_a_single_variable() -> None:
    found = pair(known(run("off")), known(run("nsysk3")))
    assert (found.single_variable, found.differences) == (True, ["sp off -> nsysk3"])
    assert found.summary == ["same layout: PP1 / TP2 / EP4", "only sp differs: off -> nsysk3"]


def test_what_is_not_known_may_differ_too(three: Comparison) -> None:
    assert [each.single_variable for each in three.comparability] == [None, None]
    assert "not a single-variable" not in " ".join(three.verdict)


def test_the_environment_is_a_setting_where_sp_does_not_explain_it() -> None:
    other = run("off", env={"NSYSK3_SP": "fused"})
    assert pair(run("off"), other).differences == ["env.nsysk3_sp 0 -> fused"]


@pytest.mark.parametrize("other", [{"chunked_prefill_size": 16384}, {"pp": 2}, {"exporter": "2026.1"}])
def test_more_than_one_setting_another_layout_or_another_profiler_is_none(other: dict[str, Any]) -> None:
    changed = known(run("off"), **other) if "exporter" in other else known(run("nsysk3", **other))
    found = pair(known(run("off")), changed)
    assert found.single_variable is False
    assert any(line.endswith(": not a single-variable comparison") for line in found.summary)


def test_communication_is_an_ordinary_group_at_one_pp_degree(three: Comparison) -> None:
    found = row(three, "exposed_comm_ns")
    assert (found.group, found.why_apart) == ("comm", None)
    assert [group for group, _ in grouped(three)][:3] == ["headline", "forward", "comm"]
    for text in (printed(three), render_comparison(three)):
        assert TITLES["comm"] in text
        assert TITLES["apart"] not in text
    across = compare(run("off"), [run("off", pp=2)])
    assert row(across, "exposed_comm_share", "window").group == "apart"
    assert TITLES["apart"] in printed(across)


def test_kernels_are_counted(three: Comparison) -> None:
    assert [value.value for value in row(three, "kernel_count").values] == [100, 112, 88]
    assert [value.value for value in row(three, "kernel_count", "window").values] == [800, 896, 704]
    assert [value.value for value in row(three, "layer_kernel_count").values] == [26, 29, 23]
    assert [value.value for value in row(three, "reduce_scatter_count", "window").values] == [0, 48, 0]
    assert [value.value for value in row(three, "fused_count").values] == [0, 0, 6]


def test_a_result_that_does_not_count_kernels_of_layers_compares() -> None:
    found = row(compare(run("off"), [run("sglang", counted=False)]), "layer_kernel_count")
    assert [value.value for value in found.values] == [26, None]
    assert found.values[1].reason == "the result does not count the kernels of its layers: analyze again"


def test_whole_graphs_hide_kernels() -> None:
    graphs, clear = (made([rank(0, graph_ns=ns, kernel_count=5)]) for ns in (1000, 0))
    found = row(compare(graphs, [clear]), "kernel_count", "window")
    assert [value.value for value in found.values] == [None, 5]
    assert "their kernels are unknown" in (found.values[0].reason or "")


def test_replaced_allreduce_is_no_communication_saved(three: Comparison) -> None:
    changed, limits = three.verdict
    assert changed.startswith("SP off -> SP by NCCL -> SP by nsysk3 at PP1 / TP2 / EP4, per active rank")
    assert "ReduceScatter and AllGather took the place of most AllReduce; in SP by nsysk3, fused kernels" in changed
    assert "AllReduce total" not in changed
    assert "Exposed communication per forward 3.00 ms -> 3.00 ms -> 3.00 ms" in changed
    assert "Fused per forward 0.00 ms -> 0.00 ms -> 3.00 ms" in changed
    assert "fused kernels communicate too, and their time" in limits
    total = row(three, "allreduce_total_ns")
    assert (total.better, "other calls" in (total.note or "")) == (None, True)
    assert row(compare(run("off"), [run("off")]), "allreduce_total_ns").better == "lower"


def test_chinese_has_all_of_it(three: Comparison) -> None:
    texts = catalogue("zh")
    lines = [*three.verdict, *(line for each in three.comparability for line in each.summary)]
    lines += [each.note for each in three.rows if each.note]
    said = [texts.said(line) for line in lines]
    assert not [text for text, lang in said if lang != "zh" or " took " in text or "per forward" in text]
