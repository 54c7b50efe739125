"""Simulated runs, analysed, beside the truth about them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from layered import attribute_layers

from nsysk3.analysis.allreduce_kinds import collective_kinds
from nsysk3.analysis.analyze import analyze
from nsysk3.analysis.cross import CrossRank, cross_rank
from nsysk3.analysis.roles import assign_roles
from nsysk3.classify import COMM_ROLES, RuleSet
from nsysk3.result import Result
from nsysk3.simulate.run import simulate
from nsysk3.simulate.setup import configure
from nsysk3.trace.load import Run, load


def make(folder: Path, *faults: str, preset: str | None = None, **changes: Any) -> Simulated:
    """Simulate a run under ``folder``."""
    out = folder / "run"
    simulate(configure(preset, faults, changes), out, force=True)
    return Simulated(out)


@dataclass(frozen=True)
class Simulated:
    """One simulated run."""

    path: Path

    @cached_property
    def facts(self) -> dict[str, Any]:
        """truth.json."""
        facts: dict[str, Any] = json.loads((self.path / "truth.json").read_text("utf-8"))
        return facts

    @cached_property
    def truth(self) -> pl.DataFrame:
        """truth.parquet, recorded kernels and copies."""
        coded = ("role", "purpose", "wait_kind")
        table = pl.read_parquet(self.path / "truth.parquet").with_columns(
            pl.col(name).cast(pl.String) for name in coded
        )
        return table.filter("recorded")

    @cached_property
    def run(self) -> Run:
        """The loaded traces."""
        return load(self.path)

    @cached_property
    def result(self) -> Result:
        """What the analysis makes of the run."""
        return analyze(self.run)

    @cached_property
    def found(self) -> CrossRank:
        """What the ranks say about each other."""
        named = assign_roles(self.run.events, self.run.names, self.run.nccl_calls, RuleSet.load(None))
        attributed = attribute_layers(named, self.run.ranks, self.run.reports)
        return cross_rank(collective_kinds(attributed.events), self.run.ranks, len(self.run.reports))

    @cached_property
    def kernels(self) -> pl.DataFrame:
        """Analysed kernels with the truth about each in ``true_*`` columns, and the uncertainty of its wait."""
        found = self.found
        doubt = pl.concat(
            [
                found.collectives.select(pl.col("event").cast(pl.Int64), "uncertainty_ns"),
                *[
                    found.pairs.select(pl.col(f"{side}_event").alias("event"), "uncertainty_ns")
                    for side in ("send", "recv")
                ],
            ]
        ).unique("event", keep="first")
        events = found.events.with_row_index("event").with_columns(pl.col("event").cast(pl.Int64))
        events = events.filter(pl.col("kind") == "kernel").join(doubt, on="event", how="left")
        keys = ["rank", "correlation"]
        true = self.truth.filter(pl.col("role") != "copy").select(
            *keys, *[pl.col(name).alias(f"true_{name}") for name in self.truth.columns if name not in keys]
        )
        return events.join(true, on=keys, how="full", coalesce=True)

    @cached_property
    def clocked(self) -> bool:
        """Whether the hosts' clocks neither drift nor wander, so that every duration is exact."""
        clocks = self.facts["clocks"]
        return not any(clock["drift_ppm"] or clock["wander_ns"] for clock in clocks)


def budget(truth: pl.DataFrame, low: int, high: int) -> dict[str, int]:
    """The time budget of one rank over [low, high) by painting, from the true waits of its kernels."""
    start, end = truth["start_ns"].to_numpy(), truth["end_ns"].to_numpy()
    split = start + truth["wait_ns"].to_numpy()
    edges = np.unique(np.clip(np.concatenate([start, end, split, [low, high]]), low, high))
    lengths = np.diff(edges)

    def painted(first: np.ndarray, last: np.ndarray) -> np.ndarray:
        depth = np.zeros(len(edges) + 1, np.int64)
        np.add.at(depth, np.searchsorted(edges, np.clip(first, low, high)), 1)
        np.add.at(depth, np.searchsorted(edges, np.clip(last, low, high)), -1)
        return np.cumsum(depth)[: len(lengths)] > 0

    role, kind = truth["role"].to_numpy(), truth["wait_kind"].to_numpy()
    left = np.ones(len(lengths), bool)
    spent = {}

    def take(name: str, where: np.ndarray) -> None:
        nonlocal left
        spent[name] = int(lengths[left & where].sum())
        left &= ~where

    compute = painted(start[role == "compute"], end[role == "compute"])
    comm = painted(start[kind != "none"], end[kind != "none"])
    take("overlap", compute & comm)
    take("compute", compute)
    for name in COMM_ROLES:
        mine = role == name
        take(f"exposed_{name}", painted(split[mine], end[mine]))
    for name in ("collective", "upstream", "downstream"):
        mine = kind == name
        take(f"exposed_wait_{name}", painted(start[mine], split[mine]))
    take("copy", painted(start[role == "copy"], end[role == "copy"]))
    take("idle", np.ones(len(lengths), bool))
    return spent
