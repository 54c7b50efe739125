"""Runs with layers: real ones, ones that lost their NVTX, and a Kimi-K3 of 93 layers put together from real ones."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import polars as pl
from layered import Layers, attribute_layers

from nsysk3.analysis.attribution import NO_NVTX
from nsysk3.analysis.forwards import forward_table
from nsysk3.analysis.roles import assign_roles
from nsysk3.classify import RuleSet
from nsysk3.trace.load import Run, load

FIXTURES = Path(__file__).parent.parent / "fixtures"
TP2 = FIXTURES / "h200" / "tp2.sqlite"
PP2 = FIXTURES / "h200" / "pp2.sqlite"
GRAPH = FIXTURES / "h200" / "graph.sqlite"
SGLANG_TP2 = FIXTURES / "sglang-h200" / "tp2-lw.sqlite"
SGLANG_PP2 = FIXTURES / "sglang-h200" / "pp2-lw.sqlite"


@dataclass(frozen=True)
class Layered:
    """A run with its layers."""

    run: Run
    ranks: pl.DataFrame
    found: Layers

    @property
    def events(self) -> pl.DataFrame:
        return self.found.events

    @property
    def kernels(self) -> pl.DataFrame:
        return self.events.filter(pl.col("kind") == "kernel")

    def forwards(self) -> pl.DataFrame:
        return forward_table(self.events, self.ranks, self.found.host_forwards)


def attributed(
    path: Path | Sequence[Path], *, stages: Sequence[int] | None = None, layer_regex: str | None = None
) -> Layered:
    """Load and attribute; ``stages`` says the pipeline stage of each rank."""
    run = load(path)
    events = assign_roles(run.events, run.names, run.nccl_calls, RuleSet.load())
    ranks = run.ranks if stages is None else run.ranks.with_columns(pl.Series("pp_rank", stages, pl.Int64))
    return Layered(run, ranks, attribute_layers(events, ranks, run.reports, layer_regex=layer_regex))


@cache
def real(path: Path) -> Layered:
    """A fixture, attributed once."""
    return attributed(path)


def without_nvtx(path: Path, folder: Path) -> Path:
    """A copy of an export that lost every range but NCCL's own."""
    copy = folder / path.name
    shutil.copy(path, copy)
    copy.chmod(0o644)
    with closing(sqlite3.connect(copy)) as connection:
        connection.text_factory = bytes
        connection.execute(
            "delete from NVTX_EVENTS where eventType in (59, 60) and coalesce(text, "
            "(select value from StringIds where id = textId), '') not like 'nccl%'"
        )
        connection.commit()
    return copy


def agreement(truth: pl.DataFrame, guess: pl.DataFrame) -> float:
    """The share of kernel time in the layers of ``truth`` that ``guess`` puts in the same layer and forward."""
    key = ["rank", "start", "end", "stream", "correlation"]
    both = truth.filter(pl.col("layer").is_not_null()).join(
        guess, on=key, how="left", suffix="_guess", nulls_equal=True
    )
    ns = pl.col("end") - pl.col("start")
    same = (pl.col("layer") == pl.col("layer_guess")) & (pl.col("forward") == pl.col("forward_guess"))
    return float(both.select(ns.filter(same.fill_null(False)).sum() / ns.sum()).item())


def without_layers(events: pl.DataFrame) -> pl.DataFrame:
    """Events as attribute_by_ranges leaves them where there is no NVTX."""
    reason = pl.when(pl.col("role") == "p2p").then("reason").otherwise(pl.lit(NO_NVTX, events.schema["reason"]))
    blank = {"layer": None, "module": None, "forward": None, "layer_source": None}
    return events.with_columns(
        *[pl.lit(None, events.schema[name]).alias(name) for name in blank],
        reason.alias("reason"),
    )


def kimi_stages(stages: int, layers: int = 93) -> list[tuple[int, int]]:
    """First and last + 1 layer of each stage, as SGLang divides them: the remainder goes to the last stages."""
    size, more = divmod(layers, stages)
    sizes = [size + (stage >= stages - more) for stage in range(stages)]
    ends = np.cumsum(sizes).tolist()
    return [(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def kimi(stages: int, forwards: int = 4, layers: int = 93) -> tuple[pl.DataFrame, pl.DataFrame]:
    """(events with their true layers, ranks) of a Kimi-K3 with one rank a stage, made of SGLang's real layers.

    Every fourth layer and the last are MLA, the first is dense, every twelfth writes the attention-residual bank, as in
    the real model.
    """
    parts = [
        _kimi_stage(first, last, layers, forwards).with_columns(pl.lit(rank, pl.Int32).alias("rank"))
        for rank, (first, last) in enumerate(kimi_stages(stages, layers))
    ]
    ranks = pl.DataFrame(
        {"rank": range(stages), "report": 0, "pid": range(stages), "pp_rank": range(stages)},
        schema={"rank": pl.Int32, "report": pl.Int64, "pid": pl.Int64, "pp_rank": pl.Int64},
    )
    return pl.concat(parts), ranks


@cache
def _bricks() -> dict[str, pl.DataFrame]:
    events = real(SGLANG_TP2).kernels.filter(pl.col("rank") == 0).sort("api_start").with_row_index("at")
    forward = events.filter(pl.col("forward") == 2)
    layer = {number: forward.filter(pl.col("layer") == number) for number in range(8)}
    first, last = forward["at"].min(), layer[7]["at"].max()
    nowhere = pl.lit(None, pl.Int32).alias("layer")
    head = events.filter(pl.col("at").is_between(first - 12, layer[0]["at"].min() - 1)).with_columns(nowhere)
    tail = events.filter(pl.col("at").is_between(last + 1, forward["at"].max() + 4)).with_columns(nowhere)
    p2p = real(SGLANG_PP2).kernels.filter(pl.col("role") == "p2p").head(2).with_columns(nowhere)
    middle = head.filter((pl.col("role") != "allreduce") & (pl.col("category").cast(pl.String) != "EMBED"))
    named = {"dense": layer[0], "kda": layer[2], "mla": layer[3], "writes": layer[4], "head": head, "tail": tail}
    return {name: part.drop("at") for name, part in {**named, "middle": middle}.items()} | {
        "p2p": p2p.select(events.columns[1:])
    }


def _kimi_stage(first: int, last: int, layers: int, forwards: int) -> pl.DataFrame:
    bricks = _bricks()
    parts = []
    for forward in range(forwards):
        rows = [bricks["head"]] if first == 0 else [bricks["p2p"], bricks["middle"]]
        rows += [_kimi_layer(number, layers) for number in range(first, last)]
        rows.append(bricks["tail"] if last == layers else bricks["p2p"])
        parts.append(pl.concat(rows).with_columns(pl.lit(forward, pl.Int32).alias("forward")))
    events = pl.concat(parts)
    length = (events["end"] - events["start"]).to_numpy()
    start = np.cumsum(length + 1000) - length + 10**18
    times = {"start": start, "end": start + length, "api_start": start - 500, "api_end": start - 400}
    return events.with_columns(
        *[pl.Series(name, values) for name, values in times.items()],
        pl.lit(1, pl.Int64).alias("tid"),
        pl.int_range(pl.len(), dtype=pl.Int64).alias("correlation"),
    )


def _kimi_layer(number: int, layers: int) -> pl.DataFrame:
    if number == 0:
        kind = "dense"
    elif number % 4 == 3 or number == layers - 1:
        kind = "mla"
    else:
        kind = "writes" if number % 12 == 0 else "kda"
    return _bricks()[kind].with_columns(pl.lit(number, pl.Int32).alias("layer"))
