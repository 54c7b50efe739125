"""``nsysk3 compare``: what it reads, prints, writes and gates."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from command import run
from compare_results import MS, made, manifest, rank, with_forwards
from conftest import FIXTURES
from report_runs import real

from nsysk3.compare import Comparison, compare
from nsysk3.compare.gate import Gate, check
from nsysk3.errors import InputError
from nsysk3.report.markdown import render_comparison, render_result, text
from nsysk3.result import Result

HOSTILE = "<script>alert(1)</script>|[x](javascript:1)`@you`\n# big\x1b[31m\u202e"


@pytest.fixture(scope="module")
def runs() -> list[Result]:
    rng = np.random.default_rng(4)
    return [
        with_forwards(pp, 4 // pp, level + rng.normal(0, 0.1, (4, 12)), calls=calls)
        for pp, level, calls in ((1, 8, 8), (2, 6, 4), (4, 5, 2))
    ]


@pytest.fixture(scope="module")
def two(runs: list[Result]) -> Comparison:
    return compare(runs[0], [runs[1]])


@pytest.fixture(scope="module")
def saved(runs: list[Result], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Result directories; the second lies in its run directory."""
    folder = tmp_path_factory.mktemp("runs")
    made = [folder / "pp1", folder / "pp2" / "analysis", folder / "pp4"]
    for result, path in zip(runs, made, strict=True):
        result.save(path)
    return [made[0], made[1].parent, made[2]]


# --- the command


def test_two_saved_results(saved: list[Path]) -> None:
    ran = run("compare", *saved[:2])
    assert (ran.code, ran.err) == (0, "")
    assert "AllReduce per active rank" in ran.out
    assert "AllReduce calls / forward" in ran.out
    assert max(map(len, ran.out.splitlines())) <= 100


def test_a_ladder_fits_100_columns(saved: list[Path]) -> None:
    ran = run("compare", *saved)
    assert ran.code == 0
    assert max(map(len, ran.out.splitlines())) <= 100
    assert "change against PP1, then against the run before it" in ran.out


def test_json_is_the_comparison(saved: list[Path], two: Comparison) -> None:
    ran = run("compare", *saved[:2], "--json")
    assert Comparison.model_validate_json(ran.out) == two


def test_traces_are_analysed_on_the_way(tmp_path: Path) -> None:
    out = tmp_path / "c.json"
    traces = [FIXTURES / "h200" / f"{name}.sqlite" for name in ("tp2", "pp2")]
    ran = run("compare", *traces, "--label", "TP2", "--label", "PP2", "--json", "--out", out, "-q")
    assert (ran.code, ran.out) == (0, "")
    assert Comparison.model_validate_json(out.read_text("utf-8")).labels == ["TP2", "PP2"]
    assert [path.name for path in tmp_path.iterdir()] == ["c.json"]


def test_results_of_another_window_are_not_passed_off(saved: list[Path]) -> None:
    ran = run("compare", *saved[:2], "--window", "steady")
    assert ran.code == 2
    assert "these results are of window capture; analyze the traces with steady" in ran.err
    assert run("compare", *saved[:2], "--window", "capture").code == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--label", "a"], "1 labels for 2 runs"),
        (["--fail-on", "nonsense"], "not METRIC>THRESHOLD"),
        (["--fail-on", "speed>+1%"], "no metric 'speed'"),
        (["--fail-on", "bubble_share/forward>+1%"], "compared per window"),
        (["--fail-on", "allreduce_count>+1ms"], "is not a time"),
        (["--out", "/nonexistent/x/y"], "cannot be written"),
    ],
)
def test_wrong_arguments_are_one_line(saved: list[Path], arguments: list[str], said: str) -> None:
    ran = run("compare", *saved[:2], *arguments)
    assert ran.code in (2, 3)
    assert said in ran.err
    assert len(ran.err.splitlines()) == 1


def test_a_missing_run_is_one_line(saved: list[Path], tmp_path: Path) -> None:
    ran = run("compare", saved[0], tmp_path / "no")
    assert (ran.code, len(ran.err.splitlines())) == (2, 1)


# --- gates


@pytest.mark.parametrize(
    ("expression", "state"),
    [
        ("allreduce_total_ns>+5%", "passed"),  # 64 -> 24 ms a forward
        ("allreduce_total_ns<-5%", "failed"),
        ("allreduce_total_ns<-62.5%", "passed"),  # inside the interval: not cleared
        ("allreduce_total_ns/forward < -10 ms", "failed"),
        ("allreduce_total_ns/forward<20ms", "passed"),
        ("allreduce_total_ns/forward>20ms", "failed"),
        ("allreduce_count/1k_tokens>0.4", "failed"),
        ("allreduce_count>+0%", "passed"),
        ("forward_p50_ns<-1s", "passed"),
        ("exposed_comm_share/window>1%", "failed"),
        ("allreduce_p95_ns>+1%", "undecided"),
        ("p2p_total_ns>+1%", "undecided"),  # the base has none
    ],
)
def test_gates_fail_only_beyond_the_interval(two: Comparison, expression: str, state: str) -> None:
    outcomes = check(two, [Gate.parse(expression)])
    assert [outcome.state for outcome in outcomes] == [state], outcomes[0].text


