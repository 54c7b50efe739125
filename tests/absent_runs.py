"""Simulated runs without the reports of some hosts, and what is said of their waits beside the truth."""

from __future__ import annotations

import shutil
from pathlib import Path

import polars as pl
from simulated import Simulated

from nsysk3.analysis.cross import cross_rank
from nsysk3.analysis.members import Membership
from nsysk3.analysis.roles import assign_roles
from nsysk3.classify import RuleSet
from nsysk3.trace.load import Run

RATE = 1e-4


def without(made: Simulated, node: str, folder: Path) -> Path:
    """The run as it would be had the report of one host not come."""
    (folder / "nodes").mkdir(parents=True)
    shutil.copy(made.path / "run.json", folder)
    for each in (made.path / "nodes").iterdir():
        if each.name != node:
            (folder / "nodes" / each.name).symlink_to(each)
    return folder


def waits(made: Simulated, loaded: Run) -> pl.DataFrame:
    """Communication kernels with what is said of their wait, and ``true``; found by host and process, not by number."""
    named = assign_roles(loaded.events, loaded.names, loaded.nccl_calls, RuleSet.load(None))
    found = cross_rank(named, loaded.ranks, len(loaded.reports), Membership.of(loaded))
    event = pl.col("event").cast(pl.Int64)
    doubts = [found.collectives.select(event, "uncertainty_ns", pl.col("ranks_seen") < pl.col("ranks"))]
    for side in ("send", "recv"):
        doubts.append(found.pairs.select(pl.col(f"{side}_event").alias("event"), "uncertainty_ns", ranks_seen=False))
    nodes = sorted(each.name for each in (made.path / "nodes").iterdir())
    place = (pl.col(name).cast(pl.Int64) for name in ("pid", "node"))
    true = made.truth.filter(pl.col("wait_kind") != "none").select(
        *place, pl.col("device").cast(pl.Int64).alias("device_id"), "correlation", pl.col("wait_ns").alias("true")
    )
    seen = loaded.ranks.select(
        "rank", pl.col("pid").alias("seen_pid"), "device_id", node=pl.col("report_name").str.slice(0, len(nodes[0]))
    ).with_columns(pl.col("node").replace_strict(nodes, range(len(nodes)), return_dtype=pl.Int64))
    events = found.events.with_row_index("event").with_columns(event)
    return (
        events.join(pl.concat(doubts).unique("event", keep="first"), on="event", how="left")
        .join(seen, on="rank")
        .join(true.rename({"pid": "seen_pid"}), on=["node", "seen_pid", "device_id", "correlation"])
    )


def wrong(found: pl.DataFrame) -> pl.DataFrame:
    """Waits that are given and lie further from the truth than they say."""
    error = (pl.col("wait_ns") - pl.col("true")).abs()
    return found.filter(error > pl.col("uncertainty_ns").fill_null(0) + 200 + RATE * pl.col("true"))
