"""Tables by layer: what each layer of each forward cost a rank, and which layers stand out."""

from __future__ import annotations

import numpy as np
import polars as pl

from nsysk3.analysis.allreduce_kinds import moe_layers
from nsysk3.analysis.intervals import Ints, covered, union
from nsysk3.analysis.rows import by_rank, runs
from nsysk3.classify import COMM_ROLES

LAYER_SCHEMA = pl.Schema(
    {
        "rank": pl.Int32(),
        "stage": pl.Int64(),
        "forward": pl.Int32(),
        "layer": pl.Int32(),
        "layer_kind": pl.String(),
        "start_utc_ns": pl.Int64(),
        "end_utc_ns": pl.Int64(),
        "compute_ns": pl.Int64(),
        "allreduce_ns": pl.Int64(),
        "allreduce_wait_ns": pl.Int64(),
        "allreduce_transfer_ns": pl.Int64(),
        "allreduce_unresolved_ns": pl.Int64(),
        "exposed_comm_ns": pl.Int64(),
        "fused_ns": pl.Int64(),
        "kernel_count": pl.Int64(),
    }
)
_KEY = ["rank", "forward", "layer"]
_KDA = r"^KDA(?:_CONV)?$"
_MLA = r"^MLA_(?:ATTN|GATE)$"


def layer_table(events: pl.DataFrame, ranks: pl.DataFrame) -> pl.DataFrame:
    """One row a (rank, forward, layer), LAYER_SCHEMA, sorted so; all times in ns.

    ``events`` have layers and forwards, and ``wait_ns`` and ``wait_state`` where waiting was told from transfer.

    * ``start_utc_ns``/``end_utc_ns``: first start to last end of the layer's kernels.
    * ``compute_ns``, ``fused_ns``: length of the union of those kernels.
    * ``allreduce_ns``: sum of its AllReduce kernels = wait + transfer + unresolved.  Wait and transfer are null where
      no AllReduce of the layer could be split, and all three without ``wait_ns``.
    * ``exposed_comm_ns``: the part of the union of its communication beside which the rank ran no compute and no fused
      kernel, of whatever layer.
    * ``kernel_count``: those kernels, null where a CUDA graph that was traced as a whole is among them.
    * ``layer_kind``: see layer_kinds.
    """
    named, rows = _grouped(events)
    times = named.group_by("group").agg(
        pl.col("start").min().alias("start_utc_ns"), pl.col("end").max().alias("end_utc_ns"),
        pl.when((pl.col("kind") == "kernel").all()).then(pl.len()).alias("kernel_count"),
    )  # fmt: skip
    rows = rows.join(times, on="group", how="left", maintain_order="left").hstack(_allreduce(named, rows.height))
    rows = rows.with_columns(
        _union_ns(named, "compute", rows.height).alias("compute_ns"),
        _union_ns(named, "fused", rows.height).alias("fused_ns"),
        _exposed_ns(named, events, rows.height).alias("exposed_comm_ns"),
    )
    stages = ranks.select("rank", pl.col("pp_rank").alias("stage"))
    rows = rows.join(stages, on="rank", how="left").join(layer_kinds(events), on=["rank", "layer"], how="left")
    return rows.select([pl.col(name).cast(kind) for name, kind in LAYER_SCHEMA.items()]).sort(_KEY)


