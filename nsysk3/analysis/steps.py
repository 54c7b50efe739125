"""What is done on one report at a time, between the moments at which all reports must be known.

Four steps, each from the report's frames and what it is told of the run to its next frames and an answer.  They are the
same wherever they run (nsysk3/scale), and only the answers travel: communication, and finished tables.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from nsysk3.analysis.allreduce_kinds import collective_kinds, moe_shares
from nsysk3.analysis.attribution import launched_in, told_apart, with_numbers
from nsysk3.analysis.budget import Budget
from nsysk3.analysis.comm_events import comm_rows
from nsysk3.analysis.cross import hidden_waits, with_waits
from nsysk3.analysis.event_cache import identity, keep, recall
from nsysk3.analysis.forward_ranges import forward_ranges
from nsysk3.analysis.forwards import forward_table
from nsysk3.analysis.graph_layers import CAPTURED_SCHEMA, attribute_graphs, captured_nodes
from nsysk3.analysis.layer_attribution import ReportRanges, report_ranges, unplaced_graphs
from nsysk3.analysis.layers import attributed_shares, layer_categories, layer_table, unattributed_reasons
from nsysk3.analysis.marked_ranges import main_stack, stack_counts
from nsysk3.analysis.metrics import budgets, category_table, count_sums, in_window, kernel_statistics, role_table
from nsysk3.analysis.nccl_links import LINK_SCHEMA
from nsysk3.analysis.period import fit_ranks, with_period
from nsysk3.analysis.pipeline import StageTime, stage_gaps, stage_times
from nsysk3.analysis.roles import assign_roles
from nsysk3.analysis.stability import work_counts
from nsysk3.analysis.timeline import draw
from nsysk3.analysis.windows import capture_windows
from nsysk3.classify import RuleSet
from nsysk3.errors import NsysK3Error
from nsysk3.run.inputs import TraceInput
from nsysk3.run.remote import nearby
from nsysk3.scale.shelf import State
from nsysk3.scale.work import Say
from nsysk3.trace.part import Part, Seen, Tool, open_trace, read_part
from nsysk3.trace.report import Report


@dataclass(frozen=True)
class Source:
    """Where a report's rows come from: ``given`` (read before, in this process), else ``trace``, called ``shown``.

    ``cache``: keep what is read for the next analysis (see event_cache); URLs are always read.
    """

    trace: TraceInput | None
    shown: str
    tool: Tool
    layer_regex: str | None
    cache: bool = False
    given: tuple[Report, Part] | None = None


@dataclass(frozen=True)
class Read:
    """Answer of ``read``: ``stacks`` are stack_counts, ``ranges`` without its frame of ranges."""

    seen: Seen
    stacks: pl.DataFrame
    ranges: ReportRanges


def read(_: State, source: Source, say: Say) -> tuple[State, Read]:
    """Read a report: its events, NCCL calls and ranges."""
    if source.given:
        return _compact(*source.given, source)
    assert source.trace is not None
    trace = source.trace
    with nearby(trace.path) as path:
        try:
            report = open_trace(path, trace.name, trace.host, source.tool, progress=say)
            if source.cache and path == trace.path:
                return _cached(report, source)
            return _compact(report, read_part(report, source.shown), source)
        except NsysK3Error as error:
            if str(path) == source.shown:
                raise
            # By the name that it was asked for, not that of a copy, nor the absolute one that another machine is told.
            raise type(error)(str(error).replace(str(path), source.shown)) from error


def _cached(report: Report, source: Source) -> tuple[State, Read]:
    """What an earlier analysis read from the very same export, else what is read now, which is kept."""
    trace = source.trace
    assert trace is not None

    def now() -> str | None:
        return identity(report.source.path, trace.name, trace.host, source.shown, str(trace.path), source.layer_regex)

    before = now()
    if before and (known := recall(before)):
        return known
    found = _compact(report, read_part(report, source.shown), source)
    if before and before == now():
        keep(before, *found)
    return found


def _compact(report: Report, part: Part, source: Source) -> tuple[State, Read]:
    ranges = report_ranges(report, source.layer_regex)
    with_nodes = part.events["graph_node"].null_count() < part.events.height
    state = {
        "events": part.events,
        "calls": part.calls,
        "names": part.seen.names,
        "marked": ranges.marked,
        "captured": captured_nodes([report]) if with_nodes else pl.DataFrame(schema=CAPTURED_SCHEMA),
    }
    light = ReportRanges(ranges.marked.clear(), ranges.calls, ranges.notes)
    return state, Read(part.seen, stack_counts(ranges.marked), light)


@dataclass(frozen=True)
class Names:
    """What ``name`` is told: the report's ranks, the run's numbers of its kernels, the rules, all ``stacks``."""

    seen: Seen
    ranks: pl.DataFrame
    own_names: pl.Series
    rules: RuleSet
    stacks: pl.DataFrame


@dataclass(frozen=True)
class Named:
    """Answer of ``name``: comm_rows, when its events are, told_apart, the fits of periods, and the marked windows."""

    comm: pl.DataFrame
    first: int
    last: int
    markers: bool
    fits: pl.DataFrame
    windows: pl.DataFrame


def name(state: State, told: Names, _: Say) -> tuple[State, Named]:
    """Say what each event is, and which layer launched it as far as the report's own ranges tell."""
    report = int(told.ranks["report"][0])
    number = pl.lit(report, pl.Int64).alias("report")
    slices = Part(told.seen, state["events"], state["calls"]).slices(told.ranks, told.own_names)
    events = pl.concat((rows for _, rows in slices), rechunk=True)
    names = state["names"].select(told.own_names.alias("name_id"), "short_name", "name")
    named = assign_roles(events, names, state["calls"].with_columns(number), told.rules)
    comm = comm_rows(named)
    marked = main_stack(state["marked"].with_columns(number), told.stacks)
    host_forwards = forward_ranges(marked)
    bare = named.drop(set(LINK_SCHEMA) - {"nccl_bytes"}, "bytes")  # what nothing later needs, so that no step copies it
    found = launched_in(bare, told.ranks, marked, host_forwards)
    period, fits = fit_ranks(found)
    windows = marked.filter(pl.col("kind") == "window").select("report", "tid", "start", "end", "kind")
    captured = state["captured"].with_columns(number)
    after = {
        "events": found,
        "comm": comm.select("row"),
        "host_forwards": host_forwards,
        "marked": marked if captured.height else marked.clear(),
        "captured": captured,
        "period": period,
    }
    first, last = int(events["start"].min()), int(events["end"].max())  # type: ignore[arg-type]
    return after, Named(comm.drop("row", "report"), first, last, told_apart(host_forwards), fits, windows)


