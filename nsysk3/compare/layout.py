"""The parallel layout of a run: what its manifest says, else what its ranks and stages show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

from nsysk3.compare.model import Layout
from nsysk3.result import Result
from nsysk3.run.words import counted


def layout_of(result: Result) -> Layout:
    """PP, TP and EP of a run.  An inferred layout says so, and so does one that the trace contradicts."""
    ranks = len(result.document.ranks)
    seen = stage_of(result)
    topology = (result.document.manifest or {}).get("topology")
    pp = _number(topology, "pp")
    tp = _number(topology, "tp")
    if pp and tp:
        note = None if ranks == pp * tp else f"the traces hold {ranks} of {pp * tp} ranks"
        if seen and None not in seen.values() and len(set(seen.values())) > pp:
            note = f"the manifest says PP{pp}, but the trace shows {len(set(seen.values()))} stages"
        return _layout(pp, tp, _number(topology, "ep"), ranks, "manifest", note)
    stages = len({stage for stage in seen.values() if stage is not None})
    ep = max((rank.ep_rank for rank in result.document.ranks if rank.ep_rank is not None), default=-1) + 1 or None
    if None in seen.values() or not stages or ranks % stages:
        return _layout(None, None, ep, ranks, "inferred", "the trace does not tell which rank belongs to which stage")
    return _layout(stages, ranks // stages, ep, ranks, "inferred", "inferred from the ranks and stages of the trace")


def stage_of(result: Result) -> dict[int, int | None]:
    """Stage of each row of ``document.ranks``; without any pipeline traffic all ranks are of one stage."""
    table = result.tables.get("pipeline", pl.DataFrame())
    seen = dict(table.select("rank", "stage").iter_rows()) if table.height else {}
    ranks = result.document.ranks
    named = {index: seen.get(index, rank.pp_rank) for index, rank in enumerate(ranks)}
    if all(stage is None for stage in named.values()) and all(rank.p2p_count == 0 for rank in ranks):
        return dict.fromkeys(named, 0)
    return named


def _number(topology: object, key: str) -> int | None:
    found = topology.get(key) if isinstance(topology, Mapping) else None
    return found if isinstance(found, int) and found > 0 else None


def _layout(pp: int | None, tp: int | None, ep: int | None, ranks: int, source: Any, note: str | None) -> Layout:
    parts = [f"{name}{size}" for name, size in (("PP", pp), ("TP", tp), ("EP", ep)) if size]
    text = " / ".join(parts) if pp else f"{counted(ranks, 'rank')}, layout unknown"
    return Layout(pp=pp, tp=tp, ep=ep, ranks=ranks, source=source, text=text, note=note)
