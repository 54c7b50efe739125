"""The findings a reader needs first, in words and with numbers."""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

from nsysk3.analysis.layer_summary import outlier_sentences
from nsysk3.analysis.stragglers import straggler_notes
from nsysk3.run.words import counted

_MANY_STAGES = 16


def sentences(tables: Mapping[str, pl.DataFrame], ranks: pl.DataFrame, sent: pl.DataFrame) -> list[str]:
    """What each stage's Send/Recv was, what ran beside compute, the bubble, and who is late.

    Table ``p2p`` holds the messages received in the window of their receiver; ``sent`` those sent in their sender's.
    """
    names = _names(tables, ranks)
    return [
        *_stage_sentences(tables, names, sent),
        *_collective_sentences(tables, names),
        *_kind_sentence(tables),
        *outlier_sentences(tables["layer_rows"]),
        *straggler_notes(tables["stragglers"], names),
    ]


def _names(tables: Mapping[str, pl.DataFrame], ranks: pl.DataFrame) -> dict[int, str]:
    """``stage 1`` where a stage is one rank, ``stage 1 rank 5`` where it is several, else ``rank 5``."""
    stages = dict(tables["pipeline"].select("rank", "stage").iter_rows())
    world = dict(ranks.select("rank", "world_rank").iter_rows())
    values = list(stages.values())
    names = {}
    for rank, number in world.items():
        stage = stages.get(rank)
        if stage is None:
            names[rank] = f"rank {number}"
        else:
            names[rank] = f"stage {stage}" if values.count(stage) == 1 else f"stage {stage} rank {number}"
    return names


def _stage_sentences(tables: Mapping[str, pl.DataFrame], names: Mapping[int, str], sends: pl.DataFrame) -> list[str]:
    pairs = tables["p2p"]
    if pairs.is_empty():
        return []
    said = []
    stages = tables["pipeline"]
    for rank, stage in (
        stages.select("rank", "stage").sort("stage", "rank").unique("stage", maintain_order=True).iter_rows()
    ):
        received, sent = pairs.filter(pl.col("dst_rank") == rank), sends.filter(pl.col("src_rank") == rank)
        for kind in ("activation", "result"):
            said += _boundary(names[rank], names, received.filter(pl.col("kind") == kind), kind, "recv")
            if kind == "activation":
                said += _boundary(names[rank], names, sent.filter(pl.col("kind") == kind), kind, "send")
        if stage + 1 >= _MANY_STAGES:
            break
    return said + _bubble(tables)


def _boundary(name: str, names: Mapping[int, str], pairs: pl.DataFrame, kind: str, half: str) -> list[str]:
    """One side of one kind of message, over all its partners."""
    if pairs.is_empty():
        return []
    wait, transfer = int(pairs[f"{half}_wait_ns"].sum()), int(pairs[f"{half}_transfer_ns"].sum())
    other = "src_rank" if half == "recv" else "dst_rank"
    partner = names[pairs[other][0]]
    verb = "receiving" if half == "recv" else "sending"
    size = pairs["bytes"].median()
    each = f" of {_bytes(int(size))}" if isinstance(size, float) else ""
    what = f"{verb} {counted(len(pairs), kind)}{each}"
    text = f"{name}: {_ms(wait + transfer)} {what} = {_ms(wait)} waiting for {partner} + {_ms(transfer)} transfer"
    hidden = int(pairs[f"{half}_wait_hidden_ns"].sum())
    if hidden > wait / 100:
        text += f"; {_ms(hidden)} of the waiting ran beside compute and cost nothing"
    earliest = pairs.sort(f"{half}_start_utc_ns").row(0, named=True)
    first, filling = int(earliest[f"{half}_wait_ns"]), earliest["seq"] == 0  # the first of its channel in the capture
    if half == "recv" and kind == "activation" and filling and first > wait / 2 and len(pairs) > 1:
        text += f" ({_ms(first)} of it for the first one: the pipeline filling)"
    return [text]


def _bubble(tables: Mapping[str, pl.DataFrame]) -> list[str]:
    ranks = tables["rank_metrics"].with_row_index("rank").filter("stable")["rank"]
    pipeline = tables["pipeline"].filter(pl.col("bubble_share").is_not_null() & pl.col("rank").is_in(ranks.to_list()))
    if pipeline.is_empty():
        return []
    per_stage = pipeline.group_by("stage").agg(pl.col("bubble_share", "ideal_bubble_share").median()).sort("stage")
    shown = ", ".join(f"stage {stage} {share:.1%}" for stage, share, _ in per_stage.head(_MANY_STAGES).iter_rows())
    ideal = per_stage["ideal_bubble_share"].drop_nulls()
    best = ideal.max()
    tail = f"; ideal for this many micro-batches {best:.1%}" if isinstance(best, float) else ""
    imbalance = pipeline["imbalance"].max()
    uneven = f"; the busiest stage works {imbalance:.2f} x the mean" if isinstance(imbalance, float) else ""
    return [f"bubble (exposed Stage wait and idle, share of the window): {shown}{tail}{uneven}"]


def _collective_sentences(tables: Mapping[str, pl.DataFrame], names: Mapping[int, str]) -> list[str]:
    """Waiting inside collectives, summed over the ranks that took part."""
    table = tables["collectives"]
    met, left_out = table.filter(pl.col("wait_ns").is_not_null()), table.filter(pl.col("state") == "incomplete")
    lost = dict(left_out.group_by("op").len().iter_rows())
    said = []
    by_op = met.group_by("op").agg(
        pl.col("duration_ns", "wait_ns", "transfer_ns").sum(), pl.col("rank").n_unique(), pl.len().alias("n")
    )
    for op, duration, wait, transfer, ranks, n in by_op.sort("duration_ns", descending=True).iter_rows():
        unseen = f"; {counted(lost[op], 'kernel')} left out, for not all members were seen" if op in lost else ""
        said.append(
            f"{op}: {_ms(duration / ranks)} per rank in {counted(round(n / ranks), 'kernel')} = {_ms(wait / ranks)} "
            f"waiting for the last rank + {_ms(transfer / ranks)} transfer (mean of {counted(ranks, 'rank')}{unseen})"
        )
    return said


def _kind_sentence(tables: Mapping[str, pl.DataFrame]) -> list[str]:
    """Which part of the model AllReduce time belongs to."""
    reduced = tables["collectives"].filter((pl.col("op") == "allreduce") & pl.col("kind").is_not_null())
    known = reduced.filter(pl.col("kind") != "unknown")
    spent = (
        known.group_by("kind").agg(pl.col("duration_ns").sum()).sort("duration_ns", "kind", descending=[True, False])
    )
    total = int(spent["duration_ns"].sum())
    if not total:
        return []
    parts = ", ".join(f"{kind.replace('_', ' ')} {ns / total:.1%}" for kind, ns in spent.iter_rows())
    left = 1 - total / int(reduced["duration_ns"].sum())
    tail = f" ({left:.1%} of it could not be told)" if left > 0.005 else ""
    return [f"AllReduce time by kind: {parts}{tail}"]


def _ms(ns: float) -> str:
    return f"{ns / 1e6:,.1f} ms"


def _bytes(size: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:,.0f} {name}"
    return f"{size} bytes"
