"""Which NCCL call launched a kernel, and what that call says of it."""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from nsysk3.analysis.nesting import innermost
from nsysk3.analysis.rows import laid_over

Ints = NDArray[np.int64]

LINK_SCHEMA = {
    "nccl_op": pl.String,
    "comm": pl.Int64,
    "peer": pl.Int64,
    "n_peers": pl.Int64,
    "n_sends": pl.Int64,
    "n_recvs": pl.Int64,
    "send_bytes": pl.Int64,
    "recv_bytes": pl.Int64,
    "nccl_bytes": pl.Int64,
}


def link_nccl(events: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
    """Events with the columns of LINK_SCHEMA: what the NCCL call around their launch says.

    ``events`` need ``report``, ``tid``, ``api_start``; ``calls`` are read_nccl_calls with a ``report`` column.  A
    collective is launched inside its own range.  Grouped sends and receives are launched inside ncclGroupEnd and belong
    to the calls since the ncclGroupStart of that thread; ``nccl_op`` is then ``ncclGroup`` and the counts tell what was
    in the group.  All null where the launch lies in no NCCL range.
    """
    calls = _grouped(calls).with_row_index("call")
    candidates = events.select("report", "tid", "api_start").with_row_index("row").drop_nulls(["tid", "api_start"])
    by_thread = calls.partition_by("report", "tid", as_dict=True)
    links = []
    for key, points in candidates.partition_by("report", "tid", as_dict=True).items():
        ranges = by_thread.get(key)
        if ranges is None:
            continue
        at = innermost(ranges["start"].to_numpy(), ranges["end"].to_numpy(), points["api_start"].to_numpy())
        inside = at >= 0
        links.append(
            pl.DataFrame({"row": points["row"].filter(pl.Series(inside)), "call": ranges["call"].gather(at[inside])})
        )
    if not links:
        return events.with_columns(pl.lit(None, kind).alias(name) for name, kind in LINK_SCHEMA.items())
    described = pl.concat(links).join(_described(calls), on="call").drop("call")
    return events.hstack(laid_over(described.drop("row"), described["row"], events.height))


def _grouped(calls: pl.DataFrame) -> pl.DataFrame:
    """Calls with ``group``: a number shared by the calls of one outermost ncclGroupStart..End, else null.

    ``crossed``: calls whose ranges contradict each other, so that they describe no launch.
    """
    calls = calls.sort("report", "tid", "start", "end", descending=[False, False, False, True])
    parts = [_group_thread(part) for part in calls.partition_by("report", "tid")]
    if not parts:
        return calls.with_columns(pl.lit(None, pl.Int64).alias("group"), pl.lit(False).alias("crossed"))
    offset = 0
    numbered = []
    for part in parts:
        numbered.append(part.with_columns(pl.col("group") + offset))
        offset += part.height + 1
    return pl.concat(numbered)


def _group_thread(calls: pl.DataFrame) -> pl.DataFrame:
    opens = (calls["op"] == "ncclGroupStart").to_numpy()
    closes = (calls["op"] == "ncclGroupEnd").to_numpy()
    depth = np.cumsum(opens.astype(np.int64) - closes)
    # An end without its start (the capture began inside a group, or the start was lost): that group is not counted.
    lowest = np.minimum.accumulate(np.minimum(depth, 0))
    stray = closes & (np.diff(lowest, prepend=0) < 0)
    depth = depth - lowest
    # Nor is one whose end is missing, which would swallow all that follow.
    depth = depth - np.minimum.accumulate(depth[::-1])[::-1]
    group = np.cumsum(opens & (depth == 1))
    member = ((depth > 0) | closes) & ~stray & (group > 0)
    group = np.where(member, group, -1)
    crossed = _crossed(calls["start"].to_numpy(), calls["end"].to_numpy())
    crossed |= (group >= 0) & np.isin(group, group[crossed])
    return calls.with_columns(
        pl.Series("group", group, pl.Int64).replace(-1, None), pl.Series("crossed", crossed, pl.Boolean)
    )


def _crossed(start: Ints, end: Ints) -> NDArray[np.bool_]:
    """Calls that overlap another of their thread without lying in it, and those between the two.

    A thread is in one call at a time: nobody can tell what such a record is of, and a launch in it is of neither.
    """
    latest = np.maximum.accumulate(end)
    before = np.concatenate(([np.iinfo(np.int64).min], latest[:-1]))
    odd = np.flatnonzero((start < before) & (end > before))
    crossed = np.zeros(len(start), np.bool_)
    for at in odd:
        crossed[np.searchsorted(latest, before[at]) : at + 1] = True
    return crossed


def _described(calls: pl.DataFrame) -> pl.DataFrame:
    """One row a call that can hold a launch: LINK_SCHEMA, with ncclGroupEnd described by the calls of its group."""
    calls = calls.filter(~pl.col("crossed"))
    is_send, is_recv = pl.col("op") == "ncclSend", pl.col("op") == "ncclRecv"
    works = calls.filter(~pl.col("op").is_in(["ncclGroupStart", "ncclGroupEnd"]))
    groups = works.filter(pl.col("group").is_not_null() & _moves_data()).group_by("group").agg(
        pl.when(pl.col("op").n_unique() == 1).then(pl.col("op").first()).otherwise(pl.lit("ncclGroup"))
        .alias("nccl_op"),
        pl.col("comm").drop_nulls().first(),
        pl.col("peer").drop_nulls().first(),
        pl.col("peer").drop_nulls().n_unique().cast(pl.Int64).alias("n_peers"),
        is_send.sum().cast(pl.Int64).alias("n_sends"),
        is_recv.sum().cast(pl.Int64).alias("n_recvs"),
        _sum(is_send).alias("send_bytes"),
        _sum(is_recv).alias("recv_bytes"),
        _sum(pl.lit(True)).alias("nccl_bytes"),
    )  # fmt: skip
    ends = calls.filter(pl.col("op") == "ncclGroupEnd").select("call", "group").join(groups, on="group")
    single = works.select(
        "call",
        pl.col("op").alias("nccl_op"),
        "comm",
        "peer",
        pl.col("peer").is_not_null().cast(pl.Int64).alias("n_peers"),
        is_send.cast(pl.Int64).alias("n_sends"),
        is_recv.cast(pl.Int64).alias("n_recvs"),
        pl.when(is_send).then("bytes").alias("send_bytes"),
        pl.when(is_recv).then("bytes").alias("recv_bytes"),
        pl.col("bytes").alias("nccl_bytes"),
    )
    return pl.concat([single, ends.select(single.columns)])


def _moves_data() -> pl.Expr:
    """Calls that move data: not ncclCommCount, ncclCommInitRank and their like."""
    return pl.col("op").str.contains(
        r"^nccl(AllReduce|AllGather|ReduceScatter|Broadcast|Bcast|Reduce$|Send|Recv|AllToAll|AlltoAll|Gather|Scatter)"
    )


def _sum(which: pl.Expr) -> pl.Expr:
    """Bytes of the calls chosen: null where none of them says."""
    chosen = pl.col("bytes").filter(which).drop_nulls()
    return pl.when(chosen.len() > 0).then(chosen.sum())
