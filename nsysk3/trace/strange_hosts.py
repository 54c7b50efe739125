"""Reports of hosts that run.json does not list: nobody knows which ranks those are."""

from __future__ import annotations

from collections.abc import Sequence

from nsysk3.run.manifest import Manifest
from nsysk3.run.words import first_of
from nsysk3.trace.identity import Rank

_SHOWN = 4


def strange_hosts(path: str, manifest: Manifest, found: Sequence[Rank]) -> list[str]:
    """A note where ranks are guesses because the manifest ``path`` lists other hosts than those of the reports."""
    listed = list(dict.fromkeys(entry.host for entry in manifest.ranks))
    strange = [rank.host for rank in found if rank.source == "inferred" and rank.host not in listed]
    if not listed or not strange:
        return []
    hosts = list(dict.fromkeys(strange))
    return [
        f"{path}: lists ranks of {first_of(listed, _SHOWN)}, none of {first_of(hosts, _SHOWN)}: which ranks those "
        "reports hold is a guess; a report's host is the folder below nodes/ that it lies in: name them alike, or give "
        "--ranks; if it is of another run put the run.json of this run there"
    ]