def layer_kinds(events: pl.DataFrame) -> pl.DataFrame:
    """``rank``, ``layer``, ``layer_kind``: ``KDA+MoE``, ``MLA+MoE``, ``KDA+dense``... by what ran there in any forward.

    An attention that no kernel shows is left out (``dense``), and the kind is null when nothing shows.  A layer is
    dense when it has no routed experts although its attention, or its ``mlp`` module, was seen.
    """
    distinct = events.select("rank", "layer", "category", "module").filter(events["layer"].is_not_null()).unique()
    category, module = pl.col("category").cast(pl.String), pl.col("module").cast(pl.String)
    seen = distinct.group_by("rank", "layer").agg(
        category.str.contains(_KDA).any().alias("kda"),
        category.str.contains(_MLA).any().alias("mla"),
        module.str.contains(r"^mlp\b").fill_null(False).any().alias("mlp"),
    )
    seen = seen.join(moe_layers(distinct), on=["rank", "layer"])
    attention = pl.when("kda").then(pl.lit("KDA")).when("mla").then(pl.lit("MLA"))
    known = pl.col("mlp") | attention.is_not_null()
    mlp = pl.when("moe").then(pl.lit("MoE")).when(known).then(pl.lit("dense"))
    kind = pl.concat_str([attention, mlp], separator="+", ignore_nulls=True)
    return seen.select("rank", "layer", pl.when(kind != "").then(kind).alias("layer_kind"))


def attributed_shares(events: pl.DataFrame) -> pl.DataFrame:
    """Per rank: ``kernel_ns``, ``attributed_ns``, ``boundary_ns``, ``attributed_share`` and ``boundary_share``.

    Sums of kernel durations; attributed = in a layer, boundary = pipeline sends and receives, which belong to none and
    mostly wait.  Shares are of ``kernel_ns``.  A whole-graph replay counts as a kernel, for its kernels are inside.
    """
    ns = pl.col("end") - pl.col("start")
    table = events.filter(pl.col("kind") != "copy").group_by("rank").agg(
        ns.sum().alias("kernel_ns"),
        ns.filter(pl.col("layer").is_not_null()).sum().alias("attributed_ns"),
        ns.filter(pl.col("layer").is_null() & (pl.col("role") == "p2p")).sum().alias("boundary_ns"),
    )  # fmt: skip
    total = pl.when(pl.col("kernel_ns") > 0).then("kernel_ns")
    return table.with_columns(
        (pl.col("attributed_ns") / total).alias("attributed_share"),
        (pl.col("boundary_ns") / total).alias("boundary_share"),
    ).sort("rank")


def unattributed_reasons(events: pl.DataFrame) -> pl.DataFrame:
    """Per rank and ``reason``: ``kernels`` and ``ns`` of the kernels without a layer, longest first."""
    ns = (pl.col("end") - pl.col("start")).sum().alias("ns")
    lost = events.filter(pl.col("layer").is_null() & (pl.col("kind") != "copy"))
    table = lost.group_by("rank", pl.col("reason").cast(pl.String)).agg(pl.len().cast(pl.Int64).alias("kernels"), ns)
    return table.sort("rank", "ns", "reason", descending=[False, True, False])


def layer_categories(events: pl.DataFrame) -> pl.DataFrame:
    """Per rank, layer and ``category``: ``ns`` and ``kernels``, summed over the ``forwards`` that were seen."""
    read = [*_KEY, "category", "start", "end"]
    known = events.select(pl.all_horizontal(pl.col(_KEY).is_not_null()) & (pl.col("kind") != "copy")).to_series()
    named = events.select(read).filter(known)
    forwards = named.group_by("rank", "layer").agg(pl.col("forward").n_unique().cast(pl.Int64).alias("forwards"))
    ns = (pl.col("end") - pl.col("start")).sum().alias("ns")
    table = named.group_by("rank", "layer", pl.col("category").cast(pl.String)).agg(
        ns, pl.len().cast(pl.Int64).alias("kernels")
    )
    return table.join(forwards, on=["rank", "layer"]).sort(
        "rank", "layer", "ns", "category", descending=[False, False, True, False]
    )


