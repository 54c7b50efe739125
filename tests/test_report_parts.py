"""What a page is made of, without a browser: texts, numbers, tables, drawings, packed events, figures, commands."""

from __future__ import annotations

import base64
import gzip
import json
import re
import string
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from command import run
from hypothesis import given
from hypothesis import strategies as st
from report_runs import HOSTILE, PP2, TP2, real

from nsysk3.errors import InputError
from nsysk3.report.blocks import Column, make_table
from nsysk3.report.catalogue import LANGUAGES, catalogue
from nsysk3.report.draw.svg import Svg, ticks
from nsysk3.report.html import json_block, render_report
from nsysk3.report.sections.timeline import pack
from nsysk3.report.text import clean, shown
from nsysk3.report.view import View
from nsysk3.result import Result
from nsysk3.run.redact import redact


def keys(texts: Any, prefix: str = "") -> Iterator[tuple[str, set[str]]]:
    for key, value in texts.items():
        if isinstance(value, dict):
            yield from keys(value, f"{prefix}{key}.")
        elif isinstance(value, str):
            yield f"{prefix}{key}", {field for _, field, _, _ in string.Formatter().parse(value) if field}


def test_languages_have_the_same_texts_with_the_same_fields() -> None:
    first, *others = (dict(keys(catalogue(lang).texts)) for lang in LANGUAGES)
    for other in others:
        assert {k: v for k, v in other.items() if k != "lang"} == {k: v for k, v in first.items() if k != "lang"}


def test_every_term_has_its_definition() -> None:
    texts = catalogue("en").texts
    assert set(texts["term"]) == set(texts["definition"])
    used = set(re.findall(r'href="#def-(\w+)"', render_report(real(PP2)) + render_report(real(TP2))))
    assert used <= set(texts["definition"])


def test_an_unknown_language_is_refused() -> None:
    with pytest.raises(InputError, match="no report language 'fr'"):
        catalogue("fr")


def test_sentences_of_the_analysis_are_translated() -> None:
    texts = catalogue("zh")
    said = "stage 0: 50.2 ms sending 32 activations of 112 MiB = 43.3 ms waiting for stage 1 + 6.9 ms transfer"
    assert texts.said(said) == (
        "Stage 0：发送 32 个激活（每个 112 MiB）共 50.2 ms = 等 Stage 1 43.3 ms + 传输 6.9 ms",
        "zh",
    )
    assert texts.said("something new") == ("something new", "en")
    assert catalogue("en").said(said) == (said, "en")


@given(st.text(max_size=300))
def test_clean_text_is_one_visible_line(text: str) -> None:
    seen = clean(text)
    seen.encode("utf-8")
    assert all(character.isprintable() or character.isspace() for character in seen)
    assert not set(seen) & set("\n\r\t\x00\u202e\u2028\ufeff")


def test_long_text_keeps_both_ends() -> None:
    assert clean("a" * 600 + "b" * 600, 100) == "a" * 50 + "…[1,100]…" + "b" * 50


@given(st.integers(min_value=1, max_value=10**13), st.sampled_from(["ms", "ms3", "us"]))
def test_something_is_never_shown_as_nothing(ns: int, kind: str) -> None:
    assert float(shown(ns, kind).lstrip("<").replace(",", "")) > 0


def test_null_has_its_reason_and_stays_null() -> None:
    columns = [Column("a_ns", "ms"), Column("b_ns", "ms")]
    rows = [{"a_ns": None, "b_ns": 0}, {"a_ns": None, "b_ns": None}]
    table = make_table(catalogue("en"), "ranks", rows, columns, reasons={"a_ns": "no clock"})
    assert [[cell.text for cell in row.cells] for row in table.rows] == [["not measured", "0"], ["not measured"] * 2]
    assert table.notes == ("no clock", "the trace does not say")
    assert table.rows[0].cells[0].raw == ""


def test_rows_beyond_the_limit_are_told() -> None:
    table = make_table(catalogue("en"), "ranks", [{"n": i} for i in range(30)], [Column("n", "count")], limit=10)
    assert len(table.rows) == 10
    assert table.more == "10 of 30 rows; the rest is in the result's files"


