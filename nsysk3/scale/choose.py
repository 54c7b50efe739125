"""Who is to work on a run, by what a user says."""

from __future__ import annotations

from nsysk3.errors import InputError
from nsysk3.run.config import PATIENCE_S
from nsysk3.scale.crew import Alone, Crew

_MOST_WORKERS = 1024


def crew_of(workers: int = 1, scheduler: str | None = None, *, patience_s: float = PATIENCE_S) -> Crew:
    """A crew for ``analyze``, to be closed (it is a context manager).

    ``scheduler``: the address of a Dask scheduler, ``tcp://host:port``; else ``workers`` processes of this machine, and
    with one this process alone.  ``patience_s``: how long a run goes on without a Dask worker until it is given up, s.
    Raises InputError for what is no address or no number of workers, MissingToolError where the scheduler does not
    answer, has no workers, or one of them has another nsysk3.
    """
    if scheduler is not None:
        from nsysk3.scale.cluster import Cluster

        return Cluster(scheduler, patience_s)
    if isinstance(workers, bool) or not isinstance(workers, int) or not 0 < workers <= _MOST_WORKERS:
        raise InputError(f"workers must be a whole number from 1 to {_MOST_WORKERS:,}, not {workers!r}")
    if workers > 1:
        from nsysk3.scale.pool import Pool

        return Pool(workers)
    return Alone()
