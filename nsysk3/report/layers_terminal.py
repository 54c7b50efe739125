"""The layers of a result as a table for a terminal of 100 columns."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nsysk3.report.terminal import new_table
from nsysk3.report.text import NO_GPU, origin
from nsysk3.report.units import milliseconds, percent
from nsysk3.result import Result


def print_layers(result: Result, out: Console) -> None:
    """One row a layer, then how layers were found and for how much of the time."""
    rows = result.tables["layer_rows"]
    about = result.document.layers
    if result.document.simulated:
        out.print(Text(f"simulated: {origin(result.document.simulated) or NO_GPU}"))
    if rows.is_empty():
        out.print("no layers in this window")
    else:
        out.print(_table(result))
        found = ", ".join(about.sources)
        share = "-" if about.attributed_share is None else f"{percent(about.attributed_share)} %"
        boundary = about.boundary_share or 0
        other = f" (up to {percent(boundary)} % is pipeline Send/Recv, which belongs to none)" if boundary > 0 else ""
        out.print(Text(f"layers from {found}; {share} of kernel time has one on the worst rank{other}"))
    for note in result.document.notes:
        if "layer" in note:
            out.print(Text(f"note: {note}"))


def _table(result: Result) -> Table:
    table = new_table(
        f"Layers, median over ranks and forwards (window: {result.document.window.used}; ms a forward)",
        ("layer", "r"), ("stage", "r"), ("kind", "l"), ("forwards", "r"), ("p50", "r"), ("p95", "r"),
        ("% of\nwindow", "r"), ("compute", "r"), ("AllReduce\nwait", "r"), ("\ntransfer", "r"), ("exposed\ncomm", "r"),
        ("fused", "r"), ("stands\nout", "l"),
    )  # fmt: skip
    for row in result.tables["layer_rows"].iter_rows(named=True):
        odd = row["outlier_ranks"]
        table.add_row(
            str(row["layer"]),
            "-" if row["stage"] is None else str(row["stage"]),
            row["layer_kind"] or "-",
            str(row["forwards"]),
            milliseconds(row["p50_ns"], 2),
            milliseconds(row["p95_ns"], 2),
            percent(row["window_share"]),
            milliseconds(row["compute_ns"], 2),
            milliseconds(row["allreduce_wait_ns"], 2),
            milliseconds(row["allreduce_transfer_ns"], 2),
            milliseconds(row["exposed_comm_ns"], 2),
            milliseconds(row["fused_ns"], 2),
            f"x{row['vs_kind']:.2f}" if odd * 2 > row["ranks"] else "",
        )
    return table
