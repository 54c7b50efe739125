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
# What fused kernels do is in none of these, so that less of them is no gain by itself, nor more a loss.
_WITHOUT_FUSED = (
    "comm_ns", "comm_share", "exposed_comm_ns", "exposed_comm_share", "exposed_transfer_ns",
    "exposed_wait_ns",
)  # fmt: skip
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
    """The rows; those say so that hold what is left of replaced AllReduce, or of communication that was fused."""
    rows = comparison.rows
    found = takers(comparison)
    if said := told(comparison, found):
        text = "; ".join([*said, "those that are left are other calls"])
        rows = [
            _noted(row, text if row.metric in _NOTED else None) if row.metric in _NOT_BETTER else row for row in rows
        ]
    if fused(comparison):
        told_in = ("comm_ns", "exposed_comm_ns")
        rows = [
            _noted(row, FUSED if row.metric in told_in else None) if row.metric in _WITHOUT_FUSED else row
            for row in rows
        ]
    return rows


def fused(comparison: Comparison) -> bool:
    """Whether some of the communication went into fused kernels of which the runs have none or fewer."""
    if any("fused" in names for names in takers(comparison).values()):
        return True
    rows = [comparison.row(metric, "window") for metric in ("fused_count", "fused_ns")]
    return any({0.0} < {bool(value.value) for value in row.values if value.value is not None} for row in rows if row)


def _noted(row: Row, text: str | None) -> Row:
    """The row as one where less is neither good nor bad, with ``text`` for its reader."""
    note = "; ".join(each for each in (row.note, text) if each)
    return row.model_copy(update={"better": None, "note": note or None})


def _two(row: Row | None, index: int) -> tuple[float | None, float | None]:
    return (row.values[0].value, row.values[index].value) if row else (None, None)


def _grew(row: Row | None, index: int) -> bool:
    base, other = _two(row, index)
    return base is not None and other is not None and other > base


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
