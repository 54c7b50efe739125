"""Is every rank that run.json lists in the reports that lie in its directory?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from nsysk3.run.absent import absent_of_host
from nsysk3.run.inputs import Problem
from nsysk3.run.manifest import MANIFEST_NAME, Manifest, RankEntry
from nsysk3.run.remote import AnyPath
from nsysk3.run.words import ranks_in_words
from nsysk3.trace.identity import Rank

# Hosts named in a sentence.
_SHOWN = 8


def absent_ranks(
    run_dir: AnyPath | None, manifest: Manifest | None, found: Sequence[Rank], problems: Sequence[Problem]
) -> list[Problem]:
    """One problem that names the listed ranks without GPU work in any report, and their hosts; none without any.

    Hosts whose report could not be used are among ``problems`` already, and are not said twice.
    """
    if run_dir is None or manifest is None:
        return []
    said = {name for problem in problems for name in _folders(problem)}
    absent = {host: ranks for host, ranks in _by_host(manifest.ranks, found).items() if host not in said}
    if not absent:
        return []
    with_report = {rank.host for rank in found}
    each = [f"{ranks_in_words(ranks)} of {host} ({_why(host, host in with_report)})" for host, ranks in absent.items()]
    more = f"; and those of {len(each) - _SHOWN} more hosts" if len(each) > _SHOWN else ""
    count = sum(map(len, absent.values()))
    path = str(run_dir / MANIFEST_NAME)
    return [
        Problem(
            path,
            f"{path}: {count} of the {len(manifest.ranks)} ranks that it lists "
            f"{'is' if count == 1 else 'are'} in no report: {'; '.join(each[:_SHOWN])}{more}: what hangs on them is "
            "not known; bring their reports here and analyze again",
        )
    ]


def _why(host: str, reported: bool) -> str:
    return "its report has no GPU work of it" if reported else f"no report in nodes/{host}"


def _by_host(listed: Sequence[RankEntry], found: Sequence[Rank]) -> dict[str, tuple[int, ...]]:
    """Absent ranks by host, in the order of the list."""
    hosts: dict[str, list[RankEntry]] = {}
    for entry in listed:
        hosts.setdefault(entry.host, []).append(entry)
    known = {rank.world_rank for rank in found if rank.source != "inferred"}
    here = {rank.host for rank in found}
    if not known and (here.isdisjoint(hosts) or len(found) >= len(listed)):
        return {}  # reports of other names, and ranks that nobody names: nothing says which is which
    absent = {}
    for host, entries in hosts.items():
        places = {(rank.pid, rank.device_id) for rank in found if rank.host == host}
        if ranks := tuple(rank for rank in absent_of_host(entries, places) if rank not in known):
            absent[host] = ranks
    return absent


def _folders(problem: Problem) -> tuple[str, str]:
    """The folder that an unusable report lies in, or is."""
    path = PurePath(problem.path)
    return path.name, path.parent.name
