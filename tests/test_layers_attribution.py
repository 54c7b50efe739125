"""Kernels to layers by the ranges around their launch."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from random import Random

import numpy as np
import polars as pl
import pytest
from exports import ALLREDUCE, GEMM, SENDRECV, Export
from hypothesis import given
from hypothesis import strategies as st
from layer_runs import PP2, SGLANG_PP2, SGLANG_TP2, TP2, attributed, real
from layered import attribute_by_ranges

from nsysk3.analysis.attribution import (
    BETWEEN,
    BOUNDARY,
    LAUNCH_UNKNOWN,
    NO_NVTX,
    OTHER_THREAD,
    OUTSIDE,
)
from nsysk3.analysis.forward_ranges import forward_ranges
from nsysk3.analysis.layers import attributed_shares, unattributed_reasons
from nsysk3.analysis.marked_ranges import main_stack, mark_ranges

ATTRIBUTED = ["layer", "module", "forward", "reason"]


def _kernels(export: Export, folder: Path, **options: str) -> list[tuple[object, ...]]:
    """(layer, module, forward, reason) of each kernel, by time."""
    path = export.write(folder / "a.sqlite")
    rows = attributed(path, layer_regex=options.get("layer_regex")).kernels.sort("start").select(ATTRIBUTED)
    return [tuple(row) for row in rows.with_columns(pl.col("module", "reason").cast(pl.String)).iter_rows()]


def _layer(export: Export, number: int, start: float, end: float, **where: int) -> Export:
    return export.nvtx(f"model.layers.{number}", start, end, **where)


def test_every_kernel_of_tp2_between_the_head_and_the_end_has_its_layer() -> None:
    kernels = real(TP2).kernels
    assert kernels.filter(pl.col("layer").is_not_null()).group_by("rank", "forward", "layer").len()[
        "len"
    ].to_list() == [11] * (2 * 8 * 16)
    assert set(kernels.filter(pl.col("layer").is_null())["reason"].cast(pl.String)) == {BETWEEN}
    assert sorted(kernels["layer"].drop_nulls().unique()) == list(range(16))
    assert set(kernels["module"].cast(pl.String).drop_nulls().unique()) == {"self_attn", "mlp"}
    assert attributed_shares(real(TP2).events)["attributed_share"].min() > 0.99  # type: ignore[operator]


def test_layer_numbers_are_global_over_pipeline_stages() -> None:
    for path, first, second in ((PP2, range(10), range(10, 16)), (SGLANG_PP2, range(4), range(4, 8))):
        by_rank = (
            real(path).kernels.filter(pl.col("layer").is_not_null()).group_by("rank").agg(pl.col("layer").unique())
        )
        assert {rank: sorted(layers) for rank, layers in by_rank.iter_rows()} == {0: list(first), 1: list(second)}


def test_sglangs_modules_are_found_and_what_is_left_over_has_a_reason() -> None:
    kernels = real(SGLANG_TP2).kernels
    attention = kernels.filter(pl.col("category").cast(pl.String) == "KDA")["module"].cast(pl.String)
    assert set(attention) == {"self_attn.attn"}
    assert kernels.filter(pl.col("layer").is_null() & pl.col("reason").is_null()).is_empty()
    assert kernels.filter(pl.col("layer").is_not_null() & pl.col("reason").is_not_null()).is_empty()
    embedding = kernels.filter(pl.col("category").cast(pl.String) == "EMBED")
    assert set(embedding["module"].cast(pl.String)) == {"embed_tokens"}
    assert set(embedding["reason"].cast(pl.String)) == {BETWEEN}
    reasons = unattributed_reasons(real(SGLANG_PP2).events)
    assert reasons.filter(pl.col("reason") == BOUNDARY)["kernels"].to_list() == [64, 64]


def test_a_launch_decides_and_not_what_is_open_while_the_kernel_runs(tmp_path: Path) -> None:
    export = _layer(_layer(Export(), 0, 0, 10), 1, 10, 20)
    export.kernel(GEMM, 12, 18, launch=(2, 3)).kernel(GEMM, 30, 40, launch=(12, 13))
    assert [row[0] for row in _kernels(export, tmp_path)] == [0, 1]


def test_the_innermost_range_gives_the_module(tmp_path: Path) -> None:
    export = _layer(Export(), 3, 0, 100).nvtx("model.layers.3.mlp", 10, 50, registered=True)
    export.nvtx("ncclAllReduce", 20, 30, registered=True)
    export.kernel(ALLREDUCE, 200, 210, launch=(21, 22)).kernel(GEMM, 300, 310, launch=(60, 61))
    assert [row[:2] for row in _kernels(export, tmp_path)] == [(3, "mlp"), (3, None)]


def test_each_reason(tmp_path: Path) -> None:
    export = Export().nvtx("nsysk3.forward 0", 0, 100).nvtx("model.layers.0", 10, 20)
    export.kernel(GEMM, 200, 210, launch=(5, 6))  # inside the forward, before its layer
    export.kernel(GEMM, 220, 230, launch=(150, 151))
    export.kernel(GEMM, 240, 250)
    export.kernel(GEMM, 260, 270, launch=(12, 13), tid=2)
    export.kernel(SENDRECV, 280, 290, launch=(50, 51), stream=9)
    found = [row[3] for row in _kernels(export, tmp_path)]
    assert found == [BETWEEN, OUTSIDE, LAUNCH_UNKNOWN, OTHER_THREAD, BOUNDARY]


def test_without_ranges_that_name_layers_there_is_no_nvtx(tmp_path: Path) -> None:
    export = Export().nvtx("scheduler.run_batch", 0, 100).kernel(GEMM, 200, 210, launch=(5, 6))
    found = attributed(export.write(tmp_path / "a.sqlite"))
    assert found.events["layer"].null_count() == found.events.height
    assert found.found.fits["reason"].null_count() == 0
    assert NO_NVTX in " ".join(found.found.notes)


def test_both_keys_join_kernel_and_launch(tmp_path: Path) -> None:
    export = _layer(_layer(Export(), 1, 0, 10, pid=1), 2, 0, 10, pid=2)
    for pid in (1, 2):
        export.kernel(GEMM, 20, 30, pid=pid, device=pid, correlation=5, launch=(2, 3))
    rows = attributed(export.write(tmp_path / "a.sqlite")).kernels.sort("rank")
    assert rows["layer"].to_list() == [1, 2]


def test_start_end_ranges_count_where_they_nest_on_one_thread(tmp_path: Path) -> None:
    export = Export()
    for number, (start, end) in enumerate([(0, 10), (10, 20), (20, 30)]):
        _layer(export, number, start, end, event_type=60, end_tid=1).kernel(
            GEMM, 100 + start, 105 + start, launch=(start + 2, start + 3)
        )
    assert [row[0] for row in _kernels(export, tmp_path)] == [0, 1, 2]


@pytest.mark.parametrize(
    "second",
    [{"start": 5, "end": 25, "end_tid": 1}, {"start": 2, "end": 8, "end_tid": 2}],
    ids=["crosses another range", "ends on another thread"],
)
def test_start_end_ranges_that_prove_nothing_are_counted_and_said(tmp_path: Path, second: dict[str, int]) -> None:
    export = _layer(Export(), 0, 0, 10).nvtx("model.layers.7", event_type=60, **second)
    export.kernel(GEMM, 100, 105, launch=(6, 7))
    found = attributed(export.write(tmp_path / "a.sqlite"))
    assert found.kernels["layer"].to_list() == [0]
    assert any("1 start/end ranges" in note for note in found.found.notes)


def test_layers_of_another_stack_are_no_layers(tmp_path: Path) -> None:
    export = Export().nvtx("{'Module': 'model'}", 0, 100).nvtx("{'Module': 'model.vision_tower.layers.0'}", 1, 9)
    for number in range(4):
        export.nvtx(f"{{'Module': 'model.language_model.layers.{number}'}}", 10 + 10 * number, 19 + 10 * number)
        export.kernel(GEMM, 200 + 10 * number, 205 + 10 * number, launch=(12 + 10 * number, 13 + 10 * number))
    export.kernel(GEMM, 150, 160, launch=(2, 3))
    rows = _kernels(export, tmp_path)
    assert rows[0] == (None, None, 0, BETWEEN)
    assert [row[0] for row in rows[1:]] == [0, 1, 2, 3]


def test_a_range_that_lost_its_pop_ends_where_the_thread_left_it(tmp_path: Path) -> None:
    export = Export(duration_us=1000)
    export.nvtx("model.layers.0", 0, None).nvtx("model.layers.0.mlp", 5, None).nvtx("model.layers.1", 10, None)
    for at in (2, 6, 12):
        export.kernel(GEMM, 100 + at, 101 + at, launch=(at, at + 0.5))
    assert [row[:2] for row in _kernels(export, tmp_path)] == [(0, None), (0, "mlp"), (1, None)]


def test_a_custom_pattern_reaches_the_kernels(tmp_path: Path) -> None:
    export = Export().nvtx("block[5].ffn", 0, 10).kernel(GEMM, 20, 30, launch=(1, 2))
    rows = _kernels(export, tmp_path, layer_regex=r"block\[(?P<layer>\d+)\]\.(?P<module>\w+)")
    assert rows == [(5, "ffn", 0, None)]


def test_markers_number_forwards_and_a_cut_one_counts_on(tmp_path: Path) -> None:
    export = Export()
    _layer(export, 3, 0, 10)  # the marker of its forward was opened before the capture
    for number, at in ((7, 20), (8, 40)):
        export.nvtx(f"nsysk3.forward {number}", at, at + 15)
        _layer(export, 0, at + 1, at + 5)
        _layer(export, 3, at + 6, at + 10)
    for at in (2, 22, 27, 42, 47):
        export.kernel(GEMM, 100 + at, 101 + at, launch=(at, at + 0.5))
    assert [row[2] for row in _kernels(export, tmp_path)] == [6, 7, 7, 8, 8]


def test_a_marker_opened_again_is_one_forward(tmp_path: Path) -> None:
    export = Export()
    for number, start, end in ((4, 0, 8), (4, 9, 18), (5, 20, 38)):
        _layer(export.nvtx(f"nsysk3.forward {number}", start, end), number, start + 1, end - 1)
        export.kernel(GEMM, 100 + start, 101 + start, launch=(start + 2, start + 3))
    assert [row[2] for row in _kernels(export, tmp_path)] == [4, 4, 5]


def test_a_new_forward_begins_where_the_layer_number_falls_back(tmp_path: Path) -> None:
    export = Export()
    for place, layer in enumerate([4, 5, 6, 4, 5, 6, 4]):
        _layer(export, layer, 10 * place, 10 * place + 5)
        export.kernel(GEMM, 100 + 10 * place, 105 + 10 * place, launch=(10 * place + 1, 10 * place + 2))
    assert [row[2] for row in _kernels(export, tmp_path)] == [0, 0, 0, 1, 1, 1, 2]


@pytest.mark.parametrize("path", [TP2, SGLANG_PP2], ids=["tp2", "sglang pp2"])
def test_the_order_of_rows_in_the_file_changes_nothing(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "a.sqlite"
    with closing(sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)) as source:
        source.text_factory = bytes
        with closing(sqlite3.connect(copy)) as target:
            source.backup(target)
            target.text_factory = bytes
            for table in ("NVTX_EVENTS", "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"):
                target.execute(
                    f"create temp table mixed as select * from {table} order by abs(start * 2654435761) % 9973"
                )
                target.execute(f"delete from {table}")
                target.execute(f"insert into {table} select * from mixed")
                target.execute("drop table mixed")
            target.commit()
    columns = ["rank", "start", "end", "stream", "layer", "module", "forward", "reason"]
    text = pl.col("module", "reason").cast(pl.String)
    key = ["rank", "start", "end", "stream"]
    mixed = attributed(copy).kernels.select(columns).with_columns(text).sort(key)
    assert mixed.equals(real(path).kernels.select(columns).with_columns(text).sort(key))


@st.composite
def _trees(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Nested (layer, start, end) ranges."""
    found: list[tuple[int, int, int]] = []

    def grow(low: int, high: int, depth: int) -> None:
        at = low
        while at < high - 4 and depth < 4 and draw(st.booleans()):
            end = draw(st.integers(at + 2, high - 1))
            found.append((draw(st.integers(0, 9)), at, end))
            grow(at + 1, end, depth + 1)
            at = end + 1

    grow(0, draw(st.integers(5, 200)), 0)
    return found


