"""Find the traces that the paths on a command line mean."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nsysk3.errors import InputError
from nsysk3.run.manifest import MANIFEST_NAME
from nsysk3.run.remote import AnyPath

EXPORT_SUFFIXES = (".sqlite", ".sqlite3", ".db")
REPORT_SUFFIX = ".nsys-rep"
# How nsys and its recipes call export directories; a whole one of any name has the table, as it was called before 2023
# or since.
_EXPORT_DIRS = ("_pqtdir", "_arwdir")
_META_TABLES = {"EXPORT_META_DATA", "META_DATA_EXPORT"}
# What tells a folder of results from an export: result.json comes last, the table before it.
_RESULTS = ("result.json", "rank_metrics.parquet")
# Exports that nsysk3 made itself from the report beside them.
CACHE_MARK = ".nsysk3"
# Folders of a run directory that hold results, not traces.
_NOT_TRACES = {"analysis", "bench", "gpu", "metadata", "raw", "service"}


@dataclass(frozen=True)
class Problem:
    """An input that gave no rank, and the way out, as one line.

    ``of_machine``: this machine lacks something (an nsys above all); the input may be sound.
    """

    path: str
    message: str
    of_machine: bool = False

    def __str__(self) -> str:
        return self.message if self.message.startswith(self.path) else f"{self.path}: {self.message}"


@dataclass(frozen=True)
class TraceInput:
    """One report to read: an export or an ``.nsys-rep``; ``host`` is the folder that named its node, if any."""

    path: AnyPath
    name: str
    host: str | None


@dataclass(frozen=True)
class Inputs:
    """What was found: the traces, what could not be used, and the run directory, if it is one."""

    traces: tuple[TraceInput, ...]
    problems: tuple[Problem, ...]
    run_dir: AnyPath | None


def find_inputs(paths: Sequence[AnyPath]) -> Inputs:
    """The traces under files, directories of exports, directories of bare files and run directories.

    A report and an export of it count once: the export is taken unless the report is newer.  Hidden files in a
    directory are not looked at, and a path that is given twice is one.  A path that does not exist or cannot be opened
    becomes a problem; InputError is raised when nothing at all is found.
    """
    traces: list[TraceInput] = []
    problems: list[Problem] = []
    run_dir = None
    paths = list(dict.fromkeys(paths))
    for path in paths:
        if reason := _unusable(path):
            problems.append(Problem(str(path), reason))
            continue
        if path.is_file() or is_export_dir(path):
            found, odd = _chosen([path], named=True)
            traces += [TraceInput(each, stem(each), None) for each in found]
            problems += odd
            continue
        if len(paths) == 1:
            run_dir = path if (path / MANIFEST_NAME).is_file() else run_of(path)
        found_here, odd = _in_directory(path)
        if not found_here and not odd and (path / _RESULTS[1]).is_file() and not (path / _RESULTS[0]).is_file():
            odd = [Problem(str(path), "tables of an analysis without its result.json; analyze the traces again")]
        traces += found_here
        problems += odd
    if not traces and not problems:
        shown = ", ".join(str(path) for path in paths)
        raise InputError(f"{shown}: no .nsys-rep, .sqlite, _pqtdir or _arwdir found here or one folder down")
    return Inputs(_unique(traces), tuple(problems), run_dir)


def run_of(nodes: AnyPath) -> AnyPath | None:
    """The run directory that a folder is the nodes/ of, None where there is none."""
    nodes = nodes if nodes.name else nodes.resolve()
    return nodes.parent if nodes.name == "nodes" and (nodes.parent / MANIFEST_NAME).is_file() else None


def is_export_dir(path: AnyPath) -> bool:
    """True for what ``nsys export -t parquetdir|arrowdir`` writes; runs and results hold parquet files too."""
    try:
        if not path.is_dir() or any((path / ours).is_file() for ours in (MANIFEST_NAME, *_RESULTS)):
            return False
        tables = [child.stem for child in path.iterdir() if child.suffix in (".parquet", ".arrow")]
        return bool(tables) and (path.name.endswith(_EXPORT_DIRS) or not _META_TABLES.isdisjoint(tables))
    except OSError:  # what cannot be listed is reported where it is searched
        return False


def _unusable(path: AnyPath) -> str | None:
    """Why a path on the command line cannot be looked into, None when it can."""
    try:
        if not path.exists():
            return "no such file or directory"
        if not path.is_dir() and not path.is_file():
            return "neither a file nor a directory; give a file that can be read more than once"
        if path.is_dir():
            (path / MANIFEST_NAME).exists()  # may it be entered?
            next(path.iterdir(), None)  # and listed?
    except OSError as error:  # or a folder above may not be, or the name is too long to be one
        return f"cannot be opened ({error.strerror})"
    return None


def stem(path: AnyPath) -> str:
    """Name of a trace without what tells its kind: the same for a report and every export of it."""
    name = path.name
    for suffix in (REPORT_SUFFIX, ".qdstrm", *EXPORT_SUFFIXES, *_EXPORT_DIRS):
        if name.lower().endswith(suffix):
            name = name[: -len(suffix)]
            break
    return name.removesuffix(CACHE_MARK) or path.name


def _in_directory(path: AnyPath) -> tuple[list[TraceInput], list[Problem]]:
    nodes = path / "nodes"
    folders = [path, *_subfolders(path), *_subfolders(nodes)]
    traces: list[TraceInput] = []
    problems: list[Problem] = []
    for folder in folders:
        try:
            children = sorted((child for child in folder.iterdir() if not child.name.startswith(".")), key=natural)
            found, odd = _chosen(children)
        except OSError as error:
            problems.append(Problem(str(folder), f"cannot be listed ({error.strerror})"))
            continue
        host = None if folder == path else folder.name
        traces += [TraceInput(each, f"{host}/{stem(each)}" if host else stem(each), host) for each in found]
        problems += odd
    return traces, problems


def _subfolders(path: AnyPath) -> list[AnyPath]:
    try:
        folders = [child for child in path.iterdir() if child.is_dir() and not child.name.startswith(".")]
    except OSError:
        return []
    return sorted((f for f in folders if f.name not in _NOT_TRACES and not is_export_dir(f)), key=natural)


def _chosen(children: Iterable[AnyPath], *, named: bool = False) -> tuple[list[AnyPath], list[Problem]]:
    """One path a trace, out of the reports and exports of one folder."""
    by_stem: dict[str, list[AnyPath]] = {}
    problems: list[Problem] = []
    for child in children:
        if child.is_dir():
            if is_export_dir(child):
                by_stem.setdefault(stem(child), []).append(child)
        elif child.name.lower().endswith((REPORT_SUFFIX, ".qdstrm", *EXPORT_SUFFIXES)):
            if child.is_file():
                by_stem.setdefault(stem(child), []).append(child)
            else:
                problems.append(Problem(str(child), "neither a file nor a link to one"))
        elif named:  # let the reader say what it is
            by_stem.setdefault(child.name, []).append(child)
    found: list[AnyPath] = []
    for group in by_stem.values():
        best = _best(group)
        if best.name.lower().endswith(".qdstrm"):
            problems.append(
                Problem(
                    str(best),
                    "raw capture without a report (the profiled process was killed?): import it with the "
                    f"QdstrmImporter of the Nsight Systems that captured it, `QdstrmImporter -i {best.name}`",
                )
            )
        else:
            found.append(best)
    return found, problems


def _best(group: list[AnyPath]) -> AnyPath:
    reports = [path for path in group if path.name.lower().endswith(REPORT_SUFFIX)]
    exports = [path for path in group if path.is_dir() or path.suffix.lower() in EXPORT_SUFFIXES]
    exports = [path for path in exports if not (reports and (CACHE_MARK in path.name or _is_partial(path)))]
    current = [path for path in exports if not reports or path.stat().st_mtime >= reports[0].stat().st_mtime]
    return next(iter([*current, *reports, *exports, *group]))


def _is_partial(path: AnyPath) -> bool:
    """True for the export directory that one of NVIDIA's recipes leaves beside a report: the few tables it needed."""
    return path.is_dir() and _META_TABLES.isdisjoint(child.stem for child in path.iterdir())


def natural(path: AnyPath) -> list[tuple[int, int | str]]:
    """Sort key that puts node2 before node10."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", path.name) if part]


def _unique(traces: list[TraceInput]) -> tuple[TraceInput, ...]:
    """Each file once, each name once."""
    seen: set[AnyPath] = set()
    kept: list[TraceInput] = []
    for trace in traces:
        real = trace.path.resolve()
        if real not in seen:
            seen.add(real)
            kept.append(trace)
    names = [trace.name for trace in kept]
    if len(set(names)) < len(names):
        named = []
        for trace in kept:
            clash = names.count(trace.name) > 1
            named.append(
                TraceInput(trace.path, f"{trace.path.parent.name}/{trace.name}" if clash else trace.name, trace.host)
            )
        kept = named
        names = [trace.name for trace in kept]
    final = [
        TraceInput(t.path, t.name if names.count(t.name) == 1 else f"{t.name} ({index + 1})", t.host)
        for index, t in enumerate(kept)
    ]
    return tuple(final)
