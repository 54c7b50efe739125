"""Does run.json, or the user's map, say of the layout what the reports themselves say?

Only what is certain counts (docs/metrics.md, section 1): a window that happens to lack Send/Recv says nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import polars as pl

from nsysk3.run.inputs import Problem
from nsysk3.run.manifest import Manifest, RankEntry, Topology
from nsysk3.run.words import counted, first_of, ranks_in_words
from nsysk3.trace.facts import Known
from nsysk3.trace.identity import Rank, UserMap
from nsysk3.trace.part import Seen

# A barrier now and then is no tensor parallelism, which has two AllReduce a layer.
_MANY_COLLECTIVES = 32
# Each way: a gather goes one way, a pipeline hands activations on and gets results back.
_MANY_MESSAGES = 4
_SHOWN = 4


@dataclass(frozen=True)
class _Link:
    """What the ranks of one communicator did on it, by number of their place."""

    collectives: Mapping[int, int]
    messages: frozenset[int]


def without_contradicted(
    path: str, manifest: Manifest, seen: Sequence[Seen], places: Sequence[Rank]
) -> tuple[Manifest, tuple[Problem, ...]]:
    """The manifest ``path`` without what the reports contradict of its layout, and what to say of that.

    ``places``: of all reports, in order.
    """
    manifest, wrong = _made_by_gpus(path, manifest, seen)
    topology = manifest.topology
    if topology is None:
        return manifest, wrong
    # A list that leaves out the places in the layout says nothing of them.
    listed = manifest.ranks if len({(entry.pp, entry.tp) for entry in manifest.ranks}) == len(manifest.ranks) else []
    marks = [seen[place.report].facts.marks.get(place.pid or -1, {}) for place in places]
    layout = [*_told_sizes(topology, marks), *_titles_and_sizes(topology, manifest, seen, places)]
    layout = layout or list(_communicators(topology, listed, seen, places))
    order = [] if layout else list(_other_ranks(listed, marks, places))
    if not layout and not order:
        return manifest, (*wrong, *_more_gpus(path, topology, manifest, places))
    what = f"says PP{topology.pp} / TP{topology.tp}" if layout else "numbers the ranks otherwise than the reports do"
    used = "its layout was not used" if layout else "its list of ranks was not used"
    message = (
        f"{path}: {what}, but {'; '.join(layout or order)}: {used}; if it is of another run its settings are not "
        "those of these reports either: put the run.json of this run there"
    )
    kept: dict[str, object] = {"ranks": [], "topology": None if layout else topology}
    return manifest.model_copy(update=kept), (*wrong, Problem(path, message))


def _made_by_gpus(path: str, manifest: Manifest, seen: Sequence[Seen]) -> tuple[Manifest, tuple[Problem, ...]]:
    real = [each.facts.name for each in seen if each.facts.simulated is False]
    if not manifest.simulated or not real:
        return manifest, ()
    message = f"{path}: says that the run was simulated, but GPUs made {first_of(real, _SHOWN)}"
    return manifest.model_copy(update={"simulated": None}), (Problem(path, message),)


def map_notes(user_map: UserMap, seen: Sequence[Seen], labelled: Sequence[Rank]) -> list[str]:
    """Where the user's map, which wins, says something else than the marker of the process that it names."""
    other = []
    for rank in labelled:
        mark = seen[rank.report].facts.marks.get(rank.pid or -1, {})
        ours: Known = {"world": rank.world_rank or 0} | ({} if rank.pp_rank is None else {"pp": rank.pp_rank})
        ours |= {} if rank.tp_rank is None else {"tp": rank.tp_rank}
        if rank.source == "user map" and any(mark.get(key, value) != value for key, value in ours.items()):
            other.append(f"device {rank.device_id} of {rank.host} is {_rank(ours)}, by its marker {_rank(mark)}")
    if not other:
        return []
    return [f"{user_map.path}: says otherwise than the reports, and was followed: {first_of(other, _SHOWN)}"]


def _told_sizes(topology: Topology, marks: Sequence[Known]) -> Iterator[str]:
    """Markers that name another layout, or a place that this one does not have."""
    limits = {"pp": topology.pp, "tp": topology.tp, "world": topology.pp * topology.tp}
    other = Counter(
        " / ".join(f"{key.upper()}{mark[f'{key}_size']}" for key in ("pp", "tp") if f"{key}_size" in mark)
        or _rank(mark)
        for mark in marks
        if any(mark.get(f"{key}_size", limit) != limit or mark.get(key, 0) >= limit for key, limit in limits.items())
    )
    if other:
        yield f"the rank markers in the reports say {first_of(list(other), _SHOWN)}"


def _more_gpus(path: str, topology: Topology, manifest: Manifest, places: Sequence[Rank]) -> tuple[Problem, ...]:
    """More GPUs than ranks: a report too many, say, which makes the layout no wrong one."""
    ranks = max(topology.pp * topology.tp, len(manifest.ranks))
    gpus = {place.gpu_uuid or (place.host, place.device_id) for place in places}
    # Replicas of a server (data parallelism) are no part of a topology.
    if len(gpus) <= ranks or any(word in str(manifest.server) for word in ("--dp", "dp_size")):
        return ()
    message = (
        f"{path}: says PP{topology.pp} / TP{topology.tp}, but {len(gpus)} GPUs did work in the reports: some are of "
        "another run, or of none of its ranks; analyze the reports of this run alone"
    )
    return (Problem(path, message),)


