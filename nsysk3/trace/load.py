"""Load the traces of one run: reports, ranks and GPU work, from whatever the paths hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from pathlib import Path

import polars as pl

from nsysk3.errors import InputError, MissingToolError, NsysK3Error
from nsysk3.run.inputs import REPORT_SUFFIX, Inputs, Problem, find_inputs, is_export_dir, run_of
from nsysk3.run.manifest import MANIFEST_NAME, Manifest, RankEntry, read_manifest
from nsysk3.run.remote import AnyPath, to_path
from nsysk3.trace.absent import absent_ranks
from nsysk3.trace.another_run import without_foreign_settings
from nsysk3.trace.contradictions import map_notes, without_contradicted
from nsysk3.trace.facts import ReportFacts
from nsysk3.trace.identity import Rank, UserMap, identify
from nsysk3.trace.moments import recorded_apart
from nsysk3.trace.nsys import left_behind
from nsysk3.trace.part import Part, Seen, Tool, open_trace, read_part
from nsysk3.trace.report import Report
from nsysk3.trace.strange_hosts import strange_hosts

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Roster:
    """Who is who in a run: its reports and ranks, without their rows.

    ``facts``: one a report.  ``ranks``: one row a rank in rank order: ``rank`` (row number), ``report``,
    ``report_name``, ``host``, ``pid``, ``device_id``, ``gpu_uuid``, ``gpu_name``, ``world_rank``, ``pp_rank``,
    ``tp_rank``, ``ep_rank``, ``rank_source``, ``dropped_rows``.  ``names``: ``name_id`` to symbol; ``own_names``: by
    report, the name_id of each of its own.  ``sizes``: ``comm``, ``nranks`` of the communicators whose size a payload
    tells.  ``listed``: every rank of the run as the manifest or the user's map has it, seen or not, empty where nobody
    lists them; ``unplaced``: how many are missing of which nobody can tell the place.  ``problems``: inputs that gave
    no rank, the list among them where it has ranks that no report holds.
    ``notes``: what a reader of the numbers should know about the inputs.
    """

    paths: tuple[AnyPath, ...]
    run_dir: AnyPath | None
    manifest: Manifest | None
    facts: tuple[ReportFacts, ...]
    ranks: pl.DataFrame
    names: pl.DataFrame
    own_names: tuple[pl.Series, ...]
    sizes: pl.DataFrame
    listed: tuple[RankEntry, ...]
    unplaced: int
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]

    @property
    def directory(self) -> Path | None:
        """The directory that the whole run was read from, None when files or exports were named one by one."""
        return directory_of(self.paths)

    def ranks_of(self, report: int) -> pl.DataFrame:
        """The ranks of one report."""
        return self.ranks.filter(pl.col("report") == report)


@dataclass(frozen=True)
class Run(Roster):
    """A run with its rows: everything the analyses need.

    ``reports``: the open exports.  ``events``: GPU work sorted by (rank, start, end, stream): see read_gpu_events, with
    ``rank`` and ``report`` instead of pid and device, and the launch (``tid``, ``api_start``, ``api_end``).
    ``nccl_calls``: see read_nccl_calls, with ``report``.
    """

    reports: tuple[Report, ...]
    parts: tuple[Part, ...]

    @cached_property
    def events(self) -> pl.DataFrame:
        """All reports' events with run-wide rank and name numbers."""
        each = [part.slices(self.ranks_of(index), self.own_names[index]) for index, part in enumerate(self.parts)]
        slices = sorted((pair for slices in each for pair in slices), key=itemgetter(0))
        return pl.concat((part for _, part in slices), rechunk=True)

    @cached_property
    def nccl_calls(self) -> pl.DataFrame:
        """All reports' NCCL calls."""
        numbered = enumerate(self.parts)
        return pl.concat(part.calls.with_columns(pl.lit(index, pl.Int64).alias("report")) for index, part in numbered)


