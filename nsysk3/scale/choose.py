"""Who is to work on a run, by what a user says."""

from __future__ import annotations

from nsysk3.scale.crew import Alone, Crew


def crew_of(workers: int = 1, scheduler: str | None = None) -> Crew:
    """A crew for ``analyze``, to be closed (it is a context manager).

    ``scheduler``: the address of a Dask scheduler, ``tcp://host:port``; else ``workers`` processes of this machine, and
    with one this process alone.  Raises MissingToolError where the scheduler does not answer, has no workers, or one of
    them has another nsysk3.
    """
    if scheduler:
        from nsysk3.scale.cluster import Cluster

        return Cluster(scheduler)
    if workers > 1:
        from nsysk3.scale.pool import Pool

        return Pool(workers)
    return Alone()