@given(_trees(), st.integers(-(10**6), 10**6), st.randoms())
def test_a_sweep_agrees_with_looking_at_every_range(
    tree: list[tuple[int, int, int]], shift: int, random: Random
) -> None:
    shuffled = random.sample(tree, len(tree))
    ranges = pl.DataFrame(
        {
            "start": [start + shift for _, start, _ in shuffled],
            "end": [end + shift for _, _, end in shuffled],
            "event_type": [59] * len(tree),
            "tid": [1] * len(tree),
            "end_tid": [None] * len(tree),
            "name": [f"model.layers.{layer}" for layer, *_ in shuffled],
            "truncated": [False] * len(tree),
        },
        schema={
            **dict.fromkeys(("start", "end", "event_type", "tid", "end_tid"), pl.Int64),
            "name": pl.Categorical,
            "truncated": pl.Boolean,
        },
    )
    marked = main_stack(mark_ranges(ranges)[0])
    points = np.arange(0, 200, 7)
    numbers = {"rank": pl.Int32, "report": pl.Int64, "tid": pl.Int64, "api_start": pl.Int64, "graph_node": pl.Int64}
    columns = {"rank": 0, "report": 0, "tid": 1, "api_start": points + shift, "graph_node": None}
    events = pl.DataFrame({**columns, "kind": "kernel", "role": "compute"}, schema_overrides=numbers)
    ranks = pl.DataFrame({"rank": [0], "report": [0], "pid": [0]}, schema_overrides={"rank": pl.Int32})
    found = attribute_by_ranges(events, ranks, marked, forward_ranges(marked))["layer"].to_list()
    for point, layer in zip(points, found, strict=True):
        holding = [each for each in tree if each[1] <= point <= each[2]]
        # The innermost is the last to begin.
        expected = max(holding, key=lambda each: (each[1], -each[2]))[0] if holding else None
        assert layer == expected


def test_time_of_a_report_moves_nothing(tmp_path: Path) -> None:
    found = []
    for epoch in (10**18, 10**18 + 123_456_789):
        export = Export(epoch_ns=epoch)
        _layer(export, 2, 0, 10).kernel(GEMM, 20, 30, launch=(1, 2))
        found.append(_kernels(export, tmp_path / str(epoch)))
    assert found[0] == found[1]
