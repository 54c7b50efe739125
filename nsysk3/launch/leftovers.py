"""What a run left on its hosts, after a power loss for example, and its end.

A keeper of its own name looks for the run's mark: on processes, containers and folders.  A run that is still going has
the same mark, so whoever ends leftovers must know that it is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from secrets import token_hex

from nsysk3.errors import MissingToolError, RunFailedError
from nsysk3.launch.hosts import open_host
from nsysk3.run.config import Settings


@dataclass(frozen=True)
class Leftover:
    """Something of a run that is on a host.

    ``kind``: process, container or scratch; unreachable where the host or its containers could not be looked at.
    """

    host: str
    kind: str
    what: str


def find_leftovers(settings: Settings, run_id: str, names: Sequence[str]) -> list[Leftover]:
    """What there is of a run on these hosts."""
    return _on_all(settings, run_id, names, ending=False)


def end_leftovers(settings: Settings, run_id: str, names: Sequence[str]) -> list[Leftover]:
    """End what there is of a run on these hosts, and give what is left: nothing, where all went well."""
    return _on_all(settings, run_id, names, ending=True)


def _on_all(settings: Settings, run_id: str, names: Sequence[str], *, ending: bool) -> list[Leftover]:
    cluster = settings.cluster.model_copy(update={"hosts": list(names)})
    cli = [settings.container.cli] if settings.container.cli else []

    def look(name: str) -> list[Leftover]:
        try:
            with open_host(cluster, name, f"cleanup-{token_hex(4)}", cli) as host:
                found = host.leftovers(run_id, cluster.scratch, ending=ending)
        except (MissingToolError, RunFailedError) as error:
            return [Leftover(name, "unreachable", str(error).removeprefix(f"{name}: "))]
        return [Leftover(name, kind, what) for kind, what in found]

    with ThreadPoolExecutor(max_workers=max(len(names), 1)) as pool:
        return [leftover for found in pool.map(look, names) for leftover in found]
