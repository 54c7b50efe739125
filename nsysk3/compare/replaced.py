"""AllReduce that sequence parallelism replaced: where calls went that are no longer there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nsysk3.compare.model import Comparison, Row

# AllReduce that fell by more than this, while others appeared, did not vanish.
_FELL = 0.5
_TAKERS = (
    ("reduce_scatter_count", "ReduceScatter"), ("all_gather_count", "AllGather"), ("fused_count", "fused kernels"),
)  # fmt: skip
# What is left of AllReduce are other calls (embedding, logits): that they take less time is neither good nor bad.
FUSED = "fused kernels communicate too, and their time is in neither communication nor compute"
_NOTED = ("allreduce_total_ns", "allreduce_p50_ns")
_NOT_BETTER = (*_NOTED, "allreduce_p95_ns", "allreduce_wait_ns", "allreduce_transfer_ns")


def takers(comparison: Comparison) -> dict[str, str]:
    """By label of a run of the base's layout: what it has more of instead of most of the base's AllReduce."""
    rows = {metric: comparison.row(metric, "window") for metric, _ in (("allreduce_count", ""), *_TAKERS)}
    found = {}
    for index, pair in enumerate(comparison.comparability, 1):
        base, other = _two(rows["allreduce_count"], index)
        if not pair.same_layout or base is None or other is None or other >= base * (1 - _FELL):
            continue
        grown = [name for metric, name in _TAKERS if _grew(rows[metric], index)]
        if grown:
            found[pair.other] = _listed(grown)
    return found


def told(comparison: Comparison, found: Mapping[str, str]) -> list[str]:
    """The same in words."""
    if len(set(found.values())) == 1 and len(found) == len(comparison.others):
        return [f"{next(iter(found.values()))} took the place of most AllReduce"]
    return [f"in {label}, {names} took the place of most AllReduce" for label, names in found.items()]


def with_replaced(comparison: Comparison) -> list[Row]:
    """The rows; those that hold the AllReduce which are left against all that there were say so."""
    found = takers(comparison)
    if not (said := told(comparison, found)):
        return comparison.rows
    text = "; ".join([*said, "those that are left are other calls"])
    rows = [_noted(row, text) if row.metric in _NOT_BETTER else row for row in comparison.rows]
    if not has_fused(found):
        return rows
    return [row.model_copy(update={"note": FUSED}) if row.metric == "comm_ns" else row for row in rows]


def has_fused(found: Mapping[str, str]) -> bool:
    """Whether some of the communication went into fused kernels."""
    return any("fused" in names for names in found.values())


def _noted(row: Row, text: str) -> Row:
    changed: dict[str, object] = {"better": None}
    if row.metric in _NOTED:
        changed["note"] = f"{row.note}; {text}" if row.note else text
    return row.model_copy(update=changed)


def _two(row: Row | None, index: int) -> tuple[float | None, float | None]:
    return (row.values[0].value, row.values[index].value) if row else (None, None)


def _grew(row: Row | None, index: int) -> bool:
    base, other = _two(row, index)
    return base is not None and other is not None and other > base


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
