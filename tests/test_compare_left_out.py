"""Who is left out is said: stages without a stable rank, ranks without a trace, ranks that are not stable."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from compare_results import made, manifest, rank, row, with_forwards
from typer.testing import CliRunner

from nsysk3.cli import app
from nsysk3.compare import compare
from nsysk3.report.catalogue import catalogue
from nsysk3.report.html import render_comparison
from nsysk3.report.markdown import render_result
from nsysk3.result import Result
from nsysk3.result.model import ProblemInfo

WHY = "recorded 60.0 % of the run"


def run(pp: int = 4, tp: int = 1) -> Result:
    """Four ranks, each with six forwards."""
    return with_forwards(pp, tp, np.full((4, 6), 8.0))


def unstable(result: Result, worlds: dict[int, str]) -> Result:
    """The same with these ranks not stable, for these reasons."""
    ranks = [
        each.model_copy(update={"stable": False, "reason": worlds[each.world_rank]})
        if each.world_rank in worlds
        else each
        for each in result.document.ranks
    ]
    stable = ~pl.col("world_rank").is_in(list(worlds))
    tables = {**result.tables, "rank_metrics": result.rank_metrics.with_columns(stable=stable)}
    return Result(result.document.model_copy(update={"ranks": ranks}), tables)


def without(result: Result, first: int) -> Result:
    """The same without the traces of ranks from ``first`` on."""
    tables = {"rank_metrics": result.rank_metrics.filter(pl.col("world_rank") < first)}
    tables |= {name: result.tables[name].filter(pl.col("rank") < first) for name in ("forwards", "collectives")}
    return Result(result.document.model_copy(update={"ranks": result.document.ranks[:first]}), tables)


@pytest.mark.parametrize("other", [unstable(run(), {2: WHY, 3: WHY}), without(run(), 2)], ids=["unstable", "missing"])
def test_whole_stages_left_out_leave_no_number_per_forward(other: Result) -> None:
    comparison = compare(run(), [other])
    for metric, scope in (("window_ns", "1k_tokens"), ("forward_p50_ns", "forward"), ("allreduce_total_ns", "forward")):
        values = row(comparison, metric, scope).values
        assert values[0].value is not None
        assert (values[1].value, values[1].reason) == (None, "no stable rank of stages 2, 3")
    total = row(comparison, "allreduce_total_ns")
    assert total.values[1].value is not None
    assert total.note == "other: no stable rank of stages 2, 3"
    said, limits = comparison.verdict
    assert "(median over stable ranks; other: no stable rank of stages 2, 3): " in said
    assert said.count("no stable rank") == 1
    assert "Wall time" not in said
    assert "other: no stable rank of stages 2, 3" in limits


def test_a_stage_with_a_stable_rank_has_numbers_per_forward() -> None:
    comparison = compare(run(2, 2), [unstable(run(2, 2), {3: WHY})])
    assert row(comparison, "forward_p50_ns", "forward").values[1].ranks == 3
    assert "no stable rank" not in " ".join(comparison.verdict)


def test_where_stages_are_not_known_none_is_named() -> None:
    def of(count: int) -> Result:
        return made([rank(world, pp_rank=None, p2p_count=1) for world in range(count)], manifest=manifest(2, 2))

    assert "no stable rank of some stages, and which is not known" in compare(of(4), [of(2)]).verdict[1]
    # Three of four ranks are of both stages, whichever they are.
    assert "no stable rank" not in compare(of(4), [of(3)]).verdict[1]


def test_the_limits_count_who_is_left_out() -> None:
    one, same = unstable(run(1, 4), {2: WHY}), unstable(run(1, 4), {2: WHY, 3: WHY})
    unlike = unstable(run(1, 4), {1: "31 AllReduce where its stage has 33", 3: WHY})
    for other, told in (
        (one, f"other: 1 of 4 ranks not stable and left out (rank 2: {WHY})"),
        (same, f"other: 2 of 4 ranks not stable and left out (ranks 2, 3: {WHY})"),
        (
            unlike,
            "other: 2 of 4 ranks not stable and left out (ranks 1, 3, the first: 31 AllReduce where its stage has 33)",
        ),
        (without(run(1, 4), 3), "the traces of other hold 3 of 4 ranks"),
    ):
        assert told in compare(run(1, 4), [other]).verdict[1]


def test_the_chinese_page_says_it_too() -> None:
    runs = [run(), unstable(run(), {2: WHY, 3: WHY}), without(run(), 2)]
    comparison = compare(runs[0], runs[1:], ("A", "B", "C"))
    page = render_comparison(comparison, runs, lang="zh")
    for text in (
        "B：Stage 2, 3 没有稳定的 Rank",
        "4 个 Rank 中有 2 个不稳定，未计入",
        "C 的 Trace 只含 4 个 Rank 中的 2 个",
    ):
        assert text in page
    for sentence in comparison.verdict:
        told = catalogue("zh").said(sentence)[0]
        assert not {"stable", "recorded", "hold", "changes"} & set(told.split()), told


def test_the_reason_is_that_of_the_column_below() -> None:
    calls = run(1, 4)
    split = calls.tables["collectives"].with_columns(
        pl.lit(None, pl.Int64).alias("wait_ns"), pl.lit(None, pl.Int64).alias("transfer_ns")
    )
    result = Result(calls.document, {**calls.tables, "collectives": split})
    reason = "a rank has such communication, and no partner of it is in this run"
    told = Result(
        calls.document.model_copy(update={"not_measured": {"wait_collective_ns": reason}}), dict(result.tables)
    )
    assert row(compare(calls, [told]), "allreduce_wait_ns").values[1].reason == reason
    found = row(compare(calls, [result]), "allreduce_transfer_ns").values[1].reason
    assert found == "some AllReduce kernels found no partner"


def problems(result: Result, count: int, **update: object) -> Result:
    """The same with so many inputs that gave no rank."""
    listed = [ProblemInfo(path=f"r{i}", message=f"r{i}: no rank") for i in range(count)]
    summary = {**result.document.summary, "median": {}}
    document = result.document.model_copy(update={"problems": listed, "summary": summary, **update})
    empty = pl.DataFrame(schema={"group": pl.String, "bucket": pl.String, "ns": pl.Float64, "share": pl.Float64})
    return Result(document, {**result.tables, "budget_summary": empty})


def test_markdown_of_a_run_names_what_is_missing() -> None:
    text = render_result(problems(run(), 5, simulated="simulated"))
    assert "**Simulated**\n" in text
    assert "- **Problem**: r0: no rank\n" in text
    assert "- **Problem**: r2: no rank\n- **Problem**: 2 more\n" in text
    assert "**Simulated, calibrated**" in render_result(problems(run(), 0, simulated="simulated, calibrated"))
    assert "**Simulated**: by hand" in render_result(problems(run(), 0, simulated="by hand"))
    assert "Missing" not in render_result(problems(run(), 0))


def test_commands(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in "ab"]
    run(1, 4).save(tmp_path / "a")
    problems(run(1, 4), 1).save(tmp_path / "b")
    runner = CliRunner()
    gated = runner.invoke(app, ["compare", *paths, "-q", "--fail-on", "allreduce_total_ns<+50%"])
    assert (gated.exit_code, "r0: no rank" in gated.stderr, "failed" in gated.stderr) == (1, True, True)
    # A gate that holds leaves the exit code of a run that lacks ranks.
    passed = runner.invoke(app, ["compare", *paths, "-q", "--fail-on", "allreduce_total_ns>+50%"])
    assert passed.exit_code == 2
    for arguments, told in (
        (["compare", *paths, "-q", "--label", " ", "--label", "b"], "a label is empty"),
        (["report", *paths, "-q"], "nsysk3 compare"),
    ):
        refused = runner.invoke(app, arguments)
        assert refused.exception is not None
        assert told in f"{refused.exception}{refused.stderr}"
