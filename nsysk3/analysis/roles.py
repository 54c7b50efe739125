"""Give every GPU event its role and category: by name, then by what the trace shows where a name cannot tell."""

from __future__ import annotations

import polars as pl

from nsysk3.analysis.nccl_links import LINK_SCHEMA, link_nccl
from nsysk3.analysis.rows import laid_over
from nsysk3.classify import COMM_ROLES, ROLES, RuleSet, nccl_op_role

ALL_ROLES = (*ROLES, "graph")
ROLE = pl.Enum(ALL_ROLES)
UNKNOWN_SENDRECV = "SENDRECV_UNKNOWN"


def assign_roles(events: pl.DataFrame, names: pl.DataFrame, calls: pl.DataFrame, rules: RuleSet) -> pl.DataFrame:
    """Events with ``role`` (Enum), ``category`` (Categorical) and, for communication, the columns of LINK_SCHEMA.

    Names decide first (``rules``).  Three things a name cannot tell come from the NCCL ranges around the launch: what a
    generic NCCL kernel ran, which copies are a copy-engine collective, and whether SendRecv is pipeline P2P or an
    all-to-all.
    """
    named = classify_names(names, rules)
    kind = pl.col("kind")
    events = events.join(named.select("name_id", "role", "category"), on="name_id", how="left", maintain_order="left")
    events = events.with_columns(
        pl.when(kind == "copy").then(pl.lit("copy", ROLE)).when(kind == "graph").then(pl.lit("graph", ROLE))
        .otherwise("role").alias("role"),
    )  # fmt: skip
    # Few events are communication or copies: only those are linked and corrected, and then laid over the others.
    asked = events["role"].is_in([*COMM_ROLES, "copy"])
    read = ("report", "rank", "tid", "api_start", "stream", "kind", "role", "category")
    linked = _settle(link_nccl(events.select(read).filter(asked), calls))
    if (linked["role"] == "p2p").any():
        linked = _settle_sendrecv(linked, events.select("rank", "stream").filter(~asked).unique())
    over = laid_over(linked.select("role", "category", *LINK_SCHEMA), asked.arg_true(), events.height)
    category = pl.when(pl.col("asked")).then("category").otherwise("own").alias("category")
    return events.with_columns(
        over["role"].fill_null(events["role"]),
        over.select("category", own=events["category"], asked=asked).select(category).to_series(),
        *over.select(*LINK_SCHEMA),
    )


def classify_names(names: pl.DataFrame, rules: RuleSet) -> pl.DataFrame:
    """``names`` with ``role``, ``category`` and ``rule`` (its pattern, null where none matched)."""
    matches = [rules.match(short, name) for short, name in names.select("short_name", "name").iter_rows()]
    return names.with_columns(
        pl.Series("role", [match.role for match in matches], ROLE),
        pl.Series("category", [match.category for match in matches], pl.Categorical),
        pl.Series("rule", [match.rule.pattern if match.rule else None for match in matches], pl.String),
    )


def _settle(linked: pl.DataFrame) -> pl.DataFrame:
    """Correct roles by the NCCL call around the launch."""
    ops = {op: nccl_op_role(op) for op in linked["nccl_op"].drop_nulls().unique().to_list()}
    known = {op: found for op, found in ops.items() if found}
    op_role = pl.col("nccl_op").replace_strict({op: r for op, (r, _) in known.items()}, default=None, return_dtype=ROLE)
    op_category = pl.col("nccl_op").replace_strict(
        {op: c for op, (_, c) in known.items()}, default=None, return_dtype=pl.String
    )
    generic = (pl.col("role") == "comm_other") & op_role.is_not_null()
    copied = (pl.col("role") == "copy") & op_role.is_not_null() & (pl.col("kind") == "copy")
    if not known or not linked.select((generic | copied).any()).item():
        return linked
    return linked.with_columns(
        pl.when(generic | copied).then(op_role).otherwise("role").alias("role"),
        pl.when(generic).then(op_category).when(copied).then("CE_" + op_category)
        .otherwise(pl.col("category").cast(pl.String))
        .cast(pl.Categorical).alias("category"),
    )  # fmt: skip


def _settle_sendrecv(events: pl.DataFrame, computing: pl.DataFrame) -> pl.DataFrame:
    """Tell pipeline P2P from all-to-all among SendRecv kernels.

    With NCCL ranges: at most one send and one receive, with one peer, is P2P; more is an all-to-all.  A kernel without
    a range (the capture cut it off) goes with those of its stream when they agree.  Without any range the only evidence
    is a stream that carries nothing else, as a peer pair's does; otherwise the kernel stays communication of unknown
    kind.  ``computing``: ``rank``, ``stream`` of the streams with work that is not among ``events``.
    """
    is_p2p = pl.col("role") == "p2p"
    in_range = pl.col("n_sends").is_not_null() & ((pl.col("n_sends") + pl.col("n_recvs")) > 0)
    one_peer = (pl.col("n_sends") <= 1) & (pl.col("n_recvs") <= 1) & (pl.col("n_peers") <= 1)
    many = (pl.col("n_sends") > 1) | (pl.col("n_recvs") > 1)
    pure = is_p2p.all().over("rank", "stream") & pl.col("computes").is_null()
    events = events.join(
        computing.with_columns(pl.lit(True).alias("computes")),
        on=["rank", "stream"], how="left", nulls_equal=True, maintain_order="left",
    )  # fmt: skip
    proven = (
        pl.when(in_range & one_peer).then(pl.lit("p2p", ROLE)).when(in_range & many).then(pl.lit("all_to_all", ROLE))
    )
    by_stream = pl.col("proven").drop_nulls()
    events = events.with_columns(pl.when(is_p2p).then(proven).alias("proven")).with_columns(
        pl.when(by_stream.n_unique().over("rank", "stream") == 1)
        .then(by_stream.first().over("rank", "stream"))
        .when(pure & by_stream.len().over("rank", "stream").eq(0))
        .then(pl.lit("p2p", ROLE))
        .alias("likely")
    )
    unproven = (
        pl.when(in_range).then(pl.lit("comm_other", ROLE)).otherwise(pl.coalesce("likely", pl.lit("comm_other", ROLE)))
    )
    role = pl.when(is_p2p).then(pl.coalesce("proven", unproven)).otherwise("role")
    events = events.with_columns(role.alias("settled"))
    unknown = is_p2p & (pl.col("settled") == "comm_other")
    return events.with_columns(
        pl.when(unknown).then(pl.lit(UNKNOWN_SENDRECV)).otherwise(pl.col("category").cast(pl.String))
        .cast(pl.Categorical).alias("category"),
        pl.col("settled").alias("role"),
    ).drop("settled", "proven", "likely", "computes")  # fmt: skip
