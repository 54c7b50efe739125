"""Layers and forwards without NVTX, from what repeats in the sequence of kernel names."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from nsysk3.analysis.attribution import LAYER_SOURCES, NO_NVTX, NO_PERIOD, OUTSIDE_PERIOD, REASONS
from nsysk3.analysis.period_anchors import Anchors, Ints, Lane, find_anchors, usual_layers
from nsysk3.analysis.period_edges import layer_edges

# Below this share of kernel time that repeats, no layers are reported.
MIN_CONFIDENCE = 0.8
FIT_SCHEMA = pl.Schema(
    {
        "rank": pl.Int32(),
        "forwards": pl.Int64(),
        "layers": pl.Int64(),
        "first_layer": pl.Int64(),
        "confidence": pl.Float64(),
        "confidence_kernels": pl.Float64(),
        "reason": pl.String(),
    }
)
_FOUND_SCHEMA = pl.Schema({"row": pl.UInt32(), "layer": pl.Int32(), "forward": pl.Int32()})
_READ = (
    "rank", "stream", "tid", "api_start", "start", "end", "name_id", "category", "role", "kind", "graph_node",
)  # fmt: skip
_ATTENTION = {"KDA": 1, "KDA_CONV": 1, "MLA_ATTN": 2}
_ONCE = ("EMBED", "SAMPLING")


def fit_ranks(events: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Try every rank without NVTX layers alone; ``events`` are those of launched_in.

    Returns (``row``, ``layer`` counted from 0 on its rank and ``forward`` of what lies in a layer, fits without
    first_layer).  Fits (FIT_SCHEMA) have a row a rank tried: how many ``forwards`` and ``layers`` a forward;
    ``confidence`` and ``confidence_kernels``, the share of kernel time (and of kernels) that lies in a layer and recurs
    in that layer of the other forwards, pipeline sends and receives left out; ``reason`` why there are no layers.
    Below MIN_CONFIDENCE nothing is filled in.
    """
    is_kernel = pl.col("kind") == "kernel"
    tried = events.select(pl.col("rank").filter((pl.col("reason") == NO_NVTX) & is_kernel).unique()).to_series()
    if tried.is_empty():
        return pl.DataFrame(schema=_FOUND_SCHEMA), pl.DataFrame(schema=FIT_SCHEMA)
    found, fits = [], []
    kernels = events.select(_READ).with_row_index("row").filter(pl.col("rank").is_in(tried.implode()) & is_kernel)
    for (rank,), mine in kernels.partition_by("rank", as_dict=True).items():
        rows, fit = _fit_rank(mine.filter(pl.col("graph_node").is_null()))
        found.append(rows)
        fits.append({"rank": rank, **fit})
    return pl.concat(found), pl.DataFrame(fits, schema=FIT_SCHEMA, orient="row").sort("rank")


def _fit_rank(kernels: pl.DataFrame) -> tuple[pl.DataFrame, dict[str, Any]]:
    ordered = _launch_order(kernels)
    lane = _lane(ordered)
    anchors = find_anchors(lane)
    edges = layer_edges(lane, anchors) if anchors else None
    if anchors is None or edges is None:
        return pl.DataFrame(schema=_FOUND_SCHEMA), {"reason": "no forward repeats in the kernel sequence"}
    rows = _placed(ordered, anchors, *edges)
    confidence, by_count = _confidence(kernels, ordered.join(rows, on="row"))
    fit = {
        "forwards": rows["forward"].n_unique(),
        "layers": usual_layers(anchors.forward),
        "confidence": confidence,
        "confidence_kernels": by_count,
    }
    if confidence >= MIN_CONFIDENCE:
        return rows, fit
    return rows.clear(), {**fit, "reason": f"only {confidence:.0%} of kernel time repeats from forward to forward"}


def _launch_order(kernels: pl.DataFrame) -> pl.DataFrame:
    """The kernels that the busiest thread launched, in that order; without launches, the busiest stream's in time."""
    lane, time = ("stream", "start") if kernels["api_start"].has_nulls() else ("tid", "api_start")
    busy = kernels.group_by(lane).agg((pl.col("end") - pl.col("start")).sum().alias("ns"))
    main = busy.sort("ns", lane, descending=[True, False]).head(1)
    return kernels.join(main, on=lane, how="semi", nulls_equal=True).sort(time, "start", "stream", "name_id")


def _lane(kernels: pl.DataFrame) -> Lane:
    category, role = pl.col("category").cast(pl.String), pl.col("role").cast(pl.String)
    comm = role.is_in(["allreduce", "reduce_scatter", "all_gather", "all_to_all", "fused"])
    columns = kernels.select(
        pl.when(category == "NORM").then(-1).otherwise(pl.col("name_id").cast(pl.Int64)).alias("symbol"),
        category.replace_strict(_ATTENTION, default=0, return_dtype=pl.Int64).alias("attention"),
        (comm | category.is_in(["NORM", "ATTN_RES"]) | category.str.starts_with("MOE_")).alias("separator"),
        (category.is_in(_ONCE) | (role == "p2p")).alias("once"),
        (category == "ATTN_RES").alias("residual"),
        (category == "NORM").alias("norm"),
    )
    return Lane(*(columns[name].to_numpy() for name in Lane._fields))