def _titles_and_sizes(
    topology: Topology, manifest: Manifest, seen: Sequence[Seen], places: Sequence[Rank]
) -> Iterator[str]:
    """Processes whose title is of no such rank, and communicators that have more members."""
    titles = [seen[place.report].facts.titles.get(place.pid or -1, {}) for place in places]
    strange = [known for known in titles if known.get("pp", 0) >= topology.pp or known.get("tp", 0) >= topology.tp]
    if strange:
        yield f"the title of a process says {_rank(strange[0])}"
    ranks = max(topology.pp * topology.tp, len(manifest.ranks))
    largest = max((size for each in seen for size in each.sizes["nranks"]), default=0)
    if largest > ranks:
        yield f"a communicator in the reports has {counted(largest, 'rank')}"


def _other_ranks(listed: Sequence[RankEntry], marks: Sequence[Known], places: Sequence[Rank]) -> Iterator[str]:
    """Ranks whose marker says another place in the layout, or another number, than the list."""
    entries = {entry.world_rank: entry for entry in listed}
    at = _listed_at(listed, places)
    for index, (place, mark) in enumerate(zip(places, marks, strict=True)):
        entry = entries.get(mark.get("world", -1))
        where = f"device {place.device_id} of {place.host}"
        if entry and (mark.get("pp", entry.pp), mark.get("tp", entry.tp)) != (entry.pp, entry.tp):
            said = _rank({"world": entry.world_rank, "pp": entry.pp, "tp": entry.tp})
            yield f"by the marker of {where} it is {_rank(mark)}, not {said}"
            return
        if at and mark.get("world", at[index].world_rank) != at[index].world_rank:
            yield f"by its marker {where} is rank {mark['world']}, not rank {at[index].world_rank}"
            return


def _listed_at(listed: Sequence[RankEntry], places: Sequence[Rank]) -> list[RankEntry]:
    """The list's entry of each place; none where it does not name each, and no two alike, by host and device."""
    by_place = {(entry.host, entry.device): entry for entry in listed}
    found = [entry for place in places if (entry := by_place.get((place.host, place.device_id)))]
    return found if len({entry.world_rank for entry in found}) == len(places) == len(found) else []


def _communicators(
    topology: Topology, listed: Sequence[RankEntry], seen: Sequence[Seen], places: Sequence[Rank]
) -> Iterator[str]:
    """Stages that run collectives together without a hand-over, and ranks of one stage that hand over without any."""
    stages = _stages(topology, listed, places)
    # Graphs hide calls: who has them may send, or reduce, more than the payloads say.
    hidden = {index for index, place in enumerate(places) if _opaque(seen[place.report])}
    if not stages or hidden:
        return
    links, both_ways = _links(seen, places)
    for link in links:
        many = {index for index, count in link.collectives.items() if count >= _MANY_COLLECTIVES}
        sending = any(len(many & other.messages) > 1 for other in links)
        if len({stages[index] for index in many}) > 1 and not sending:
            few = min(link.collectives[index] for index in many)
            yield f"{_where(places, many)} share {few} collectives, and send each other nothing, as one stage does"
            return
        members = link.messages
        sharing = any(len(members & other.collectives.keys()) > 1 for other in links)
        alike = len({stages[index] for index in members}) == 1
        if len(members) > 1 and alike and not sharing and members <= both_ways:
            yield f"{_where(places, members)} hand over by Send and Recv, and share no collective, as stages do"
            return


def _stages(topology: Topology, listed: Sequence[RankEntry], places: Sequence[Rank]) -> list[int]:
    """The stage that each place would have; none where that does not follow."""
    if topology.pp == 1:
        return [0] * len(places)
    if topology.tp == 1:
        return list(range(len(places)))
    return [entry.pp for entry in _listed_at(listed, places)]


def _opaque(seen: Seen) -> bool:
    names = seen.names["short_name"]
    silent = not seen.shared["messages"].sum() and names.str.contains("SendRecv").any()
    return bool(silent or (names == "CUDA graph replay").any())


def _links(seen: Sequence[Seen], places: Sequence[Rank]) -> tuple[list[_Link], set[int]]:
    """What was done on each communicator, and who sent and received alone (see shared_work) often enough."""
    alone = Counter((place.report, place.pid) for place in places)
    number = {
        (place.report, place.pid): index for index, place in enumerate(places) if alone[place.report, place.pid] == 1
    }
    every = pl.concat(
        each.shared.with_columns(pl.lit(report, pl.Int64).alias("report")) for report, each in enumerate(seen)
    )
    collectives: dict[int, dict[int, int]] = {}
    messages: dict[int, set[int]] = {}
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    columns = ("report", "pid", "comm", "collectives", "messages", "sends", "receives")
    for report, pid, comm, together, any_way, sends, receives in every.select(columns).iter_rows():
        index = number.get((report, pid))
        if index is None:
            continue
        sent[index] += sends
        received[index] += receives
        if together:
            collectives.setdefault(comm, {})[index] = together
        if any_way:
            messages.setdefault(comm, set()).add(index)
    links = [
        _Link(collectives.get(comm, {}), frozenset(messages.get(comm, ())))
        for comm in dict.fromkeys([*collectives, *messages])
    ]
    both = {index for index in sent if min(sent[index], received[index]) >= _MANY_MESSAGES}
    return links, both


def _where(places: Sequence[Rank], members: set[int] | frozenset[int]) -> str:
    devices: dict[str, list[int]] = {}
    for index in sorted(members):
        devices.setdefault(places[index].host, []).append(places[index].device_id)
    return first_of([f"{ranks_in_words(each, 'device')} of {host}" for host, each in devices.items()], _SHOWN)


def _rank(known: Mapping[str, int]) -> str:
    places = [f"{word} {known[key]}" for key, word in (("pp", "stage"), ("tp", "TP rank")) if key in known]
    if "world" not in known:
        return ", ".join(places)
    return f"rank {known['world']} ({', '.join(places)})" if places else f"rank {known['world']}"