@pytest.mark.parametrize("text", HOSTILE)
def test_drawings_and_data_blocks_hold_hostile_text(text: str) -> None:
    svg = Svg(10)
    svg.rect(0, 0, 1, 1, "f", tip=text, data=text)
    svg.text(0, 0, text)
    drawn = str(svg.render(10, text))
    assert set(re.findall(r"<(\w+)", drawn)) == {"svg", "rect", "text"}
    block = str(json_block({"name": text.encode("utf-8", "replace").decode()}))
    assert "<" not in block
    assert ">" not in block


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(2, 10))
def test_ticks_are_few_and_inside(low: float, size: float, about: int) -> None:
    found = ticks(low, low + size, about)
    assert len(found) <= about + 1
    assert all(low - size * 1e-6 <= tick <= low + size * (1 + 1e-6) for tick in found)


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("server.api_key", "abc", "[redacted]"),
        ("env.HF_TOKEN", "abc", "[redacted]"),
        ("server.command", "serve --api-key abc --tp 4", "serve --api-key [redacted] --tp 4"),
        ("server.command", "docker run -e HF_TOKEN=abc img", "docker run -e HF_TOKEN=[redacted] img"),
        ("load.header", "Authorization: Bearer abc", "Authorization: Bearer [redacted]"),
        ("load.url", "http://user:abc@host/v1", "http://user:[redacted]@host/v1"),
        ("load.max_tokens", "16384", "16384"),
        ("server.tokenizer_path", "/data/tokenizer", "/data/tokenizer"),
        ("server.command", "serve --max-total-tokens 4096", "serve --max-total-tokens 4096"),
    ],
)
def test_secrets_of_a_manifest_stay_out_of_the_page(name: str, value: str, shown: str) -> None:
    assert redact(name, value) == shown


@pytest.mark.parametrize("text", ["x" * 10**6, "token" * 10**5, "a://" * 10**5, "token = " + " " * 10**6])
def test_hiding_secrets_takes_no_time_on_hostile_values(text: str) -> None:
    before = time.process_time()
    redact("server.command", text)
    assert time.process_time() - before < 2


def test_packed_events_come_back() -> None:
    result = real(PP2)
    events = result.tables["timeline"].sort("rank", "stream", "start_ns", "end_ns")
    data = json.loads(gzip.decompress(base64.b64decode(pack(View(result, catalogue("en")), events))))
    starts: list[int] = []
    for place, step in enumerate(data["step"]):
        same = place and data["lane"][place] == data["lane"][place - 1]
        starts.append(step + (starts[-1] if same else 0))
    assert starts == events["start_ns"].to_list()
    assert [data["names"][name] for name in data["name"]] == [clean(name, 240) for name in events["name"]]


def test_a_page_of_a_large_run_stays_small() -> None:
    # GIVEN 32 ranks and 100,000 events to draw
    result = real(TP2)
    events = result.tables["timeline"].drop("rank", "start_ns", "end_ns")
    n = 100_000
    many = pl.concat([events] * (n // events.height + 1)).head(n).with_columns(
        (pl.int_range(n) % 32).cast(pl.Int32).alias("rank"), (pl.int_range(n) * 7919 % 10**9).alias("start_ns")
    )  # fmt: skip
    many = many.with_columns((pl.col("start_ns") + 100 + pl.col("start_ns") % 50_000).alias("end_ns"))
    ranks = [result.document.ranks[0].model_copy(update={"world_rank": rank}) for rank in range(32)]
    big = Result(result.document.model_copy(update={"ranks": ranks}), {**result.tables, "timeline": many})
    # WHEN it is rendered THEN the page is small and says how much it holds
    text = render_report(big)
    assert len(text.encode()) < 6 * 10**6


def test_pages_are_the_same_every_time() -> None:
    assert render_report(real(PP2)) == render_report(real(PP2))


def test_result_without_optional_tables_still_makes_a_page() -> None:
    result = real(PP2)
    kept = {name: table for name, table in result.tables.items() if name not in ("timeline", "layer_rows", "forwards")}
    text = render_report(Result(result.document, kept))
    assert "this result has no timeline" in text
    assert "this result has no layers" in text
    assert "Micro-batches are not measured" in text


def test_figures_for_notebooks() -> None:
    pytest.importorskip("plotly", reason="no plotly")
    figures = real(PP2).figures
    budget = figures.time_budget()
    spent = sum(sum(bar.x) for bar in budget.data)
    assert spent == pytest.approx(real(PP2).tables["rank_metrics"]["window_ns"].sum() / 1e6)
    assert len(figures.pipeline().data) > 0
    assert len(figures.bubble().data) > 0
    assert len(real(TP2).figures.collectives().data) == 2
    assert len(real(TP2).figures.layers().data) == 1
    with pytest.raises(InputError, match="no collectives to draw"):
        figures.collectives()


def test_report_command_analyses_traces_and_reads_results(tmp_path: Path) -> None:
    saved = real(PP2).save(tmp_path / "run" / "analysis")
    assert run("report", tmp_path / "run", "-q").code == 0
    page = (saved / "report.html").read_text("utf-8")
    assert page == render_report(real(PP2))
    out = tmp_path / "page.html"
    assert run("report", PP2, "--lang", "zh", "--out", out, "-q").code == 0
    assert '<html lang="zh">' in out.read_text("utf-8")
    summary = run("report", saved, "--format", "md")
    assert summary.out.startswith("### nsysk3: 2 ranks")
    assert run("report", tmp_path / "nothing").code == 2
    assert run("report", PP2, "-q", "--out", tmp_path / "no" / "such.html").code == 3
    assert not list(tmp_path.glob(".*part"))