def _placed(ordered: pl.DataFrame, anchors: Anchors, start: Ints, end: Ints) -> pl.DataFrame:
    """Layer and forward of each kernel inside a layer; forwards with another number of layers are left out.

    A first forward with fewer layers lost its beginning, a last one its end.
    """
    layers = usual_layers(anchors.forward)
    count = np.bincount(anchors.forward)
    first = np.concatenate(([0], np.cumsum(count)[:-1]))
    layer = np.arange(len(anchors.at)) - first[anchors.forward]
    layer += np.where(anchors.forward == 0, layers - count[0], 0)
    edge = (anchors.forward == 0) | (anchors.forward == len(count) - 1)
    length = count[anchors.forward]
    good = (length == layers) | (edge & (length < layers))
    place = np.searchsorted(start, np.arange(ordered.height), side="right") - 1
    inside = (place >= 0) & (np.arange(ordered.height) < end[place]) & good[place]
    mine = place[inside]
    columns = {"layer": layer[mine], "forward": anchors.forward[mine]}
    rows = ordered.select("row").filter(pl.Series(inside))
    return rows.with_columns(pl.Series(name, values, pl.Int32) for name, values in columns.items())


def _confidence(kernels: pl.DataFrame, placed: pl.DataFrame) -> tuple[float, float]:
    """Share of the rank's kernel time, and of its kernels, that recurs in the same layer of the other forwards."""
    ns = (pl.col("end") - pl.col("start")).sum().alias("ns")
    counts = placed.group_by("layer", "forward", "name_id").agg(pl.len().cast(pl.Int64), ns)
    forwards = placed.group_by("layer").agg(pl.col("forward").n_unique().alias("forwards"))
    sorted_counts = pl.col("len").sort(descending=True)
    # The median over forwards, where a name missing from a forward counts 0.
    usual = (
        counts.join(forwards, on="layer")
        .group_by("layer", "name_id")
        .agg(sorted_counts.get(pl.first("forwards") // 2, null_on_oob=True).fill_null(0).alias("usual"))
    )
    fitting = counts.join(usual, on=["layer", "name_id"]).with_columns(pl.min_horizontal("usual", "len").alias("fit"))
    others = kernels.filter(pl.col("role") != "p2p").select(ns, pl.len())
    time = fitting.select((pl.col("ns") * pl.col("fit") // pl.col("len")).sum()).item()
    return time / max(others["ns"][0], 1), fitting["fit"].sum() / max(others["len"][0], 1)


def with_first_layers(fits: pl.DataFrame, ranks: pl.DataFrame, handing_over: bool) -> pl.DataFrame:
    """Add up the layers of the stages before each rank's, where every stage is known and its ranks agree.

    ``fits`` and ``ranks`` are of the whole run; ``handing_over``: some rank has pipeline sends or receives.
    """
    if fits.is_empty():
        return fits
    stages = ranks.select("rank", pl.col("pp_rank").alias("stage"))
    if not handing_over and not (stages["stage"] > 0).any():
        return fits.with_columns(pl.when(pl.col("layers").is_not_null()).then(0).alias("first_layer").cast(pl.Int64))
    if stages["stage"].has_nulls():
        return fits
    per_stage = (
        stages.join(fits.select("rank", "layers"), on="rank", how="left")
        .group_by("stage")
        .agg(pl.when(pl.col("layers").n_unique() == 1).then(pl.col("layers").first()).alias("layers"))
        .sort("stage")
        .with_columns((pl.col("layers").cum_sum() - pl.col("layers")).alias("first"))
    )
    if per_stage["layers"].has_nulls() or per_stage["stage"].to_list() != list(range(per_stage.height)):
        return fits
    first = stages.join(per_stage, on="stage", how="left").select("rank", pl.col("first").cast(pl.Int64))
    return fits.join(first, on="rank", how="left", maintain_order="left").with_columns(
        pl.when(pl.col("layers").is_not_null()).then("first").alias("first_layer")
    ).drop("first")  # fmt: skip


def with_period(events: pl.DataFrame, found: pl.DataFrame, fits: pl.DataFrame) -> pl.DataFrame:
    """Events with what fit_ranks found; a rank that has forwards from its own markers keeps those."""
    if fits.is_empty():
        return events
    marked = pl.col("forward").is_not_null().any().over("rank")
    found = found.select("row", pl.col("layer").alias("layer_found"), pl.col("forward").alias("forward_found"))
    fits = fits.select(
        "rank", pl.col("first_layer").fill_null(0).alias("first"), pl.col("reason").is_null().alias("fits")
    )
    # Joins copy every column: laid beside the events afterwards.
    keys = events.select("rank").with_row_index("row")
    beside = keys.join(found, on="row", how="left", maintain_order="left")
    beside = beside.join(fits, on="rank", how="left", maintain_order="left").drop("row", "rank")
    joined = events.hstack(beside)
    hit = pl.col("layer_found").is_not_null()
    missed = (pl.col("reason") == NO_NVTX) & pl.col("fits").is_not_null()
    why = pl.when(pl.col("fits")).then(pl.lit(OUTSIDE_PERIOD, REASONS)).otherwise(pl.lit(NO_PERIOD, REASONS))
    return joined.with_columns(
        pl.when(hit).then((pl.col("layer_found") + pl.col("first")).cast(pl.Int32)).otherwise("layer").alias("layer"),
        pl.when(hit & ~marked).then("forward_found").otherwise("forward").alias("forward"),
        pl.when(hit).then(pl.lit("period", LAYER_SOURCES)).otherwise("layer_source").alias("layer_source"),
        pl.when(hit).then(None).when(missed).then(why).otherwise("reason").alias("reason"),
    ).drop("layer_found", "forward_found", "first", "fits")  # fmt: skip