def test_gates_have_exit_codes(saved: list[Path]) -> None:
    worse = run("compare", saved[1], saved[0], "--fail-on", "allreduce_total_ns>+10%")
    assert worse.code == 1
    assert "gate: allreduce_total_ns>+10%: PP1 against PP2 per forward: failed, +1" in worse.err
    better = run("compare", *saved[:2], "--fail-on", "allreduce_total_ns>+10%", "--fail-on", "forward_p50_ns>+3%")
    assert better.code == 0
    assert better.err.count("passed") == 2
    assert run("compare", *saved, "--fail-on", "allreduce_count>+10%", "--fail-on", "allreduce_count<-70%").code == 1


def test_a_change_within_the_noise_does_not_fail() -> None:
    rng = np.random.default_rng(11)
    base, other = (with_forwards(1, 2, level + rng.normal(0, 2, (2, 8))) for level in (10, 10.6))
    outcome = check(compare(base, [other]), [Gate.parse("allreduce_total_ns>+1%")])[0]
    assert outcome.state == "passed"
    assert "95 % interval" in outcome.text


def test_too_few_samples_decide_nothing() -> None:
    few = made([rank(world, allreduce_total_ns=world * MS + MS) for world in range(2)])
    outcome = check(compare(few, [few]), [Gate.parse("allreduce_total_ns>+1%")])[0]
    assert outcome.state == "undecided"
    assert "an interval needs 3" in outcome.text


def test_gates_across_pp_degrees_say_what_they_are(two: Comparison) -> None:
    outcome = check(two, [Gate.parse("exposed_comm_share>+5%")])[0]
    assert "not like for like" in outcome.text


@pytest.mark.parametrize("expression", ["", "allreduce_count", "allreduce_count>", "allreduce_count>x", "a>>1", ">1"])
def test_bad_gates(expression: str) -> None:
    with pytest.raises(InputError):
        Gate.parse(expression)


# --- Markdown


def test_markdown_for_a_pull_request(saved: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "c.md"
    assert run("compare", *saved[:2], "--format", "md", "--out", out).code == 0
    lines = out.read_text("utf-8").splitlines()
    tables = [line for line in lines if line.startswith("|")]
    assert {line.count("|") for line in tables} == {8}
    assert any(line.startswith("| AllReduce calls / forward | 8 | 4 | -50.0% |") for line in tables)
    assert lines[0] == "### nsysk3: PP2 against PP1"
    assert sum("<details>" in line for line in lines) == sum("</details>" in line for line in lines) > 0


def test_markdown_of_a_ladder(runs: list[Result]) -> None:
    shown = render_comparison(compare(runs[0], runs[1:]))
    assert "-75.0%, from PP2 -50.0%" in shown


def test_markdown_of_one_run() -> None:
    shown = render_result(real(FIXTURES / "h200" / "pp2.sqlite"))
    assert shown.startswith("### nsysk3: 2 ranks, 2 stable, window capture\n")
    assert "stage 1: 161.9 ms receiving 8 activations" in shown
    assert "| stage 1 | exposed wait upstream |" in shown


@pytest.mark.parametrize("form", ["md", "text"])
def test_hostile_text_stays_text(form: str, tmp_path: Path) -> None:
    good = manifest(1, 4)
    bad = manifest(4, 1, image=HOSTILE)
    for name, said in (("a", good), ("b", bad)):
        made([rank(world) for world in range(4)], manifest=said, simulated=HOSTILE).save(tmp_path / name)
    ran = run("compare", tmp_path / "a", tmp_path / "b", "--format", form, "--label", "a", "--label", HOSTILE)
    assert ran.code == 0
    assert "\x1b" not in ran.out
    assert "\u202e" not in ran.out
    if form == "md":
        assert "<script" not in ran.out
        assert "](" not in ran.out.replace("\\](", "")
        assert "@you" not in ran.out


def test_markdown_escapes() -> None:
    assert text("a|b<c>*d*_e_`f`[g](h)#1@x & $y$ ~z~") == (
        "a\\|b&lt;c>\\*d\\*\\_e\\_\\`f\\`\\[g\\](h)\\#1@\u200bx &amp; \\$y\\$ \\~z\\~"
    )
    assert text("- x") == "\\- x"


def test_the_written_json_is_whole(saved: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "c.json"
    out.write_text("old")
    run("compare", *saved[:2], "--json", "--out", out)
    assert json.loads(out.read_text("utf-8"))["schema_version"] == 1
