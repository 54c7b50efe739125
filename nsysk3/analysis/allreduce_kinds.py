"""What each AllReduce and AllGather of a forward was for."""

from __future__ import annotations

import polars as pl

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
_NEEDED = ["row", "rank", "forward", "layer", "role", "stream", "name_id", "nccl_bytes", "start", "end"]
_INSTANCE = ["rank", "forward", "layer"]


def moe_layers(events: pl.DataFrame) -> pl.DataFrame:
    """``rank``, ``layer``, ``moe``: whether the layer ran routed experts, in any forward."""
    seen = events.filter(pl.col("layer").is_not_null()).select("rank", "layer", "category", "module").unique()
    return _moe_layers(_with_flags(seen, "experts", "experts_module"))


def collective_kinds(events: pl.DataFrame) -> pl.DataFrame:
    """Events, in their order, with ``collective_kind`` and ``kind_source``; both null on all other events.

    ``events`` have layers (attribute_layers).  The first of these that tells decides, and ``kind_source`` names it:

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
    numbered = events.with_row_index("row")
    ordered = _flagged(numbered.filter(pl.col("kind") != "graph"), *_BY_CATEGORY, *_BY_MODULE)
    moe = _moe_layers(ordered)
    allreduce = (pl.col("role") == "allreduce") | ((pl.col("role") == "fused") & pl.col("fused_allreduce"))
    reduces = _placed(_with_surroundings(ordered, allreduce), ordered, moe)
    gathers = _with_surroundings(ordered, pl.col("role") == "all_gather")
    found = pl.concat([_reduce_kinds(reduces), _gather_kinds(gathers)])
    return numbered.join(found, on="row", how="left", maintain_order="left").drop("row")


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


def _flagged(events: pl.DataFrame, *flags: str) -> pl.DataFrame:
    """Events in launch order a rank, with ``order`` and what their category and module are."""
    # Sorting moves every column: only those that are read.
    events = events.select(*_NEEDED, "api_start", "category", "module")
    events = events.sort("rank", pl.coalesce("api_start", "start"), "start", "stream", "name_id")
    events = _with_flags(events, *flags)
    return events.select(*_NEEDED, *flags).with_row_index("order")


def _with_flags(events: pl.DataFrame, *flags: str) -> pl.DataFrame:
    """Events with what their category and module are; a flag is never null."""
    for column, patterns in (("category", _BY_CATEGORY), ("module", _BY_MODULE)):
        # A handful of distinct values, over millions of events.
        distinct = events.select(pl.col(column).unique())
        text = pl.col(column).cast(pl.String)
        said = distinct.with_columns(
            text.str.contains(patterns[name]).fill_null(False).alias(name) for name in flags if name in patterns
        )
        events = events.join(said, on=column, how="left", nulls_equal=True, maintain_order="left")
    return events


def _moe_layers(flagged: pl.DataFrame) -> pl.DataFrame:
    named = flagged.filter(pl.col("layer").is_not_null())
    return named.group_by("rank", "layer").agg((pl.col("experts") | pl.col("experts_module")).any().alias("moe"))


def _with_surroundings(ordered: pl.DataFrame, chosen: pl.Expr) -> pl.DataFrame:
    """The chosen events with what ran since the one before them, and the order of what comes next."""
    since = {
        "attention_since": pl.col("attention"),
        "experts_since": pl.col("experts"),
        "activation_since": pl.col("activation"),
        "embedding_since": pl.col("embedding"),
        "p2p_since": pl.col("role") == "p2p",
    }
    following = {"next_sampling": pl.col("sampling"), "next_layer": pl.col("attention") | pl.col("embedding")}
    chosen_rows = ordered.select(
        chosen.alias("chosen"),
        "rank",
        *[flag.cast(pl.Int32).cum_sum().alias(name) for name, flag in since.items()],
        *[pl.when(flag).then("order").backward_fill().over("rank").alias(name) for name, flag in following.items()],
    )
    # Counts run on from rank to rank, and so begin at what the rank before ended with.
    base = chosen_rows.group_by("rank", maintain_order=True).agg(pl.last(name).alias(f"{name}_base") for name in since)
    base = base.with_columns(pl.col(f"{name}_base").shift(1, fill_value=0) for name in since)
    at = chosen_rows.filter("chosen").join(base, on="rank", how="left", maintain_order="left")
    counted = at.select(
        *following,
        *[
            (pl.col(name) - pl.col(name).shift(1).over("rank").fill_null(pl.col(f"{name}_base"))).alias(name)
            for name in since
        ],
    )
    return (
        ordered.filter(chosen)
        .hstack(counted)
        .join(_compute_streams(ordered), on="rank", how="left", maintain_order="left")
    )


def _compute_streams(ordered: pl.DataFrame) -> pl.DataFrame:
    """``rank``, ``compute_stream``: the stream that computes longest."""
    ns = (pl.col("end") - pl.col("start")).sum().alias("ns")
    busy = ordered.filter(pl.col("role") == "compute").group_by("rank", "stream").agg(ns).sort("ns", "stream")
    return busy.group_by("rank", maintain_order=True).agg(pl.last("stream").alias("compute_stream"))


def _placed(reduces: pl.DataFrame, ordered: pl.DataFrame, moe: pl.DataFrame) -> pl.DataFrame:
    """Add where in its layer and forward each AllReduce is, and whether its layer and the one before have experts."""
    in_layer = ordered.filter(pl.col("layer").is_not_null())
    modules = in_layer.group_by(_INSTANCE).agg(
        pl.col("order").filter("attention_module").min().alias("first_attention"),
        pl.col("order").filter("mlp_module").min().alias("first_mlp"),
        pl.col("order").min().alias("first_layer"),
    )
    firsts = modules.group_by("rank", "forward").agg(pl.min("first_layer"))
    before = moe.select("rank", pl.col("layer") + 1, pl.col("moe").alias("moe_before"))
    placed = (
        reduces.join(moe, on=["rank", "layer"], how="left")
        .join(before, on=["rank", "layer"], how="left")
        .join(modules.drop("first_layer"), on=_INSTANCE, how="left")
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
        pl.when(inside).then(pl.int_range(pl.len()).over(_INSTANCE)).alias("nth"),
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
        pl.when((pl.col("of") > 1) & (pl.col("nth") == 0)).then(pl.lit("attention"))
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
