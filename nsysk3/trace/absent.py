"""Is every rank that run.json, or the user's map, lists in the reports?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from nsysk3.run.absent import absent_of_host
from nsysk3.run.inputs import Problem
from nsysk3.run.manifest import MANIFEST_NAME, Manifest, RankEntry
from nsysk3.run.remote import AnyPath
from nsysk3.run.words import counted, first_of, ranks_in_words
from nsysk3.trace.identity import Rank, UserMap

# Hosts named in a sentence.
_SHOWN = 8
_UNKNOWN = "what hangs on them is not known"
_BRING = f"{_UNKNOWN}; bring their reports here and analyze again"


@dataclass(frozen=True)
class Missing:
    """Ranks that were not found.

    ``listed``: every rank of the run with its place, seen or not, none where nobody lists them; ``unplaced``: how many
    are missing of which nobody can tell the place; ``problems``: what to say of the missing.
    """

    listed: tuple[RankEntry, ...]
    unplaced: int
    problems: tuple[Problem, ...]


def absent_ranks(
    run_dir: AnyPath | None,
    manifest: Manifest | None,
    user_map: UserMap | None,
    found: Sequence[Rank],
    problems: Sequence[Problem],
) -> Missing:
    """What of the listed ranks did GPU work in no report.

    Hosts whose report could not be used are among ``problems`` already, and are not said twice.
    """
    mapped = {entry["world_rank"]: entry for entry in user_map.entries} if user_map else {}
    manifest = manifest or Manifest()
    renumbered = _renumbered(manifest.ranks, found)
    said: list[Problem] = []
    topology = manifest.topology
    count = max(len(manifest.ranks), topology.pp * topology.tp if topology else 0)
    if run_dir is not None:
        by_host = {} if renumbered else _by_host(manifest.ranks, found)
        said = _manifest_problems(str(run_dir / MANIFEST_NAME), manifest, count, by_host, found, problems, renumbered)
    if user_map and (renumbered or not said):
        said = _map_problems(str(user_map.path), mapped, found) or said
    count = max(count, len(mapped))
    if len(found) >= count and not said:
        return Missing(tuple(manifest.ranks), 0, ())
    listed = _listed(mapped, () if renumbered else manifest.ranks)
    numbers = {entry.world_rank for entry in listed}
    placed = len(numbers) >= count and all(rank.source != "inferred" and rank.world_rank in numbers for rank in found)
    return Missing(listed, 0 if placed else max(count - len(found), 1), tuple(said))


def _map_problems(path: str, mapped: Mapping[int, object], found: Sequence[Rank]) -> list[Problem]:
    if any(rank.source == "user map" for rank in found):
        if lost := mapped.keys() - {rank.world_rank for rank in found}:
            which = ranks_in_words(lost)
            return [Problem(path, f"{path}: {_in_no_report(len(lost), mapped)}: {which}: {_BRING}")]
    elif len(mapped) > len(found):
        listed = f"lists {counted(len(mapped), 'rank')}"
        return [Problem(path, f"{path}: {_untold(listed, found, 'it does not name each of these')}")]
    return []


def _renumbered(listed: Sequence[RankEntry], found: Sequence[Rank]) -> bool:
    """The user's map gives other numbers or stages than the manifest."""
    numbers = {(entry.host, entry.device): entry.world_rank for entry in listed}
    stages = {entry.world_rank: entry.pp for entry in listed}
    return any(
        numbers.get((rank.host, rank.device_id), rank.world_rank) != rank.world_rank
        or rank.pp_rank not in (None, stages.get(rank.world_rank or 0))
        for rank in found
        if listed and rank.source == "user map"
    )


def _listed(mapped: Mapping[int, Mapping[str, Any]], listed: Sequence[RankEntry]) -> tuple[RankEntry, ...]:
    """The longer list; none where it does not give each rank a place of its own."""
    ours = [
        RankEntry(world_rank=rank, host="", device=0, pp=each["pp"], tp=each["tp"])
        for rank, each in mapped.items()
        if {"pp", "tp"} <= each.keys()
    ]
    longer = ours if len(ours) > len(listed) else listed
    return tuple(longer) if len({(entry.pp, entry.tp) for entry in longer}) == len(longer) else ()


def _in_no_report(count: int, listed: Sequence[object] | Mapping[int, object]) -> str:
    return f"{count} of the {counted(len(listed), 'rank')} that it lists {'is' if count == 1 else 'are'} in no report"


