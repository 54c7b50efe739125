"""Communication kernels as one compact table: which communicator, which operation, which peer."""

from __future__ import annotations

import polars as pl

from nsysk3.classify import COMM_ROLES

# Operations whose members end together: no rank can finish before the last one has arrived.
SYNCHRONISING = ("allreduce", "reduce_scatter", "all_gather", "all_to_all", "barrier")


def comm_table(events: pl.DataFrame) -> pl.DataFrame:
    """Communication events with ``event`` (row of ``events``), ``dur`` and ``group``.

    ``group``: the communicator, as ``comm <hex id>`` from an NCCL payload; null where there is none, until
    ``infer_groups`` names it.  Sorted by (group, role, rank, end).
    """
    hex_id = pl.col("comm").map_elements(lambda value: f"comm {value & (2**64 - 1):016x}", return_dtype=pl.String)
    ids = pl.DataFrame({"comm": events["comm"].drop_nulls().unique()}).with_columns(hex_id.alias("group"))
    read = (
        "rank", "report", "stream", "start", "end", "role", "nccl_op", "comm", "peer", "n_sends", "n_recvs",
        "send_bytes", "recv_bytes", "nccl_bytes",
    )  # fmt: skip
    return (
        events.select(read)
        .with_row_index("event")
        .filter(pl.col("role").is_in(COMM_ROLES))
        .join(ids, on="comm", how="left")
        .with_columns((pl.col("end") - pl.col("start")).alias("dur"), pl.col("role").cast(pl.String))
        .select(
            "event", "rank", "report", "stream", "start", "end", "dur", "role", "nccl_op", "group", "comm", "peer",
            "n_sends", "n_recvs", "send_bytes", "recv_bytes", "nccl_bytes",
        )
        .sort("group", "role", "rank", "end", nulls_last=True)
    )  # fmt: skip