@dataclass(frozen=True)
class Places:
    """What ``place`` is told: ``waits`` of the report's communication (see Matched) and its clock ``offset_ns``.

    ``ranks`` with their stages; ``markers``: told_apart of all reports; ``fits`` with first_layer.
    """

    ranks: pl.DataFrame
    waits: pl.DataFrame
    offset_ns: int
    markers: bool
    fits: pl.DataFrame


@dataclass(frozen=True)
class Placed:
    """Answer of ``place``: ``kind`` and ``hidden`` wait per row of the report's communication; forwards, captures."""

    comm: pl.DataFrame
    forwards: pl.DataFrame
    captures: pl.DataFrame
    graphs: list[int]


def place(state: State, told: Places, _: Say) -> tuple[State, Placed]:
    """Put events on the common clock, in layers and forwards, and waits into them."""
    # Ranges and launches are compared on the report's own clock, so with the events as they were before alignment.
    events = with_numbers(state["events"], state["host_forwards"], told.markers)
    if events["graph_node"].null_count() < events.height:
        events = attribute_graphs(events, told.ranks, state["marked"], state["captured"])
    events = with_period(events, state["period"], told.fits)
    graphs = unplaced_graphs(events)
    rows = state["comm"]["row"]
    events = with_waits(events, rows, told.waits)
    hidden = hidden_waits(events, rows)
    if told.offset_ns:
        events = events.with_columns(pl.col("start", "end", "api_start", "api_end") - told.offset_ns)
    events = collective_kinds(events)
    forwards = forward_table(events, told.ranks, state["host_forwards"])
    comm = pl.DataFrame({"kind": events["collective_kind"].gather(rows), "hidden": hidden})
    kept = events.drop("correlation", "graph_node", "tid", "report", "host_forward", "kind_source", "nccl_bytes")
    return {"events": kept, "comm": state["comm"]}, Placed(comm, forwards, capture_windows(events), graphs)


@dataclass(frozen=True)
class Sums:
    """What ``sum_up`` is told: stages, windows, whole forwards, what to draw (see timeline), the pipeline's phases."""

    ranks: pl.DataFrame
    windows: pl.DataFrame
    whole: pl.DataFrame
    spans: pl.DataFrame | None
    most: int
    bounds: tuple[int, int] | None


@dataclass(frozen=True)
class Summed:
    """Answer of ``sum_up``: numbers by rank, tables, events to draw and how many there were, what layers come from."""

    budgets: dict[int, Budget]
    stages: dict[int, StageTime]
    tables: dict[str, pl.DataFrame]
    drawn: int
    sources: list[str]
    opaque: bool


def sum_up(state: State, told: Sums, _: Say) -> tuple[State, Summed]:
    """The tables of the report's ranks over their windows."""
    events = state["events"]
    counted = in_window(events, told.windows)
    drawn, found = draw(events, state["comm"]["row"], told.spans, told.windows, told.most)
    sums = count_sums(counted)
    for part in (attributed_shares(counted), moe_shares(counted)):
        wanted = {"attributed_share", "boundary_share", "moe_share"} & set(part.columns)
        sums = sums.join(part.select("rank", *sorted(wanted)), on="rank", how="left")
    tables = {
        "sums": sums,
        "work": work_counts(counted, told.whole),
        "roles": role_table(counted),
        "categories": category_table(counted),
        "kernels": kernel_statistics(counted),
        "layers": layer_table(counted, told.ranks),
        "layer_categories": layer_categories(counted),
        "unattributed": unattributed_reasons(counted),
        "drawn": drawn,
    }
    return {}, Summed(
        budgets(events, told.windows, stage_gaps(events)),
        stage_times(events, told.windows, told.bounds),
        {name: plain(table) for name, table in tables.items()},
        found,
        counted["layer_source"].drop_nulls().unique().cast(pl.String).to_list(),
        not counted.filter(pl.col("kind") == "graph").is_empty(),
    )


def plain(table: pl.DataFrame) -> pl.DataFrame:
    """Categories and enumerations as text: what parquet, CSV and JSON readers of any kind understand."""
    coded = [name for name, kind in table.schema.items() if isinstance(kind, pl.Categorical | pl.Enum)]
    return table.with_columns(pl.col(name).cast(pl.String) for name in coded)
