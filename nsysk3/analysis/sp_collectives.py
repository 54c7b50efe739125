"""Sequence-parallel collectives: what was requested, what ran, what fell back and why (docs/metrics.md section 12).

SGLang and nsysk3 each have kernels that reduce-scatter (or gather) and compute in one, and each declines what it cannot
do: SGLang with a line in its log or without a word, nsysk3 with a mark around every call.  Only the kernels in the
trace prove that something ran.
"""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from nsysk3.result.model import SpInfo
from nsysk3.run.manifest import Feature, Manifest
from nsysk3.run.words import counted
from nsysk3.trace.another_run import SP_OWN, SP_SGLANG

CALLS_SCHEMA = pl.Schema(
    {"operation": pl.String(), "path": pl.String(), "mode": pl.String(), "reason": pl.String(), "calls": pl.Int64()}
)
_MARK = r"^k3\.(?P<operation>\w+) .*?\bpath=(?P<path>\S+) mode=(?P<mode>\S+) reason=(?P<reason>.*)$"
_BASELINE = "nccl"
_SWITCHES = ("SGLANG_K3_SP_COLLECTIVE", "SGLANG_K3_SP_ATTN_RES")


def sp_calls(names: pl.Series) -> pl.DataFrame:
    """Marked calls by operation, path, mode and reason, CALLS_SCHEMA, most first; ``names``: of all NVTX ranges."""
    text = names.drop_nulls().cast(pl.String).rename("name")
    marks = text.filter(text.str.starts_with("k3."))
    found = marks.to_frame().select(pl.col("name").str.extract_groups(_MARK)).unnest("name").drop_nulls("operation")
    return add_calls([found.with_columns(pl.lit(1, pl.Int64).alias("calls")).cast(CALLS_SCHEMA)])


def add_calls(parts: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """The calls of several reports together."""
    keys = [name for name in CALLS_SCHEMA if name != "calls"]
    counted = pl.concat(parts).group_by(keys).agg(pl.col("calls").sum())
    return counted.sort("calls", *keys, descending=[True, *[False] * len(keys)])


def sp_info(manifest: Manifest | None, kernels: pl.DataFrame, calls: pl.DataFrame, opaque: bool) -> list[SpInfo]:
    """One entry an implementation that anything is known of: nsysk3's, SGLang's.

    ``kernels``: the table of that name, of the window.  ``opaque``: CUDA graphs were traced as a whole, so that which
    kernels ran cannot be told.
    """
    features = {feature.name: feature for feature in (manifest.features if manifest else None) or ()}
    return [
        entry
        for entry in (_nsysk3(features.get("NSYSK3_SP"), kernels, calls, opaque), _sglang(features, kernels, opaque))
        if entry is not None
    ]


def sp_sentences(entries: Sequence[SpInfo]) -> list[str]:
    """A sentence an implementation that was requested or ran."""
    return [f"SP collectives of {entry.name}: {_state(entry)}" for entry in entries if entry.requested or entry.active]


def _state(entry: SpInfo) -> str:
    asked = (
        "requested" if entry.requested else "not known to be requested" if entry.requested is None else "not requested"
    )
    if entry.active is None:
        return f"{asked}; whether they ran cannot be told ({entry.reason})"
    if not entry.active:
        return f"{asked}, but fell back: {entry.reason}" if entry.fell_back else f"{asked}, did not run: {entry.reason}"
    partly = f"; in part fell back: {entry.reason}" if entry.fell_back else ""
    return f"{asked} and active, {counted(entry.kernels or 0, 'kernel')} in the window{partly}"


def _nsysk3(feature: Feature | None, kernels: pl.DataFrame, calls: pl.DataFrame, opaque: bool) -> SpInfo | None:
    ran = _count(kernels, SP_OWN, fused=True)
    if feature is None and calls.is_empty() and not ran:
        return None
    modes = set(calls["mode"].to_list())
    requested = feature.requested if feature else (bool(modes - {_BASELINE}) if modes else None)
    declined = calls.filter(pl.col("path") == _BASELINE)
    active = True if ran else None if opaque else False
    fell_back = None if requested is None or active is None else bool(requested and (not active or declined.height))
    reason = _declined(declined, calls)
    if reason is None and not ran:
        reason = (
            _graphs() if opaque else (feature.reason if feature else None) or "none of its kernels ran in the window"
        )
    counted = None if calls.is_empty() else int(calls["calls"].sum())
    fused = None if counted is None else counted - int(declined["calls"].sum())
    return SpInfo(
        name="nsysk3", requested=requested, active=active, fell_back=fell_back, reason=reason,
        kernels=None if opaque and not ran else ran, calls=counted, fused_calls=fused,
    )  # fmt: skip


def _declined(declined: pl.DataFrame, calls: pl.DataFrame) -> str | None:
    """``12 of 384 calls by NCCL: tokens do not divide over 2 ranks (8), in a CUDA graph (4)``."""
    if declined.is_empty():
        return None
    total = int(calls["calls"].sum())
    by_reason = declined.group_by("reason").agg(pl.col("calls").sum()).sort("calls", "reason", descending=[True, False])
    why = ", ".join(f"{reason} ({count:,})" for reason, count in by_reason.head(3).iter_rows())
    return f"{int(declined['calls'].sum()):,} of {total:,} calls by NCCL: {why}"


def _sglang(features: dict[str, Feature], kernels: pl.DataFrame, opaque: bool) -> SpInfo | None:
    ran = _count(kernels, SP_SGLANG)
    told = [features[name] for name in _SWITCHES if name in features]
    if not told and not ran:
        return None
    requested = any(feature.requested for feature in told) if told else None
    said = next((feature for feature in told if feature.fell_back and feature.reason), None)
    active = True if ran else None if opaque and not said else False
    fell_back = None if requested is None or active is None else bool(requested and (not active or said))
    reason = said.reason if said else None
    if reason is None and not ran:
        scatters, gathers = (_role_count(kernels, role) for role in ("reduce_scatter", "all_gather"))
        reason = _graphs() if opaque else (
            f"none of their kernels ran in the window; {scatters:,} reduce-scatters and {gathers:,} all-gathers did"
        )  # fmt: skip
    return SpInfo(
        name="sglang", requested=requested, active=active, fell_back=fell_back, reason=reason,
        kernels=None if opaque and not ran else ran,
    )  # fmt: skip


def _count(kernels: pl.DataFrame, pattern: str, fused: bool = False) -> int:
    """Launches of kernels whose name matches; ``fused``: of those that communicate."""
    named = kernels.filter(pl.col("name").str.contains(pattern))
    return int(named.filter(pl.col("role") == "fused")["count"].sum() if fused else named["count"].sum())


def _role_count(kernels: pl.DataFrame, role: str) -> int:
    return int(kernels.filter(pl.col("role") == role)["count"].sum())


def _graphs() -> str:
    return "CUDA graphs were traced as a whole: their kernels are unknown"
