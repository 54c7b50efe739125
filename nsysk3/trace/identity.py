"""Which rank a (report, process, GPU) is, and how that is known.

Sources in order of trust: the user's map, the run manifest, nsysk3's own marker, NCCL communicator payloads,
MPI_RANKS, process titles, the launched process's environment, the file name, and last the order of hosts and GPUs,
which is a guess and is called ``inferred``.
"""

from __future__ import annotations

import fnmatch
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl

from nsysk3.errors import InputError
from nsysk3.run.inputs import natural
from nsysk3.run.manifest import Manifest
from nsysk3.run.words import first_of
from nsysk3.trace.facts import Known, ReportFacts

# Tables and GPUs named in a sentence.
_SHOWN = 4
_FILE_RANK = re.compile(r"rank[_-]?(\d+)", re.IGNORECASE)
_MAP_KEYS = ("report", "host", "pid", "device", "world_rank", "pp", "tp", "ep")
_GLOBAL_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "PALS_RANKID", "SLURM_PROCID")


@dataclass(frozen=True)
class Rank:
    """One GPU as one process of one report uses it."""

    report: int
    report_name: str
    host: str
    pid: int | None
    device_id: int
    gpu_uuid: str | None = None
    gpu_name: str | None = None
    world_rank: int | None = None
    pp_rank: int | None = None
    tp_rank: int | None = None
    ep_rank: int | None = None
    source: str = "inferred"


Source = Callable[[Rank], Known | None]


@dataclass(frozen=True)
class UserMap:
    """The TOML map that says which GPU is which rank: ``path``, and its ``[[rank]]`` tables.

    Each has any of report (glob), host (glob), pid, device to match, and world_rank, pp, tp, ep to say.
    """

    path: Path
    entries: Sequence[Mapping[str, Any]]

    @classmethod
    def read(cls, path: Path) -> UserMap:
        """Raises InputError when it is unusable."""
        try:
            entries = tomllib.loads(path.read_text("utf-8")).get("rank", [])
        except OSError as error:
            why = "no such file" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
            raise InputError(f"{path}: {why}; --ranks takes a TOML rank map") from error
        except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise InputError(f"{path}: not a readable TOML rank map ({error})") from error
        if not isinstance(entries, list) or not entries:
            raise InputError(f"{path}: no [[rank]] tables; each needs world_rank and some of report, host, pid, device")
        for number, entry in enumerate(entries, 1):
            if not isinstance(entry, dict) or not _is_rank(entry.get("world_rank")):
                raise InputError(f"{path}: [[rank]] number {number} has no whole-number world_rank")
            if not all(_is_rank(entry[key]) for key in ("pp", "tp", "ep") if key in entry):
                raise InputError(f"{path}: [[rank]] number {number}: pp, tp and ep must be whole numbers")
            if unknown := [key for key in entry if key not in _MAP_KEYS]:
                raise InputError(
                    f"{path}: [[rank]] number {number}: unknown key {unknown[0]!r}; one of {', '.join(_MAP_KEYS)}"
                )
        return cls(path, entries)

    def useless(self, places: Sequence[Rank]) -> str | None:
        """What to say where none of the tables matches any of ``places``."""
        numbers = self._idle(places)
        if len(numbers) < len(self.entries):
            return None
        there = list(dict.fromkeys(f"device {place.device_id} of {place.host}" for place in places))
        return f"{self.path}: {self._which(numbers)}, so nothing of it was used; there is {first_of(there, _SHOWN)}"

    def idle(self, places: Sequence[Rank]) -> list[str]:
        """A note where some tables match none of ``places``."""
        numbers = self._idle(places)
        return [f"{self.path}: {self._which(numbers)}"] if numbers else []

    def _idle(self, places: Sequence[Rank]) -> list[int]:
        return [
            number for number, entry in enumerate(self.entries) if not any(_matches(entry, place) for place in places)
        ]

    def _which(self, numbers: Sequence[int]) -> str:
        each = []
        for number in numbers[:_SHOWN]:
            keys = [key for key in ("report", "host", "pid", "device") if key in self.entries[number]]
            asked = ", ".join(f"{key} {self.entries[number][key]}" for key in keys)
            each.append(f"number {number + 1} matches no GPU ({asked})")
        more = f"; nor do {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else ""
        return f"[[rank]] {'; '.join(each)}{more}"


def identify(
    reports: Sequence[ReportFacts],
    places: Sequence[Rank],
    *,
    manifest: Manifest | None = None,
    user_map: UserMap | None = None,
    nccl_inits: pl.DataFrame | None = None,
) -> list[Rank]:
    """Label the places that ran kernels, in rank order.

    ``places`` carry report, pid and device.  ``nccl_inits``: ``report``, ``pid``, ``rank``, ``nranks`` of
    ncclCommInitRank calls.  The first source that knows a place's world rank (or stage) names it; nothing is mixed.
    Raises InputError when two places claim the same world rank from the user's map.
    """
    sources: list[tuple[str, Source]] = [
        ("user map", _from_user_map(user_map.entries if user_map else ())),
        ("manifest", _from_manifest(manifest)),
        ("marker", _from_marker(reports)),
        ("NCCL payload", _from_nccl(nccl_inits, len(places))),
        ("MPI_RANKS", _from_mpi(reports)),
        ("process title", _from_title(reports)),
        ("environment", _from_environment(reports, places)),
        ("file name", _from_file_name(places)),
    ]
    labelled = [_label(place, sources) for place in places]
    labelled = _complete_world(labelled)
    if not _distinct(labelled):
        clash = {rank.source for rank in labelled}
        if user_map and "user map" in clash:
            raise InputError(f"{user_map.path}: two GPUs are given the same world_rank")
        labelled = [replace(place, source="inferred") for place in places]
    return _inferred(labelled)


