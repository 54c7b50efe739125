"""What tests of cases look at in a result.

Cases about layers, clocks, waits of AllReduce and P2P have tests of their own.
"""

from __future__ import annotations

import polars as pl

from nsysk3.result import Result
from nsysk3.result.model import RankMetrics

US = 1000


def only(result: Result) -> RankMetrics:
    """The one rank that there must be."""
    (rank,) = result.document.ranks
    return rank


def roles(result: Result) -> dict[str, int]:
    """How many kernels and copies have each role, over all ranks."""
    return dict(result.roles.group_by("role").agg(pl.col("count").sum()).sort("role").iter_rows())
