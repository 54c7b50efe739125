"""What each AllReduce and AllGather of a forward was for."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import polars as pl
from numpy.typing import NDArray

from nsysk3.analysis.rows import laid_over, or_null, runs
from nsysk3.trace.order import row_order

COLLECTIVE_KINDS = pl.Enum(["embedding", "attention", "moe", "dense_mlp", "logits", "pp_gather", "unknown"])
KIND_SOURCES = pl.Enum(["range", "name", "neighbours", "bytes", "position"])
# Kimi-K3 reduces a layer's latent and shared experts in one message: (3584 + 7168) / 7168 of the attention's.
_MOE_TO_ATTENTION_BYTES = (3, 2)
_BY_CATEGORY = {
    "attention": r"^(?:KDA|KDA_CONV|MLA_ATTN)$",
    "experts": r"^(?:MOE_ROUTE|MOE_GEMM|MOE_PERMUTE|MOE_FINALIZE|A2A_DISPATCH|A2A_COMBINE)$",
    "activation": r"^MOE_ACT$",
    "embedding": r"^EMBED$",
    "sampling": r"^SAMPLING$",
    "fused_allreduce": r"^FUSED_(?:AR_|MOEFINALIZE_AR)",
    "finishes_moe": r"^FUSED_MOEFINALIZE_AR$",
}
_BY_MODULE = {
    "attention_module": r"^(?:self_attn|attn|attention|linear_attn|mixer)\b",
    "mlp_module": r"^(?:mlp|feed_forward|ffn|moe|block_sparse_moe)\b",
    "experts_module": r"\bexperts\b",
    "embedding_module": r"embed",
    "logits_module": r"^(?:logits_processor|lm_head)",
}
_PATTERNS = {"category": _BY_CATEGORY, "module": _BY_MODULE}
_INSTANCE = ["rank", "forward", "layer"]


def moe_layers(events: pl.DataFrame) -> pl.DataFrame:
    """``rank``, ``layer``, ``moe``: whether the layer ran routed experts, in any forward."""
    seen = events.select("rank", "layer", "category", "module").filter(events["layer"].is_not_null()).unique()
    flags = _flags(seen["category"], _BY_CATEGORY) | _flags(seen["module"], _BY_MODULE)
    return _moe_layers(seen.with_columns(pl.Series(name, flags[name]) for name in ("experts", "experts_module")))


def collective_kinds(events: pl.DataFrame) -> pl.DataFrame:
    """Events, in their order, with ``collective_kind`` and ``kind_source``; both null on all other events.

    ``events`` have layers.  The first of these that tells decides, and ``kind_source`` names it:

    * ``range``: the module that launched it.  SGLang launches the attention's AllReduce inside the layer but between
      the modules ``self_attn`` and ``mlp``, and a dense layer's at the start of the next layer.
    * ``name``: a fused kernel whose name says what it finishes.
    * ``neighbours``: what ran since the AllReduce before it: attention, experts, a dense activation, the embedding.
      An AllGather is the pipeline boundary's when it follows a receive on a stream other than the compute stream, the
      logits' when sampling comes next.
    * ``bytes``: two sizes whose ratio is the model's.
    * ``position``: first or second of its layer, or before the first layer of its forward.

    ``unknown`` (source null) where nothing tells.
    """
    if not events["role"].is_in(["allreduce", "fused", "all_gather"]).any():
        empty = {"collective_kind": COLLECTIVE_KINDS, "kind_source": KIND_SOURCES}
        return events.with_columns(pl.lit(None, kind).alias(name) for name, kind in empty.items())
    ordered = _ordered(events)
    reduced = (pl.col("role") == "allreduce") | ((pl.col("role") == "fused") & pl.col("fused_allreduce"))
    reduces, gathers = (_with_surroundings(ordered, chosen) for chosen in (reduced, pl.col("role") == "all_gather"))
    gathers = gathers.join(_compute_streams(events), on="rank", how="left", maintain_order="left")
    found = pl.concat([_reduce_kinds(_placed(reduces, ordered)), _gather_kinds(gathers)])
    return events.hstack(laid_over(found.drop("row"), found["row"], events.height))


def moe_shares(events: pl.DataFrame) -> pl.DataFrame:
    """Per rank: ``allreduce_ns``, ``classified_ns``, ``moe_ns`` and ``moe_share`` = moe / classified AllReduce time.

    ``moe_share`` is null where no AllReduce could be classified.
    """
    kind, ns = pl.col("collective_kind"), pl.col("end") - pl.col("start")
    table = events.filter(pl.col("role") == "allreduce").group_by("rank").agg(
        ns.sum().alias("allreduce_ns"),
        ns.filter(kind != "unknown").sum().alias("classified_ns"),
        ns.filter(kind == "moe").sum().alias("moe_ns"),
    )  # fmt: skip
    share = pl.when(pl.col("classified_ns") > 0).then(pl.col("moe_ns") / pl.col("classified_ns"))
    return table.with_columns(share.alias("moe_share")).sort("rank")


def _ordered(events: pl.DataFrame) -> pl.DataFrame:
    """Events but graph replays in launch order a rank: ``row``, ``order``, and what their category and module are."""
    keys = events.select("rank", pl.coalesce("api_start", "start").alias("at"), "start", "stream", "name_id")
    row = row_order(keys, ties=2)
    read = ("rank", "forward", "layer", "role", "kind", "stream", "nccl_bytes", "category", "module")
    ordered = events.select(read)[row].with_columns(pl.Series("row", row)).filter(pl.col("kind") != "graph")
    flags = [pl.Series(name, of) for c in _PATTERNS for name, of in _flags(ordered[c], _PATTERNS[c]).items()]
    return ordered.drop("kind", *_PATTERNS).hstack(flags).with_row_index("order")


def _flags(texts: pl.Series, patterns: Mapping[str, str]) -> dict[str, NDArray[np.bool_]]:
    """By pattern, which of few distinct texts over millions of rows match; never null."""
    distinct = texts.unique().drop_nulls()
    code = distinct.to_physical().to_numpy()
    none = int(code.max(initial=0)) + 1
    rows = texts.to_physical().fill_null(none).to_numpy()
    found = {}
    for name, pattern in patterns.items():
        matches = np.zeros(none + 1, bool)
        matches[code] = distinct.cast(pl.String).str.contains(pattern).to_numpy()
        found[name] = matches[rows]
    return found


def _moe_layers(flagged: pl.DataFrame) -> pl.DataFrame:
    moe = (pl.col("experts") | pl.col("experts_module")).alias("moe")
    named = flagged.select("rank", "layer", moe).filter(pl.col("layer").is_not_null())
    return runs(named)[0].group_by("rank", "layer").agg(pl.col("moe").any())


def _with_surroundings(ordered: pl.DataFrame, chosen: pl.Expr) -> pl.DataFrame:
    """The chosen events with what ran since the one before them, and the order of what comes next."""
    asked = ordered.select(
        chosen.alias("chosen"),
        *("rank", "attention", "experts", "activation", "embedding", "sampling"),
        (pl.col("role") == "p2p").alias("p2p"),
        (pl.col("attention") | pl.col("embedding")).alias("layer"),
    )
    at, rank = np.flatnonzero(asked["chosen"].to_numpy()), asked["rank"].to_numpy()
    # What ran before the first of a rank ends where the rank begins.
    new = np.diff(rank[at], prepend=-1) != 0
    since = np.where(new, np.searchsorted(rank, rank[at]), np.append(0, at[:-1] + 1))
    columns = []
    for name in ("attention", "experts", "activation", "embedding", "p2p"):
        count = np.append(0, np.cumsum(asked[name].to_numpy()))
        columns.append(pl.Series(f"{name}_since", count[at + 1] - count[since]))
    for name in ("sampling", "layer"):
        places = np.append(np.flatnonzero(asked[name].to_numpy()), len(rank))
        following = places[np.searchsorted(places[:-1], at)]
        same = np.append(rank, -1)[following] == rank[at]
        columns.append(or_null(np.where(same, following, -1)).alias(f"next_{name}"))
    return ordered.filter(asked["chosen"]).hstack(columns)


def _compute_streams(events: pl.DataFrame) -> pl.DataFrame:
    """``rank``, ``compute_stream``: the stream that computes longest."""
    ns = (pl.col("end") - pl.col("start")).sum().alias("ns")
    computed = events.select("rank", "stream", "start", "end").filter(events["role"] == "compute")
    busy = computed.group_by("rank", "stream").agg(ns).sort("ns", "stream")
    return busy.group_by("rank", maintain_order=True).agg(pl.last("stream").alias("compute_stream"))


def _placed(reduces: pl.DataFrame, ordered: pl.DataFrame) -> pl.DataFrame:
    """Add where in its layer and forward each AllReduce is, and whether its layer and the one before have experts."""
    moe, first = _moe_layers(ordered), pl.col("order").min()
    parts = ("attention_module", "mlp_module")
    in_layer = ordered.select(*_INSTANCE, *parts, "order").filter(pl.col("layer").is_not_null())
    _, run = runs(in_layer.select(*_INSTANCE, *parts))
    in_layer = in_layer.filter(run != run.shift(1, fill_value=-1))
    attentions = in_layer.filter("attention_module").group_by(_INSTANCE).agg(first.alias("first_attention"))
    mlps = in_layer.filter("mlp_module").group_by(_INSTANCE).agg(first.alias("first_mlp"))
    firsts = in_layer.group_by("rank", "forward").agg(first.alias("first_layer"))
    before = moe.select("rank", pl.col("layer") + 1, pl.col("moe").alias("moe_before"))
    placed = (
        reduces.join(moe, on=["rank", "layer"], how="left")
        .join(before, on=["rank", "layer"], how="left")
        .join(attentions, on=_INSTANCE, how="left")
        .join(mlps, on=_INSTANCE, how="left")
        .join(firsts, on=["rank", "forward"], how="left")
        .sort("order")
    )
    large, small = _MOE_TO_ATTENTION_BYTES
    size = pl.col("nccl_bytes")
    sizes = placed.select("rank", (size * large).alias("scaled")).unique()
    placed = placed.with_columns((size * small).alias("scaled")).join(
        sizes.drop_nulls().with_columns(pl.lit(True).alias("large")),
        on=["rank", "scaled"],
        how="left",
        maintain_order="left",
    )
    inside = pl.col("layer").is_not_null()
    return placed.with_columns(
        (pl.col("order") == first.over(_INSTANCE)).alias("first_of"),
        pl.when(inside).then(pl.len().over(_INSTANCE)).alias("of"),
        pl.when(size.is_not_null()).then(pl.col("large").fill_null(False)).alias("large"),
    )


def _reduce_kinds(placed: pl.DataFrame) -> pl.DataFrame:
    order = pl.col("order")
    mlp, mlp_before = (
        pl.when(pl.col(name)).then(pl.lit("moe")).when(pl.col(name).is_not_null()).then(pl.lit("dense_mlp"))
        for name in ("moe", "moe_before")
    )
    in_layer = pl.col("layer").is_not_null()
    by_range = (
        pl.when(in_layer & pl.col("attention_module")).then(pl.lit("attention"))
        .when(in_layer & pl.col("mlp_module")).then(mlp)
        .when(in_layer & (order > pl.col("first_mlp"))).then(mlp)
        .when(in_layer & (order > pl.col("first_attention"))).then(pl.lit("attention"))
        .when(in_layer & (order < pl.col("first_attention"))).then(mlp_before)
        .when(~in_layer & pl.col("logits_module")).then(pl.lit("logits"))
        .when(~in_layer & pl.col("embedding_module")).then(pl.lit("embedding"))
    )  # fmt: skip
    by_name = pl.when("finishes_moe").then(pl.lit("moe"))
    # Experts come after the attention of their layer, so they are what is reduced when both ran.
    by_neighbours = (
        pl.when(pl.col("experts_since") > 0).then(pl.lit("moe"))
        .when(pl.col("attention_since") > 0).then(pl.lit("attention"))
        .when(pl.col("embedding_since") > 0).then(pl.lit("embedding"))
        .when(pl.col("activation_since") > 0).then(pl.lit("dense_mlp"))
    )  # fmt: skip
    followed = pl.col("large").shift(-1).over("rank")
    by_bytes = pl.when("large").then(pl.lit("moe")).when(~pl.col("large") & followed).then(pl.lit("attention"))
    by_position = (
        pl.when((pl.col("of") > 1) & pl.col("first_of")).then(pl.lit("attention"))
        .when(pl.col("of") > 1).then(mlp)
        .when(~in_layer & (order < pl.col("first_layer"))).then(pl.lit("embedding"))
    )  # fmt: skip
    told = {"range": by_range, "name": by_name, "neighbours": by_neighbours, "bytes": by_bytes, "position": by_position}
    return _first_told(placed, told)


def _gather_kinds(gathers: pl.DataFrame) -> pl.DataFrame:
    by_range = pl.when("logits_module").then(pl.lit("logits"))
    beside = pl.col("stream") != pl.col("compute_stream")
    # A boundary can hand over several tensors: receive, gather, receive, gather, or both receives first.
    chain = pl.when(~beside).then(False).when(pl.col("p2p_since") > 0).then(True).forward_fill().over("rank")
    sampled = (pl.col("next_sampling") < pl.col("next_layer")) | (
        pl.col("next_sampling").is_not_null() & pl.col("next_layer").is_null()
    )
    by_neighbours = (
        pl.when(beside & chain).then(pl.lit("pp_gather")).when(~beside & sampled).then(pl.lit("logits"))
    )  # fmt: skip
    return _first_told(gathers, {"range": by_range, "neighbours": by_neighbours})


def _first_told(frame: pl.DataFrame, told: dict[str, pl.Expr]) -> pl.DataFrame:
    source = pl.coalesce(pl.when(kind.is_not_null()).then(pl.lit(name)) for name, kind in told.items())
    return frame.select(
        "row",
        pl.coalesce(*told.values(), pl.lit("unknown")).cast(COLLECTIVE_KINDS).alias("collective_kind"),
        source.cast(KIND_SOURCES).alias("kind_source"),
    )
