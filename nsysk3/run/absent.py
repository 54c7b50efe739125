"""Ranks that a manifest lists and a trace does not hold: asked while a run is made, and when it is read."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from nsysk3.run.manifest import RankEntry

Places = Collection[tuple[int | None, int]]


def one_device_for_all(listed: Sequence[RankEntry], places: Places) -> bool:
    """Every process sees one device and gives it the same number: ranks are told apart by their ids alone."""
    return len({device for _, device in places}) == 1 < len(places) == len(listed)


def absent_of_host(listed: Sequence[RankEntry], places: Places) -> tuple[int, ...]:
    """Ranks of one host whose device is in none of the (process, device) ``places`` that launched kernels."""
    if one_device_for_all(listed, places):
        return ()
    devices = {device for _, device in places}
    return tuple(sorted(rank.world_rank for rank in listed if rank.device not in devices))
