"""Communication kernels as one compact table: which communicator, which operation, which peer."""

from __future__ import annotations

import polars as pl

from nsysk3.classify import COMM_ROLES

# Operations whose members end together: no rank can finish before the last one has arrived.
SYNCHRONISING = ("allreduce", "reduce_scatter", "all_gather", "all_to_all", "barrier")


_READ = (
    "rank", "report", "stream", "start", "end", "role", "comm", "peer", "n_sends", "n_recvs", "send_bytes",
    "recv_bytes", "nccl_bytes",
)  # fmt: skip


def comm_rows(events: pl.DataFrame) -> pl.DataFrame:
    """The communication events of one report or of a run, in their order, with ``row`` (of ``events``).

    This is all that ranks must know of each other.
    """
    return events.select(_READ).with_row_index("row").filter(pl.col("role").is_in(COMM_ROLES))


def comm_table(rows: pl.DataFrame) -> pl.DataFrame:
    """``comm_rows`` with ``event`` (their number), ``dur`` and ``group``.

    ``group``: the communicator, as ``comm <hex id>`` from an NCCL payload; null where there is none, until
    ``infer_groups`` names it.  Sorted by (group, role, rank, end).
    """
    hex_id = pl.col("comm").map_elements(lambda value: f"comm {value & (2**64 - 1):016x}", return_dtype=pl.String)
    ids = pl.DataFrame({"comm": rows["comm"].drop_nulls().unique()}).with_columns(hex_id.alias("group"))
    return (
        rows.drop("row", strict=False)
        .with_row_index("event")
        .join(ids, on="comm", how="left", maintain_order="left")
        .with_columns((pl.col("end") - pl.col("start")).alias("dur"), pl.col("role").cast(pl.String))
        .sort("group", "role", "rank", "end", nulls_last=True)
    )
