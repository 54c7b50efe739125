"""A result as tables for a terminal of 100 columns; plain text when piped."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import IO

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from nsysk3.report.text import NO_GPU, NO_MEDIANS, clean, origin
from nsysk3.report.units import count, duration, milliseconds, percent
from nsysk3.result import RankMetrics, Result
from nsysk3.run.words import counted

WIDTH = 100
_TOP_KERNELS = 8
_BAR = 16
# What a host's name may take of a row, as much as fits.
_HOST_WIDTHS = (10, 7, 4)
_LONGEST_NOTE = 4000
_BUCKET_NAMES = {
    "overlap": "overlap (compute with communication)",
    "compute": "compute alone",
    "fused": "fused compute and communication",
    "exposed_unresolved": "exposed, wait or transfer unknown",
    "exposed_wait_collective": "exposed wait for a collective's last rank",
    "exposed_wait_upstream": "exposed Stage wait, upstream",
    "exposed_wait_downstream": "exposed Stage wait, downstream",
    "graph": "CUDA graph replays (contents unknown)",
    "copy": "copies and memsets alone",
    "idle_stage_idle": "idle, waiting for another stage",
    "idle_launch_gap": "idle, next launch not yet issued",
    "idle_other": "idle, other",
}


def console(file: IO[str] | None = None) -> Console:
    """A console that wraps at 100 columns where the output is not a terminal."""
    made = Console(file=file, highlight=False)
    return made if made.is_terminal and made.width < WIDTH else Console(file=file, highlight=False, width=WIDTH)


def print_result(result: Result, out: Console) -> None:
    """The whole summary: ranks, time budget, top kernels, notes."""
    document = result.document
    shown = document.window.used if document.window.used == document.window.asked else (
        f"{document.window.used} (asked: {document.window.asked}; {document.window.reason})"
    )  # fmt: skip
    stable = document.summary["stable_ranks"]
    ranks = counted(len(document.ranks), "rank")
    out.print(f"[bold]{ranks}[/], {stable} stable · window: {escape(shown)} · times in ms")
    if document.simulated:
        out.print(f"[bold yellow]simulated[/]: {escape(origin(document.simulated) or NO_GPU)}")
    _print_whole((rank_table(result, width) for width in _HOST_WIDTHS), out)
    if stable:
        _print_whole([budget_table(result)], out)
    else:
        out.print(f"{NO_MEDIANS}\n")
    if document.sentences:
        out.print("[bold]In words[/]")
        for sentence in document.sentences:
            out.print(Padding(Text(clean(sentence, _LONGEST_NOTE)), (0, 0, 0, 1)))
        out.print()
    if stable and result.tables["top_kernels"].height:
        _print_whole([kernel_table(result)], out)
    for line in _clock_lines(result):
        out.print(Text(clean(line)))
    for note in document.notes:
        out.print(Text(clean(f"note: {note}", _LONGEST_NOTE)))


def _print_whole(tables: Iterable[Table], out: Console) -> None:
    """The first of the tables that fits, else the last at the width that it needs: half a number is a wrong number."""
    for table in tables:
        needed = Measurement.get(out, out.options.update(max_width=10_000), table).maximum
        if needed <= out.width:
            break
        table.width = needed
    out.print(table, crop=False)


def _clock_lines(result: Result) -> list[str]:
    """The clock correction of each report that got one, with what it is worth."""
    return [
        f"clock: {entry.report} is {entry.offset_ns / 1e3:+,.1f} us from {entry.reference}, "
        f"drift {entry.drift_ppm:+.2f} ppm, uncertain by {(entry.uncertainty_ns or 0) / 1e3:,.1f} us"
        for entry in result.document.clock.reports
        if entry.report != entry.reference
    ]


def new_table(title: str, *columns: tuple[str, str]) -> Table:
    """Columns are never cut: cells are made to fit, so that numbers stay whole at 100 columns."""
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
    table.padding = (0, 0, 0, 0)
    for name, justify in columns:
        table.add_column(name, justify="right" if justify == "r" else "left", no_wrap=True)
    return table


def rank_table(result: Result, host_width: int = 10) -> Table:
    """One row a rank: shares of its window, AllReduce and P2P."""
    table = new_table(
        "Ranks (times in ms, shares in % of the window)",
        ("rank", "r"), ("pp/tp", "r"), ("gpu", "l"), ("window", "r"), ("compute", "r"), ("overlap", "r"),
        ("exposed\nwait", "r"), ("\ntransfer", "r"), ("idle", "r"), ("AllReduce\nn", "r"), ("\ntotal", "r"),
        ("\np50", "r"), ("P2P\nn", "r"), ("\ntotal", "r"),
    )  # fmt: skip
    for rank in result.document.ranks:
        place = "/".join("-" if x is None else str(x) for x in (rank.pp_rank, rank.tp_rank))
        share_of = _shares(rank.window_ns)
        table.add_row(
            f"{rank.world_rank}{'' if rank.stable else '*'}",
            place if place != "-/-" else "-",
            escape(f"{_cut(clean(rank.host or '?'), host_width)}:{rank.device_id}"),
            milliseconds(rank.window_ns),
            percent(share_of(rank.compute_ns)),
            percent(share_of(rank.overlap_ns)),
            *_exposed(rank),
            percent(share_of(rank.idle_ns)),
            count(rank.allreduce_count),
            milliseconds(rank.allreduce_total_ns),
            milliseconds(rank.allreduce_p50_ns, 2),
            count(rank.p2p_count),
            milliseconds(rank.p2p_total_ns),
        )
    unstable = [r for r in result.document.ranks if not r.stable]
    if unstable:
        table.caption = "* not in medians: " + "; ".join(f"rank {r.world_rank}: {r.reason}" for r in unstable[:4]) + (
            f" and {len(unstable) - 4} more" if len(unstable) > 4 else ""
        )  # fmt: skip
        table.caption_justify = "left"
    return table


def _exposed(rank: RankMetrics) -> tuple[str, str]:
    """Exposed wait and transfer; where nobody can split them, the whole under transfer with a question mark."""
    share_of = _shares(rank.window_ns)
    if rank.exposed_wait_ns is None:
        return "-", f"{percent(rank.exposed_comm_share)}?" if rank.exposed_comm_share is not None else "-"
    return percent(share_of(rank.exposed_wait_ns)), percent(share_of(rank.exposed_transfer_ns))


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _shares(window_ns: int) -> Callable[[int | None], float | None]:
    def share(ns: int | None) -> float | None:
        return None if ns is None or not window_ns else ns / window_ns

    return share


def budget_table(result: Result) -> Table:
    """Where the window went: medians over stable ranks, one column a stage where there are few."""
    spent = result.tables["budget_summary"]
    groups = spent["group"].unique(maintain_order=True).to_list()
    columns = [("", "l")]
    for group in groups:
        columns += [(f"{group}\nms" if len(groups) > 1 else "ms", "r"), ("\n%" if len(groups) > 1 else "%", "r")]
    columns += [("", "l")] if len(groups) > 1 else [("", "l"), ("lowest..highest rank", "r")]
    table = new_table("Where the window went (median over stable ranks)", *columns)
    for (bucket,), rows in spent.group_by("bucket", maintain_order=True):
        cells = {row["group"]: row for row in rows.iter_rows(named=True)}
        shown = [_cut(_bucket_name(str(bucket)), 42)]
        for group in groups:
            cell = cells[group]
            shown += [milliseconds(cell["ns"]), percent(cell["share"])]
        shown.append("█" * round((cells[groups[0]]["share"] or 0) * _BAR) if len(groups) == 1 else "")
        if len(groups) == 1:
            shown.append(f"{milliseconds(cells[groups[0]]['low_ns'])}..{milliseconds(cells[groups[0]]['high_ns'])}")
        table.add_row(*shown)
    return table


def _bucket_name(bucket: str) -> str:
    return _BUCKET_NAMES.get(bucket) or f"exposed {bucket.removeprefix('exposed_').replace('_', '-')} transfer"


def kernel_table(result: Result) -> Table:
    """The kernels that took most time, per rank on average."""
    table = new_table(
        "Kernels with most time (mean per rank, summed durations)",
        ("ms", "r"), ("%", "r"), ("n", "r"), ("p50", "r"), ("category", "l"), ("kernel", "l"),
    )  # fmt: skip
    for row in result.tables["top_kernels"].head(_TOP_KERNELS).iter_rows(named=True):
        role, category = row["role"], row["category"]
        label = category if role in ("compute", "copy") else f"{category} ({role})"
        table.add_row(
            milliseconds(row["total_ns"]), percent(row["share"]), count(row["count"]), duration(row["p50_ns"]),
            escape(_cut(clean(label), 22)), Text(_cut(clean(_symbol(row["short_name"], row["name"])), 44)),
        )  # fmt: skip
    return table


def _symbol(short: str, name: str) -> str:
    """The part of a symbol that tells kernels apart."""
    shown = short if short not in ("device_kernel", "Kernel", "kernel") else name
    return shown.removeprefix("void ")


def print_problems(problems: Iterable[str], err: Console) -> None:
    """One line for each input that gave no rank."""
    for problem in problems:
        err.print(Text(clean(f"nsysk3: {problem}", _LONGEST_NOTE)), soft_wrap=True)