def load(
    paths: str | Path | Sequence[str | Path],
    *,
    nsys: str | Path | None = None,
    ranks: str | Path | None = None,
    progress: Progress | None = None,
) -> Run:
    """Load one run.

    ``paths``: a run directory, a directory of reports or exports, or files.  ``.nsys-rep`` files are exported by the
    user's ``nsys`` (``nsys``, else $NSYSK3_NSYS, else PATH).  ``ranks``: a TOML map that overrides identity.  An input
    that cannot be used becomes a problem and the others go on; InputError is raised when none is left.
    """
    inputs, manifest, chosen = find_run(paths)
    problems = list(inputs.problems)
    reports: list[Report] = []
    parts: list[Part] = []
    tool = Tool(nsys)
    for number, each in enumerate(inputs.traces):
        if progress:
            progress(f"reading {each.name} ({number + 1}/{len(inputs.traces)})")
        try:
            if not isinstance(each.path, Path):
                raise InputError(
                    f"{each.path}: is a URL, which nsysk3.analyze(URL) and `nsysk3 analyze` read; for anything else "
                    "copy it here first"
                )
            report = open_trace(each.path, each.name, each.host, tool, progress=progress)
            parts.append(read_part(report))
            reports.append(report)
        except NsysK3Error as error:
            problems.append(problem_of(each.path, error, inputs))
    seen = [part.seen for part in parts]
    roster = assemble(chosen, inputs.run_dir, manifest, seen, problems, Path(ranks) if ranks else None)
    return Run(**vars(roster), reports=tuple(reports), parts=tuple(parts))


def directory_of(paths: Sequence[str | AnyPath]) -> Path | None:
    """The one local directory of reports that ``paths`` mean, None where they are files, exports, several or URLs."""
    only = to_path(paths[0]) if len(set(paths)) == 1 else None
    return only if isinstance(only, Path) and only.is_dir() and not is_export_dir(only) else None


def find_run(paths: str | Path | Sequence[str | Path]) -> tuple[Inputs, Manifest | None, tuple[AnyPath, ...]]:
    """The inputs under paths or URLs, the manifest of a run directory, and the paths as they were given."""
    chosen = tuple(dict.fromkeys(to_path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)))
    inputs = _without_left_behind(find_inputs(chosen))
    return inputs, read_manifest(inputs.run_dir) if inputs.run_dir else None, chosen


def _without_left_behind(inputs: Inputs) -> Inputs:
    """The inputs but for exports that lie beside their report, which was renamed."""
    reports = [each.path for each in inputs.traces if each.path.name.lower().endswith(REPORT_SUFFIX)]
    kept = [
        each
        for each in inputs.traces
        if not isinstance(each.path, Path)
        or not left_behind(each.path, (path for path in reports if path.parent == each.path.parent))
    ]
    return replace(inputs, traces=tuple(kept))


def problem_of(path: AnyPath, error: NsysK3Error, inputs: Inputs) -> Problem:
    """What became of an input; raises ``error`` itself where it is the only one."""
    if len(inputs.traces) == 1 and not inputs.problems:
        raise error
    return Problem(str(path), str(error), isinstance(error, MissingToolError))


