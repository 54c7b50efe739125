"""What each AllReduce (and AllGather) of a forward was for."""

from __future__ import annotations

import polars as pl

COLLECTIVE_KINDS = pl.Enum(
    ["embedding", "attention", "moe", "dense_mlp", "logits", "pp_gather", "unknown"]
)
KIND_SOURCES = pl.Enum(["range", "name", "neighbours", "bytes", "position"])
# Kimi-K3: the experts' reduction carries the latent beside the hidden state, (3584 + 7168) / 7168.
_MOE_BYTES_RATIO = 1.5
_ATTENTION_MODULE = r"^(?:self_attn|attn|attention|linear_attn|mixer)\b"
_MLP_MODULE = r"^(?:mlp|feed_forward|ffn|moe|block_sparse_moe)\b"
_LOGITS_MODULE = r"^(?:logits_processor|lm_head)"
_EMBEDDING_MODULE = r"embed"
_ATTENTION = r"^(?:KDA|KDA_CONV|MLA_ATTN)$"
_EXPERTS = r"^(?:MOE_ROUTE|MOE_GEMM|MOE_PERMUTE|MOE_FINALIZE|A2A_DISPATCH|A2A_COMBINE)$"
_FUSED_ALLREDUCE = r"^FUSED_(?:AR_|MOEFINALIZE_AR|QKNORM_AR)"


def moe_layers(events: pl.DataFrame) -> pl.DataFrame:
    """``rank``, ``layer``, ``moe``: whether any forward ran routed experts in the layer."""
    category = pl.col("category").cast(pl.String)
    experts = category.str.contains(_EXPERTS) | pl.col("module").cast(pl.String).str.contains(r"\.experts\b").fill_null(False)
    named = events.filter(pl.col("layer").is_not_null())
    return named.group_by("rank", "layer").agg(experts.fill_null(False).any().alias("moe"))