def _label(place: Rank, sources: Sequence[tuple[str, Source]]) -> Rank:
    for name, source in sources:
        known = source(place)
        if known:
            return replace(
                place,
                world_rank=known.get("world"),
                pp_rank=known.get("pp"),
                tp_rank=known.get("tp"),
                ep_rank=known.get("ep"),
                source=name,
            )
    return place


def _complete_world(ranks: list[Rank]) -> list[Rank]:
    """World rank from stage and TP rank where a title gives only those (SGLang: TP contiguous, PP strided)."""
    staged = [
        rank for rank in ranks if rank.world_rank is None and (rank.pp_rank is not None or rank.tp_rank is not None)
    ]
    if len(staged) != len(ranks):
        return ranks
    tp_size = max(rank.tp_rank or 0 for rank in ranks) + 1
    return [replace(r, world_rank=(r.pp_rank or 0) * tp_size + (r.tp_rank or 0)) for r in ranks]


def _distinct(ranks: Sequence[Rank]) -> bool:
    known = [rank.world_rank for rank in ranks if rank.world_rank is not None]
    return len(set(known)) == len(known)


def _inferred(ranks: list[Rank]) -> list[Rank]:
    """Sort by rank; where any is unknown, number all by host, report and GPU, and say so."""
    if all(rank.world_rank is not None for rank in ranks):
        return sorted(ranks, key=lambda rank: rank.world_rank or 0)
    ordered = sorted(
        ranks, key=lambda r: (natural(Path(r.host)), natural(Path(r.report_name)), r.device_id, r.pid or 0)
    )
    return [replace(r, world_rank=index, source="inferred") for index, r in enumerate(ordered)]


def _from_user_map(entries: Sequence[Mapping[str, Any]]) -> Source:
    def look(place: Rank) -> Known | None:
        for entry in entries:
            if _matches(entry, place):
                return {"world": entry["world_rank"]} | {k: entry[k] for k in ("pp", "tp", "ep") if k in entry}
        return None

    return look


def _matches(entry: Mapping[str, Any], place: Rank) -> bool:
    return (
        fnmatch.fnmatch(place.report_name, str(entry.get("report", "*")))
        and fnmatch.fnmatch(place.host, str(entry.get("host", "*")))
        and entry.get("pid", place.pid) == place.pid
        and entry.get("device", place.device_id) == place.device_id
    )


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _from_manifest(manifest: Manifest | None) -> Source:
    entries = {(entry.host, entry.device): entry for entry in manifest.ranks} if manifest else {}

    def look(place: Rank) -> Known | None:
        entry = entries.get((place.host, place.device_id))
        if entry is None:
            return None
        known = {"world": entry.world_rank, "pp": entry.pp, "tp": entry.tp}
        return known | ({"ep": entry.ep} if entry.ep is not None else {})

    return look


def _from_marker(reports: Sequence[ReportFacts]) -> Source:
    return lambda place: reports[place.report].marks.get(place.pid or -1)


def _from_nccl(inits: pl.DataFrame | None, places: int) -> Source:
    """Rank in the largest communicator, when it is large enough to be the world and not a subgroup."""
    if inits is None or inits.is_empty():
        return lambda _: None
    widest = (
        inits.drop_nulls(["rank", "nranks"]).sort("nranks", descending=True).unique(["report", "pid"], keep="first")
    )
    known = {(r, p): (rank, n) for r, p, rank, n in widest.select("report", "pid", "rank", "nranks").iter_rows()}

    def look(place: Rank) -> Known | None:
        rank, size = known.get((place.report, place.pid or -1), (0, 0))
        return {"world": rank} if size >= places and size > 1 else None

    return look


def _from_mpi(reports: Sequence[ReportFacts]) -> Source:
    def look(place: Rank) -> Known | None:
        rank = reports[place.report].mpi.get(place.pid or -1)
        return None if rank is None else {"world": rank}

    return look


def _from_title(reports: Sequence[ReportFacts]) -> Source:
    return lambda place: reports[place.report].titles.get(place.pid or -1)


def _alone(places: Sequence[Rank]) -> set[int]:
    """Reports that hold a single rank: only there can a fact about the whole report name it."""
    counts: dict[int, int] = {}
    for place in places:
        counts[place.report] = counts.get(place.report, 0) + 1
    return {report for report, count in counts.items() if count == 1}


def _from_environment(reports: Sequence[ReportFacts], places: Sequence[Rank]) -> Source:
    alone = _alone(places)

    def look(place: Rank) -> Known | None:
        environment = reports[place.report].environment if place.report in alone else {}
        for name in _GLOBAL_RANK_VARIABLES:
            if environment.get(name, "").isdigit():
                return {"world": int(environment[name])}
        return None

    return look


def _from_file_name(places: Sequence[Rank]) -> Source:
    alone = _alone(places)

    def look(place: Rank) -> Known | None:
        match = _FILE_RANK.search(place.report_name) if place.report in alone else None
        return {"world": int(match.group(1))} if match else None

    return look
