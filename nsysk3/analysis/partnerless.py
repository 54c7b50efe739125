"""Which waits of a rank nobody can sum up: not one of its kernels of that kind found a partner in this run."""

from __future__ import annotations

import polars as pl

from nsysk3.analysis.clocks import END_SPREAD_NS


def partnerless(
    ranks: pl.DataFrame, collectives: pl.DataFrame, halves: pl.DataFrame, pairs: pl.DataFrame
) -> pl.DataFrame:
    """Of each rank ``no_wait_collective``, ``no_wait_upstream``, ``no_wait_downstream``: it has such, all unsplit.

    ``halves``: see sides; one whose direction nobody knows may be of either.  ``pairs``: see match_p2p.
    """
    split = collectives.group_by("rank").agg(pl.col("wait_ns").is_not_null().any())
    paired = pl.concat([pairs["send_event"], pairs["recv_event"]])
    # A kernel cannot have waited longer than it lasted: one shorter than clocks agree to is as good as split.
    told = pl.col("event").cast(pl.Int64).is_in(paired.implode()) | (pl.col("dur") < END_SPREAD_NS)
    left = halves.filter(~told)
    either = (pl.col("channel_source") == "order").fill_null(False)
    found = {
        "no_wait_collective": set(split.filter(~pl.col("wait_ns"))["rank"]),
        "no_wait_upstream": set(left.filter(~pl.col("send") | either)["rank"]) - set(pairs["dst_rank"]),
        "no_wait_downstream": set(left.filter(pl.col("send") | either)["rank"]) - set(pairs["src_rank"]),
    }
    return ranks.select("rank", *[pl.col("rank").is_in(list(of)).alias(name) for name, of in found.items()])


def where_split(name: str, *waits: str) -> pl.Expr:
    """Column ``name``, null on ranks that have none of one of the ``waits``; the columns of partnerless are there."""
    return pl.when(~pl.any_horizontal(f"no_{wait}" for wait in waits)).then(name).alias(name)