def assemble(
    paths: tuple[AnyPath, ...],
    run_dir: AnyPath | None,
    manifest: Manifest | None,
    seen: Sequence[Seen],
    problems: Sequence[Problem],
    user_map: Path | None,
) -> Roster:
    """Say who is who among the ranks of several reports.

    Raises InputError when there is no report, MissingToolError when this machine alone is why.
    """
    if not seen:
        raise _none_left(problems)
    inits = pl.concat(
        each.inits.with_columns(pl.lit(index, pl.Int64).alias("report")) for index, each in enumerate(seen)
    )
    places = [replace(place, report=index) for index, each in enumerate(seen) for place in each.places]
    facts = tuple(each.facts for each in seen)
    mapped = UserMap.read(user_map) if user_map else None
    wrong: tuple[Problem, ...] = ()
    if run_dir is not None and manifest:
        manifest, wrong = without_contradicted(str(run_dir / MANIFEST_NAME), manifest, seen, places)
        if not wrong:  # what is said of its layout says as much
            manifest, wrong = without_foreign_settings(str(run_dir / MANIFEST_NAME), manifest, seen)
    if mapped and (useless := mapped.useless(places)):
        wrong, mapped = (*wrong, Problem(str(mapped.path), useless)), None
    labelled = identify(facts, places, manifest=manifest, user_map=mapped, nccl_inits=inits)
    every_name = pl.concat(each.names.select("short_name", "name") for each in seen).unique(maintain_order=True)
    names = every_name.with_row_index("name_id")
    own = [each.names.join(names, on=["short_name", "name"], how="left").sort("name_id") for each in seen]
    missing = absent_ranks(run_dir, manifest, mapped, labelled, problems)
    notes = [*_unread(paths, run_dir), *(map_notes(mapped, seen, labelled) if mapped else ())]
    if run_dir is not None and manifest and not mapped and not missing.unplaced:  # which says so of the hosts
        notes += strange_hosts(str(run_dir / MANIFEST_NAME), manifest, labelled)
    if mapped and not any(problem.path == str(mapped.path) for problem in missing.problems):
        notes += mapped.idle(places)
    notes += [*_shared_gpus(labelled, facts), *recorded_apart(facts)]
    return Roster(
        paths, run_dir, manifest, facts, _rank_frame(labelled, seen), names,
        tuple(each["name_id_right"] for each in own), pl.concat(each.sizes for each in seen).unique(),
        missing.listed, missing.unplaced, (*problems, *wrong, *missing.problems),
        (*notes, *(note for each in seen for note in each.notes)),
    )  # fmt: skip


def _none_left(problems: Sequence[Problem]) -> NsysK3Error:
    """Why no input is left, each reason once."""
    alike: dict[str, list[Problem]] = {}
    for problem in problems:
        alike.setdefault(problem.message, []).append(problem)
    each = [
        str(same[0]) if len(same) == 1 else f"{same[0].path} and {len(same) - 1} more: {message}"
        for message, same in alike.items()
    ]
    kind = MissingToolError if all(problem.of_machine for problem in problems) else InputError
    return kind("; ".join(each))


def _unread(paths: Sequence[AnyPath], run_dir: AnyPath | None) -> list[str]:
    """The manifest of a run of which reports, or folders of hosts, were given one by one."""
    above = [folder for path in paths for folder in (path.parent, path.parent.parent)] if run_dir is None else []
    runs = dict.fromkeys(run for folder in above if (run := run_of(folder)))
    return [f"{run / MANIFEST_NAME} was not read: give {run} itself to have its ranks asked for" for run in runs]


def _shared_gpus(ranks: list[Rank], facts: Sequence[ReportFacts]) -> list[str]:
    """GPUs that several reports show: a run uses a GPU once, so these are several runs, or copies of one report."""
    seen: dict[str, set[str]] = {}
    for rank in ranks:
        if rank.gpu_uuid:
            seen.setdefault(rank.gpu_uuid, set()).add(rank.report_name)
    twice = sorted({name for names in seen.values() if len(names) > 1 for name in names})
    if not twice:
        return []
    shown = f"the same GPUs are in several reports ({', '.join(twice)})"
    moments = {report.recorded_utc_ns for report in facts if report.name in twice}
    if len(moments) == 1 and None not in moments:
        return [f"{shown} of the same moments: they are one capture; analyse one of them"]
    return [f"{shown}: if these are different runs, analyse each alone"]


def _rank_frame(labelled: list[Rank], seen: Sequence[Seen]) -> pl.DataFrame:
    integer = ("report", "pid", "device_id", "world_rank", "pp_rank", "tp_rank", "ep_rank")
    text = ("report_name", "host", "gpu_uuid", "gpu_name")
    columns = {name: [getattr(rank, name) for rank in labelled] for name in (*integer, *text)}
    schema = {**dict.fromkeys(integer, pl.Int64), **dict.fromkeys(text, pl.String)}
    return pl.DataFrame(columns, schema=schema).with_columns(
        pl.Series("rank_source", [rank.source for rank in labelled], pl.String),
        pl.Series("dropped_rows", [seen[rank.report].dropped for rank in labelled], pl.Int64),
    ).with_row_index("rank").with_columns(pl.col("rank").cast(pl.Int32))  # fmt: skip
