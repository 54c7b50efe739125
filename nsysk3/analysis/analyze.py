"""From a run to its result: the steps on each report, and what is decided between them of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl

from nsysk3.analysis.cross import Matched, match, middle_of, with_hidden
from nsysk3.analysis.layer_attribution import layer_notes
from nsysk3.analysis.layer_names import parse_names
from nsysk3.analysis.members import Membership
from nsysk3.analysis.nccl_tests import read_nccl_tests
from nsysk3.analysis.period import with_first_layers
from nsysk3.analysis.pipeline import infer_stages, phase_bounds
from nsysk3.analysis.run_windows import run_windows
from nsysk3.analysis.steps import Named, Names, Placed, Places, Read, Source, Summed, Sums, name, place, read, sum_up
from nsysk3.analysis.tables import Found, result_of
from nsysk3.analysis.timeline import MAX_ROWS, forward_spans
from nsysk3.analysis.windows import WindowSpec, parse_window, within
from nsysk3.classify import RuleSet
from nsysk3.errors import NsysK3Error
from nsysk3.result.store import Result
from nsysk3.run.inputs import Problem
from nsysk3.scale.crew import Alone, Crew
from nsysk3.scale.work import Step
from nsysk3.trace.load import Roster, Run, assemble, find_run, problem_of
from nsysk3.trace.part import Seen, Tool

Progress = Callable[[str], None]


def analyze(
    run: Run | str | Path | Sequence[str | Path],
    *,
    window: str = "capture",
    rules: RuleSet | str | Path | None = None,
    nccl_tests: Sequence[str | Path] = (),
    layer_regex: str | None = None,
    nsys: str | Path | None = None,
    ranks: str | Path | None = None,
    crew: Crew | None = None,
    cache: bool = False,
    progress: Progress | None = None,
) -> Result:
    """Analyse one run.

    ``run``: paths or URLs, or what ``load`` gave.  ``window``: ``capture``, ``prefill``, ``steady`` or ``START:END``
    counted from the run's first kernel (``0.5s:2s``).  ``rules``: a rules file whose rules go before the shipped ones.
    ``nccl_tests``: logs of nccl-tests on the same machines, to hold the measured bandwidth against.  ``layer_regex``:
    finds layers in NVTX names, with a group named ``layer``.  ``nsys``, ``ranks``: see ``load``.  ``crew``: who does
    the work on paths (see nsysk3.scale), default: this process, which keeps events in scratch files once they would
    fill a quarter of its memory.  ``cache``: keep what is read of local files for the next analysis.  Raises InputError
    for unusable input or arguments; an input that cannot be used beside others becomes a problem of the result.
    """
    spec = parse_window(window)
    ruleset = rules if isinstance(rules, RuleSet) else RuleSet.load(Path(rules) if rules else None)
    reference = read_nccl_tests([Path(path) for path in nccl_tests])
    parse_names(pl.Series([], dtype=pl.String), layer_regex)  # one that cannot be used is no report's fault
    with Alone() if crew is None or isinstance(run, Run) else nullcontext(crew) as hands:
        asked = _Asked(spec, ruleset, reference, hands, progress or (lambda _: None))
        if isinstance(run, Run):
            given = zip(run.reports, run.parts, strict=True)
            sources = {index: Source(None, "", Tool(None), layer_regex, given=each) for index, each in enumerate(given)}
            return _analysed(asked, sources, lambda _, lost: _read_before(run, lost))
        inputs, manifest, chosen = find_run(run)
        tool, user_map = Tool(nsys), Path(ranks) if ranks else None
        traces = {index: hands.reachable(each) for index, each in enumerate(inputs.traces)}
        shown = {index: str(each.path) for index, each in enumerate(inputs.traces)}
        sources = {index: Source(each, shown[index], tool, layer_regex, cache) for index, each in traces.items()}
        unusable: dict[int, Problem] = {}

        def roster(seen: Sequence[Seen], lost: dict[int, NsysK3Error]) -> Roster:
            unusable.update(
                {index: problem_of(inputs.traces[index].path, error, inputs) for index, error in lost.items()}
            )
            problems = [*inputs.problems, *(problem for _, problem in sorted(unusable.items()))]
            return assemble(chosen, inputs.run_dir, manifest, seen, problems, user_map)

        return _analysed(asked, sources, roster)


@dataclass(frozen=True)
class _Asked:
    """What is wanted of a run, and who works and listens."""

    spec: WindowSpec
    rules: RuleSet
    reference: pl.DataFrame
    crew: Crew
    say: Progress


# Who is who among reports, by number, given those that could not be used.
_Meet = Callable[[Sequence[Seen], dict[int, NsysK3Error]], Roster]


def _read_before(run: Run, lost: dict[int, NsysK3Error]) -> Roster:
    for error in lost.values():
        raise error
    return run


class _LostLaterError(Exception):
    """Reports that were read, and could not be worked on after others had been told of them."""

    def __init__(self, lost: dict[int, NsysK3Error]) -> None:
        super().__init__(", ".join(map(str, lost.values())))
        self.lost = lost


def _analysed(asked: _Asked, sources: dict[int, Source], meet: _Meet) -> Result:
    lost: dict[int, NsysK3Error] = {}
    while True:
        asked.crew.begin()
        what = {
            number: f"reading {_called(source)} ({number + 1}/{len(sources)})" for number, source in sources.items()
        }
        left = {number: source for number, source in sources.items() if number not in lost}
        answers = asked.crew.run(read, left, what, asked.say)
        lost |= answers.lost
        numbers = sorted(answers.out)
        reads: list[Read] = [answers.out[number] for number in numbers]
        run = meet([each.seen for each in reads], lost)
        try:
            return _from_reads(asked, run, numbers, reads)
        except _LostLaterError as later:  # the run without them is another run
            lost |= later.lost


def _called(source: Source) -> str:
    return source.trace.name if source.trace else source.given[0].name if source.given else ""


def _from_reads(asked: _Asked, run: Roster, numbers: Sequence[int], reads: Sequence[Read]) -> Result:
    def each(step: Step, what: str, told: Sequence[Any]) -> list[Any]:
        said = {number: f"{what} {facts.name}" for number, facts in zip(numbers, run.facts, strict=True)}
        answers = asked.crew.run(step, dict(zip(numbers, told, strict=True)), said, asked.say)
        if answers.lost:
            raise _LostLaterError(answers.lost)
        return [answers.out[number] for number in numbers]

    own = [run.ranks_of(report) for report in range(len(run.facts))]
    stacks = pl.concat(one.stacks for one in reads)
    named: list[Named] = each(
        name,
        "naming the work of",
        [
            Names(one.seen, ranks, names, asked.rules, stacks)
            for one, ranks, names in zip(reads, own, run.own_names, strict=True)
        ],
    )
    asked.say("matching ranks")
    comm = pl.concat(one.comm.with_columns(pl.lit(i, pl.Int64).alias("report")) for i, one in enumerate(named))
    middle = middle_of(min(one.first for one in named), max(one.last for one in named))
    found = match(comm, run.ranks, len(named), middle, Membership.of(run))
    stages = infer_stages(run.ranks, found.pairs)
    staged = run.ranks.drop("pp_rank").join(stages.rename({"stage": "pp_rank"}), on="rank", how="left")
    fits = pl.concat(one.fits for one in named).sort("rank")
    fits = with_first_layers(fits, staged, bool((comm["role"] == "p2p").any()))
    markers, shifts = all(one.markers for one in named), found.clocks.shifts.tolist()
    placed: list[Placed] = each(
        place,
        "finding layers in",
        [
            Places(ranks, waits, shift, markers, fits.join(ranks, on="rank", how="semi"))
            for ranks, waits, shift in zip(
                _by_report(staged, len(named)), _cut(found.waits, named), shifts, strict=True
            )
        ],
    )
    asked.say("summing up")
    found = _with_answers(found, placed)
    forwards = pl.concat(one.forwards for one in placed).sort("rank", "forward")
    captures = pl.concat(one.captures for one in placed).sort("rank")
    marked = pl.concat(one.windows for one in named)
    windows, info = run_windows(asked.spec, captures, forwards, run.ranks, marked)
    inside = within(forwards, windows, "rank", "start_utc_ns")
    bounds = phase_bounds(within(found.pairs, windows, "dst_rank", "recv_start_utc_ns"), windows)
    whole, (spans, drawn) = inside.filter("whole").select("rank", "forward"), forward_spans(inside, windows)
    most = max(1, MAX_ROWS // run.ranks.height)
    summed: list[Summed] = each(
        sum_up,
        "summing up",
        [
            Sums(
                ranks, windows.join(ranks, on="rank", how="semi"), whole.join(ranks, on="rank", how="semi"),
                spans, most, bounds,
            )
            for ranks in _by_report(staged, len(named))
        ],
    )  # fmt: skip
    graphs = sorted(rank for one in placed for rank in one.graphs)
    notes, fits = layer_notes([one.ranges for one in reads], graphs, fits)
    calls = [one.ranges.calls for one in reads]
    decided = Found(found, stages, windows, info, captures, inside, fits, calls, (*asked.rules.notes, *notes), drawn)
    return result_of(run, decided, summed, [one.comm.height for one in named], asked.reference)


def _by_report(ranks: pl.DataFrame, reports: int) -> list[pl.DataFrame]:
    return [ranks.filter(pl.col("report") == report) for report in range(reports)]


def _cut(waits: pl.DataFrame, named: Sequence[Named]) -> list[pl.DataFrame]:
    """What was found of all communication, by report."""
    parts, low = [], 0
    for one in named:
        parts.append(waits.slice(low, one.comm.height))
        low += one.comm.height
    return parts


def _with_answers(found: Matched, placed: Sequence[Placed]) -> Matched:
    """What was matched, with the purpose of collectives and the hidden part of P2P waits."""
    comm = pl.concat(one.comm for one in placed)
    kind = comm["kind"].gather(found.collectives["event"]).cast(pl.String)
    return replace(
        found, collectives=found.collectives.with_columns(kind), pairs=with_hidden(found.pairs, comm["hidden"])
    )
