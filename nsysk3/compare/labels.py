"""What runs are called: by their layouts where these differ, else by their folders, else by their own names."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path, PurePath

from nsysk3.errors import InputError
from nsysk3.result import Result

# Where a run directory keeps its results: no run's name.
_RESULTS = "analysis"


def labels_of(
    results: Sequence[Result],
    degrees: Sequence[int | None],
    labels: Sequence[str] | None,
    folders: Sequence[str] | None,
) -> list[str]:
    """Labels, base first: ``labels`` where they are given, else names that differ.

    Those are the PP ``degrees``, else the ``folders`` (see short_names), else the run ids of the manifests.  Raises
    InputError for labels that do not fit.
    """
    if labels:
        if len(labels) != len(results):
            raise InputError(f"{len(labels)} labels for {len(results)} runs; give one a run, base first")
        if len(set(labels)) < len(labels):
            raise InputError("two runs have the same label")
        return list(labels)
    layouts = [f"PP{degree}" if degree else "run" for degree in degrees]
    for names in (layouts, folders or [], _run_ids(results)):
        if names and all(name.strip() for name in names) and len(set(names)) == len(results):
            return list(names)
    return ["base", *(f"other {i}" if len(results) > 2 else "other" for i in range(1, len(results)))]


def short_names(paths: Sequence[Path]) -> list[str]:
    """The last folders of each path, as few as tell it from the others; those that all end in are left out."""
    every = [_parts(path) for path in paths]
    while len({parts[-1] for parts in every}) == 1 and all(len(parts) > 1 for parts in every):
        every = [parts[:-1] for parts in every]
    return ["/".join(_last(parts, [other for other in every if other is not parts])) for parts in every]


def _last(parts: Sequence[str], others: Sequence[Sequence[str]]) -> Sequence[str]:
    for number in range(1, len(parts)):
        if all(parts[-number:] != other[-number:] for other in others):
            return parts[-number:]
    return parts


def _parts(path: Path) -> tuple[str, ...]:
    whole = PurePath(os.path.abspath(path))  # noqa: PTH100 - what a link is called is the name
    if path.is_file():
        whole = whole.with_suffix("")
    elif whole.name == _RESULTS and len(whole.parts) > 2:
        whole = whole.parent
    return whole.parts


def _run_ids(results: Sequence[Result]) -> list[str]:
    return [str((result.document.manifest or {}).get("run_id") or "") for result in results]
