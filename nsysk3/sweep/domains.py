"""Communication domains of layouts: the ranks of a stage, and a pair across a stage boundary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from nsysk3.launch.topology import place_ranks
from nsysk3.run.manifest import RankEntry
from nsysk3.sweep.matrix import Layout

ALL_REDUCE, SENDRECV = "all_reduce", "sendrecv"


@dataclass(frozen=True)
class Domain:
    """GPUs that communicate, by host in rank order, and the operation they do."""

    name: str
    operation: str
    places: tuple[tuple[str, int], ...]

    @property
    def hosts(self) -> tuple[str, ...]:
        """Its hosts, in the order of its ranks."""
        return tuple(dict.fromkeys(host for host, _ in self.places))

    def devices(self, host: str) -> tuple[int, ...]:
        """Its devices on one host, in the order of its ranks."""
        return tuple(device for name, device in self.places if name == host)


def domains(layouts: Iterable[Layout], hosts: Sequence[str]) -> list[Domain]:
    """Every domain of the layouts once, smallest first.

    For TP the first stage stands for all of its layout. Of the boundaries between stages there is one inside a host and
    one between hosts, each where a layout has one.
    """
    found: dict[tuple[str, tuple[tuple[str, int], ...]], Domain] = {}
    pairs: dict[str, Domain] = {}
    for layout in layouts:
        ranks = [rank for node in place_ranks(hosts, layout.pp, layout.tp, layout.ep) for rank in node]
        stage = tuple(_place(rank) for rank in ranks if rank.pp == 0)
        if len(stage) > 1:
            found.setdefault((ALL_REDUCE, stage), Domain(f"TP{layout.tp}", ALL_REDUCE, stage))
        first = sorted((rank for rank in ranks if rank.tp == 0), key=lambda rank: rank.pp)
        for before, after in pairwise(first):
            where = "inside a host" if before.host == after.host else "between hosts"
            pairs.setdefault(where, Domain(f"PP {where}", SENDRECV, (_place(before), _place(after))))
    return sorted(found.values(), key=lambda domain: len(domain.places)) + [pairs[key] for key in sorted(pairs)[::-1]]


def _place(rank: RankEntry) -> tuple[str, int]:
    return rank.host, rank.device
