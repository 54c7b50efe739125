"""What a reader of a comparison sees: nothing clipped, nothing said thrice, nothing praised that only moved."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import browser
from command import run
from compare_results import MS, made, manifest, rank, row
from report_runs import TP2, real

from nsysk3.compare import Comparison, compare
from nsysk3.compare.replaced import FUSED
from nsysk3.report.catalogue import catalogue
from nsysk3.report.compare_terminal import why_apart
from nsysk3.report.html import render_comparison
from nsysk3.report.sections.compare import changes
from nsysk3.report.sections.compare_runs import layers, pipelines
from nsysk3.report.view import View
from nsysk3.result import Result


def tp2(fused_ms: int, exposed_ms: int, pp: int = 1) -> Result:
    """Eight ranks; ``exposed_ms`` of communication, ``fused_ms`` inside fused kernels."""
    return made(
        [
            rank(
                world, world * pp // 8, exposed_comm_ns=exposed_ms * MS + world, comm_ns=exposed_ms * MS + world,
                compute_ns=300 * MS + exposed_ms * MS, fused_ns=fused_ms * MS, kernel_count=800 // pp, copy_ns=5 * MS,
            )
            for world in range(8)
        ],
        manifest=manifest(pp, 8 // pp, 8 // pp),
    )  # fmt: skip


def drawn(comparison: Comparison, label: str) -> str:
    """The forest's parts whose tip begins with the label."""
    (figure, *_) = changes(comparison, catalogue("en")).blocks
    parts = str(figure.wide).split("<")  # type: ignore[union-attr]
    return "".join(part for part in parts if f'data-tip="{label}' in part)


@pytest.mark.parametrize(("fused", "word"), [((0, 0), "good"), ((0, 40), "neutral"), ((40, 0), "neutral")])
def test_communication_that_moved_into_fused_kernels_is_not_praised(fused: tuple[int, int], word: str) -> None:
    comparison = compare(tp2(fused[0], 90), [tp2(fused[1], 50)])
    moved = row(comparison, "exposed_comm_ns")
    assert (moved.better, moved.deltas[0].verdict) == ("lower" if word == "good" else None, "lower")
    assert f"f {word}" in drawn(comparison, "Exposed communication")
    assert (moved.note == FUSED) == (word == "neutral")
    assert (FUSED in comparison.verdict[1]) == (word == "neutral")


def test_fewer_layers_on_a_rank_are_not_fewer_launches() -> None:
    comparison = compare(tp2(0, 50), [tp2(0, 50, pp=2)])
    across = row(comparison, "kernel_count")
    assert (across.group, across.deltas[0].like_for_like) == ("apart", False)
    assert "fewer layers" in (across.why_apart or "")
    said = why_apart([row(comparison, name) for name in ("kernel_count", "comm_share")])
    assert [each.split(":")[0] for each in said] == ["Kernels", "NCCL wall share"]
    assert [catalogue("zh").said(each)[0].split("：")[0] for each in said] == ["Kernel 数", "NCCL wall 占比"]
    alike = row(compare(tp2(0, 50), [tp2(0, 50)]), "kernel_count")
    assert (alike.group, alike.deltas[0].like_for_like, alike.why_apart) == ("launches", True, None)


def test_what_no_run_has_is_said_once() -> None:
    texts = catalogue("en")
    runs = [(label, View(tp2(0, 50), texts)) for label in ("a", "b", "c")]
    for section, name in ((pipelines, "pipeline"), (layers, "layers")):
        (block,) = section(runs, texts).blocks
        ((said, _),) = block.items  # type: ignore[union-attr]
        assert said == texts(f"section.{name}.absent")


@pytest.mark.parametrize("label", ["", "other: "])
def test_who_is_left_out_is_told_in_chinese(label: str) -> None:
    english = (
        "1 of 32 ranks left out (rank 5): its window holds forwards that are not whole: analyze with --window prefill"
    )
    said, lang = catalogue("zh").said(f"{label}{english}")
    assert lang == "zh"
    assert "32 个 Rank 中有 1 个未计入（Rank 5）：窗口中有不完整的 forward" in said
    for text in (f"no Copies, Idle / forward of PP2: {english}", f"nothing per forward: {english}"):
        said, _ = catalogue("zh").said(text)
        assert not [word for word in ("Copies", "Idle", "nothing", "no ", "of ", "left out") if word in said], said


def test_changes_from_nothing_are_told_in_chinese() -> None:
    english = "Fused per forward 0.00 ms -> 1.36 ms (+1.36 ms, 95 % interval +1.26 ms to +2.64 ms, no difference shown)"
    said, _ = catalogue("zh").said(f"{english}; Kernels 0 -> 7 (+7, too few samples for an interval)")
    assert said == (
        "融合（每个 forward） 0.00 ms -> 1.36 ms（+1.36 ms，95 % 区间 +1.26 ms 到 +2.64 ms，未见差异）；"
        "Kernel 数 0 -> 7（+7，样本太少，没有区间）"
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("compare", "a", "b", "--json", "--format", "html"), "--json and --format html: give one of them"),
        (("compare", "a", "b", "--json", "--format", "text"), "--json and --format text: give one of them"),
        (("compare", "a", "b", "--lang", "zh"), "--lang zh is for --format html: everything else is in English"),
        (("compare", "a", "b", "--json", "--lang", "zh"), "--lang zh is for --format html"),
        (("compare", "a", "b", "--format", "md", "--lang", "en"), "--lang en is for --format html"),
        (("report", "a", "--format", "md", "--lang", "zh"), "--lang zh is for --format html"),
        (("report", "a", "--format", "md", "--open"), "--format md without --out writes no file to show"),
    ],
)
def test_what_would_be_ignored_is_refused(words: tuple[str, ...], says: str) -> None:
    ran = run(*words)
    assert (ran.code, ran.out, len(ran.err.splitlines())) == (2, "", 1)
    assert says in ran.err


def test_tables_of_three_runs_fit_and_those_of_more_scroll(tmp_path: Path) -> None:
    result = real(TP2)
    with browser() as tab:
        tab.show(1280)
        for count in (3, 4):
            runs = [result] * count
            comparison = compare(runs[0], runs[1:], [f"run {number}" for number in range(count)])
            page = tmp_path / f"{count}.html"
            page.write_text(render_comparison(comparison, runs), "utf-8")
            tab.open(page)
            widths = tab.ask(
                "[...document.querySelectorAll('#headline .scroll')].map(part => [part.scrollWidth, part.clientWidth])"
            )
            assert [inside > width for inside, width in widths] == [count > 3] * len(widths)
            stuck = "getComputedStyle(document.querySelector('#headline tbody th')).position"
            assert tab.ask(stuck) == "sticky"
