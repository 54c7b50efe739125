"""A result as tables for a terminal of 100 columns; plain text when piped."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import IO

import polars as pl
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from nsysk3.report.units import count, duration, milliseconds, percent
from nsysk3.result import Result

WIDTH = 100
_TOP_KERNELS = 8
_BAR = 16
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
    out.print(f"[bold]{len(document.ranks)} ranks[/], {stable} stable · window: {escape(shown)} · times in ms")
    if document.simulated:
        out.print(f"[bold yellow]simulated[/]: {escape(document.simulated)}")
    out.print(rank_table(result))
    out.print(budget_table(result))
    if result.tables["kernels"].height:
        out.print(kernel_table(result))
    for note in document.notes:
        out.print(Text(f"note: {note}"), soft_wrap=True)


def _table(title: str, *columns: tuple[str, str]) -> Table:
    """Columns are never cut: cells are made to fit, so that numbers stay whole at 100 columns."""
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
    table.padding = (0, 1, 0, 0)
    for name, justify in columns:
        table.add_column(name, justify="right" if justify == "r" else "left", no_wrap=True)
    return table


def rank_table(result: Result) -> Table:
    """One row a rank: shares of its window, AllReduce and P2P."""
    table = _table(
        "Ranks (times in ms, shares in % of the window)",
        ("rank", "r"), ("pp/tp", "r"), ("gpu", "l"), ("window", "r"), ("compute", "r"), ("overlap", "r"),
        ("exposed\ncomm", "r"), ("idle", "r"), ("AllReduce\nn", "r"), ("\ntotal", "r"), ("\np50", "r"), ("P2P\nn", "r"),
        ("\ntotal", "r"),
    )  # fmt: skip
    for rank in result.document.ranks:
        place = "/".join("-" if x is None else str(x) for x in (rank.pp_rank, rank.tp_rank))
        share_of = _shares(rank.window_ns)
        table.add_row(
            f"{rank.world_rank}{'' if rank.stable else '*'}",
            place if place != "-/-" else "-",
            escape(f"{_cut(rank.host or '?', 10)}:{rank.device_id}"),
            milliseconds(rank.window_ns),
            percent(share_of(rank.compute_ns)),
            percent(share_of(rank.overlap_ns)),
            percent(rank.exposed_comm_share),
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


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _shares(window_ns: int) -> Callable[[int | None], float | None]:
    def share(ns: int | None) -> float | None:
        return None if ns is None or not window_ns else ns / window_ns

    return share


def budget_table(result: Result) -> Table:
    """Where the window went: median over stable ranks, largest first."""
    ranks = pl.DataFrame(
        {"rank": list(range(len(result.document.ranks))), "stable": [r.stable for r in result.document.ranks]},
        schema={"rank": pl.Int32, "stable": pl.Boolean},
    )
    chosen = ranks.filter(pl.col("stable")) if ranks["stable"].any() else ranks
    spent = (
        result.tables["budget"]
        .join(chosen, on="rank")
        .group_by("bucket", maintain_order=True)
        .agg(
            pl.col("ns").median(),
            pl.col("share").median(),
            pl.col("ns").min().alias("low"),
            pl.col("ns").max().alias("high"),
        )
        .filter(pl.col("high") > 0)
    )
    table = _table(
        "Where the window went (median over stable ranks)",
        ("", "l"), ("ms", "r"), ("%", "r"), ("", "l"), ("lowest..highest rank", "r"),
    )  # fmt: skip
    for bucket, ns, part, low, high in spent.iter_rows():
        bar = "█" * round((part or 0) * _BAR)
        name = _BUCKET_NAMES.get(bucket) or f"exposed {bucket.removeprefix('exposed_').replace('_', '-')} transfer"
        table.add_row(
            _cut(name, 42), milliseconds(ns), percent(part), bar, f"{milliseconds(low)}..{milliseconds(high)}"
        )
    return table


def kernel_table(result: Result) -> Table:
    """The kernels that took most time, per rank on average."""
    kernels = result.tables["kernels"]
    count_ranks = max(len(result.document.ranks), 1)
    top = (
        kernels.group_by("name", "short_name", "role", "category")
        .agg(pl.col("count").sum(), pl.col("total_ns").sum(), pl.col("p50_ns").median())
        .sort("total_ns", "name", descending=[True, False])
        .head(_TOP_KERNELS)
    )
    every = int(kernels["total_ns"].sum()) or 1
    table = _table(
        "Kernels with most time (per rank, summed durations)",
        ("ms", "r"), ("%", "r"), ("n", "r"), ("p50", "r"), ("category", "l"), ("kernel", "l"),
    )  # fmt: skip
    for name, short, role, category, n, total, p50 in top.iter_rows():
        label = category if role in ("compute", "copy") else f"{category} ({role})"
        table.add_row(
            milliseconds(total / count_ranks), percent(total / every), count(n / count_ranks), duration(p50),
            _cut(label, 22), Text(_cut(_symbol(short, name), 44)),
        )  # fmt: skip
    return table


def _symbol(short: str, name: str) -> str:
    """The part of a symbol that tells kernels apart."""
    shown = short if short not in ("device_kernel", "Kernel", "kernel") else name
    return shown.removeprefix("void ")


def print_problems(problems: Iterable[str], err: Console) -> None:
    """One line for each input that gave no rank."""
    for problem in problems:
        err.print(Text(f"nsysk3: {problem}"), soft_wrap=True)