def _manifest_problems(
    path: str,
    manifest: Manifest,
    count: int,
    by_host: Mapping[str, tuple[int, Sequence[int]]],
    found: Sequence[Rank],
    problems: Sequence[Problem],
    renumbered: bool,
) -> list[Problem]:
    """The ranks that are known to be absent, by host; and how many more are, as the count tells."""
    unusable = {name for problem in problems for name in _folders(problem)}
    named = {host: each for host, each in by_host.items() if host not in unusable}
    told = []
    if named:
        with_report = {rank.host for rank in found}
        each = [_words(number, ranks, host, host in with_report) for host, (number, ranks) in named.items()]
        more = f"; and those of {len(each) - _SHOWN} more hosts" if len(each) > _SHOWN else ""
        lost = sum(number for number, _ in named.values())
        told.append(f"{path}: {_in_no_report(lost, manifest.ranks)}: {'; '.join(each[:_SHOWN])}{more}: {_BRING}")
    rest = count - len(found) - sum(number for number, _ in by_host.values())
    if rest > 0:
        listed = f"lists {counted(count, 'rank')}"
        if count > len(manifest.ranks):
            listed = f"has a topology of {counted(count, 'rank')}"
        told.append(f"{path}: {_untold(listed, found, _why_untold(manifest.ranks, found, renumbered))}")
    return [Problem(path, message) for message in told]


def _untold(listed: str, found: Sequence[Rank], why: str) -> str:
    were = "was" if len(found) == 1 else "were"
    return f"{listed}, {len(found)} {were} found; which are missing cannot be told: {why}: {_UNKNOWN}"


def _why_untold(listed: Sequence[RankEntry], found: Sequence[Rank], renumbered: bool) -> str:
    if renumbered:
        return "the rank map gives other numbers"
    hosts = list(dict.fromkeys(entry.host for entry in listed))
    here = list(dict.fromkeys(rank.host for rank in found))
    lost = [host for host in hosts if host not in here]
    strange = [host for host in here if host not in hosts]
    if not (lost and strange):
        return "it does not list each with its host and device"
    return f"its hosts {first_of(lost, _SHOWN)} are not those of the reports {first_of(strange, _SHOWN)}"


def _words(number: int, ranks: Sequence[int], host: str, reported: bool) -> str:
    which = ranks_in_words(ranks) if number == len(ranks) else f"{number} of {ranks_in_words(ranks)}"
    why = "its report has no GPU work of it" if reported else f"no report in nodes/{host}"
    if number < len(ranks):
        why = "every process calls its GPU the same: which has no GPU work is not known"
    return f"{which} of {host} ({why})"


def _by_host(listed: Sequence[RankEntry], found: Sequence[Rank]) -> dict[str, tuple[int, Sequence[int]]]:
    """By host, in the order of the list, how many ranks are absent, and which these can be."""
    hosts: dict[str, list[RankEntry]] = {}
    for entry in listed:
        hosts.setdefault(entry.host, []).append(entry)
    known = {rank.world_rank for rank in found if rank.source != "inferred"}
    if not known and len(found) >= len(listed):
        return {}  # ranks that nobody names: nothing says which is which
    places = {host: {(rank.pid, rank.device_id) for rank in found if rank.host == host} for host in hosts}
    strangers = not known and any(rank.host not in hosts for rank in found)
    # Processes that see one GPU each call it the same: what lacks one such does not say which.
    one_for_all = any(len({device for _, device in each}) == 1 < len(each) for each in places.values())
    # Numbers from elsewhere may count otherwise than the list.
    exact = len(known & {entry.world_rank for entry in listed}) == len(found)
    absent: dict[str, tuple[int, Sequence[int]]] = {}
    for host, entries in hosts.items():
        here = places[host]
        if strangers and not here:
            continue  # it may be theirs under another name
        ranks = sorted(entry.world_rank for entry in entries) if exact else absent_of_host(entries, here)
        ranks = [rank for rank in ranks if rank not in known]
        if one_for_all and here and not known and (short := len(entries) - len(here)) > 0:
            absent[host] = short, sorted(entry.world_rank for entry in entries)
        elif ranks and not (one_for_all and here and not known):
            absent[host] = len(ranks), ranks
    return absent


def _folders(problem: Problem) -> tuple[str, str]:
    """The folder that an unusable report lies in, or is."""
    path = PurePath(problem.path)
    return path.name, path.parent.name