def _grouped(events: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The kernels that have a layer, with ``group``: their row in the second, the sorted distinct _KEY."""
    read = (*_KEY, "start", "end", "role", "kind", "wait_ns", "wait_state")
    known = pl.all_horizontal(pl.col(_KEY).is_not_null()) & (pl.col("kind") != "copy")
    named = events.filter(known).select(name for name in read if name in events.columns)
    heads, run = runs(named.select(_KEY))
    rows = heads.unique().sort(_KEY).with_columns(pl.int_range(pl.len(), dtype=pl.Int64).alias("group"))
    return named.with_columns(heads.join(rows, on=_KEY, how="left", maintain_order="left")["group"].gather(run)), rows


def _allreduce(named: pl.DataFrame, groups: int) -> pl.DataFrame:
    """The columns about AllReduce of each group, in order."""
    ns, wait = pl.col("end") - pl.col("start"), pl.col("wait_ns")
    total = ns.sum().alias("allreduce_ns")
    mine = named.filter(pl.col("role") == "allreduce").group_by("group")
    every = pl.DataFrame({"group": pl.int_range(groups, eager=True)})
    parts = ("wait", "transfer", "unresolved")
    if "wait_ns" not in named.columns:
        found = every.join(mine.agg(total), on="group", how="left", maintain_order="left").fill_null(0).drop("group")
        return found.with_columns(pl.lit(None, pl.Int64).alias(f"allreduce_{part}_ns") for part in parts)
    resolved = wait.is_not_null() & (pl.col("wait_state").cast(pl.String) != "unresolved").fill_null(False)
    told, waited, moved = wait.is_not_null().any(), wait.filter(resolved).sum(), (ns - wait).drop_nulls().sum()
    table = mine.agg(
        total,
        pl.when(told).then(waited).alias("allreduce_wait_ns"),
        pl.when(told).then(moved).alias("allreduce_transfer_ns"),
        (ns.sum() - waited - moved).alias("allreduce_unresolved_ns"),
    )
    found = every.join(table, on="group", how="left", maintain_order="left").drop("group")
    # A group without AllReduce spent no time in one.
    return found.with_columns(
        pl.when(pl.col("allreduce_ns").is_null()).then(0).otherwise(name).alias(name) for name in found.columns
    )


def _grouped_union(rows: pl.DataFrame) -> tuple[Ints, Ints, Ints]:
    """Union of the intervals of each ``group``: start, end, group.

    One sweep for all groups: each is moved to a stretch of time of its own.  The run's length times the number of
    groups stays far below 2**63 (a minute, 32 ranks, 93 layers and 50 forwards need 2**53).
    """
    start, end = rows["start"].to_numpy(), rows["end"].to_numpy()
    if not len(start):
        return start, end, start
    origin, span = start.min(), end.max() - start.min() + 1
    moved = rows["group"].to_numpy() * span - origin
    joined = union(start + moved, end + moved)
    group = joined.start // span
    return joined.start - group * span + origin, joined.end - group * span + origin, group


def _sums(group: Ints, values: Ints, groups: int) -> pl.Series:
    total = np.zeros(groups, np.int64)
    np.add.at(total, group, values)
    return pl.Series(total)


def _union_ns(named: pl.DataFrame, role: str, groups: int) -> pl.Series:
    """Length of the union of one role's kernels in each group, in group order."""
    start, end, group = _grouped_union(named.filter(pl.col("role") == role))
    return _sums(group, end - start, groups)


def _exposed_ns(named: pl.DataFrame, events: pl.DataFrame, groups: int) -> pl.Series:
    """Length of each group's communication beside which its rank neither computed nor ran fused kernels, in order."""
    comm = named.filter(pl.col("role").is_in(COMM_ROLES))
    start, end, group = _grouped_union(comm)
    exposed = end - start
    rank_of = np.zeros(groups, np.int64)
    rank_of[comm["group"].to_numpy()] = comm["rank"].to_numpy()
    work = events.select("rank", "start", "end").filter(events["role"].is_in(["compute", "fused"]))
    for rank, own in by_rank(work).items():
        busy = union(own["start"].to_numpy(), own["end"].to_numpy())
        mine = rank_of[group] == rank
        exposed[mine] -= covered(busy, end[mine]) - covered(busy, start[mine])
    return _sums(group, exposed, groups)
