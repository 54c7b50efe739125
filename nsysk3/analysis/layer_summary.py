"""Each layer over the forwards of a window, and the layers that stand out among their kind."""

from __future__ import annotations

import polars as pl

# Robust z (0.6745 x distance from the median / median absolute deviation) beyond which a layer stands out, the usual
# choice, and the least difference from the median worth naming: layers of one kind agree to a percent or so.
_OUTLIER_Z = 3.5
_OUTLIER_SHARE = 0.05
_LEAST_LAYERS = 4
_MEDIANS = ["compute_ns", "allreduce_ns", "allreduce_wait_ns", "allreduce_transfer_ns", "exposed_comm_ns", "fused_ns"]


def layer_summary(layers: pl.DataFrame, windows: pl.DataFrame, forwards: pl.DataFrame | None = None) -> pl.DataFrame:
    """One row a (rank, layer): what a forward spends in it, over the forwards that lie in the rank's window.

    ``layers`` are layer_table's, ``windows`` have rank, start, end.  With ``forwards`` (forward_table's) only whole
    ones count.  Columns: ``rank``, ``stage``, ``layer``, ``layer_kind``, ``forwards``; ``p50_ns`` and ``p95_ns`` of
    the time from the layer's first kernel to the end of its last; the medians over forwards of the times of
    layer_table; ``window_share``, the sum of those times / window; ``vs_kind``, p50 / the median p50 of the rank's
    layers of that kind; ``robust_z``, the distance from it in robust standard deviations (null with fewer than four
    layers of the kind); ``outlier``.
    """
    inside = layers.join(windows.select("rank", "start", "end"), on="rank").filter(
        (pl.col("start_utc_ns") >= pl.col("start")) & (pl.col("end_utc_ns") <= pl.col("end"))
    )
    if forwards is not None:
        inside = inside.join(forwards.filter("whole"), on=["rank", "forward"], how="semi")
    span = pl.col("end_utc_ns") - pl.col("start_utc_ns")
    window = pl.col("end").first() - pl.col("start").first()
    table = inside.group_by("rank", "layer").agg(
        pl.first("stage"),
        pl.first("layer_kind"),
        pl.len().cast(pl.Int64).alias("forwards"),
        span.median().alias("p50_ns"),
        span.quantile(0.95, "linear").alias("p95_ns"),
        *[pl.col(name).median() for name in _MEDIANS],
        (span.sum() / pl.when(window > 0).then(window)).alias("window_share"),
    )
    return _with_outliers(table).select(
        *("rank", "stage", "layer", "layer_kind", "forwards", "p50_ns", "p95_ns"),
        *_MEDIANS,
        *("window_share", "vs_kind", "robust_z", "outlier"),
    ).sort("rank", "layer")  # fmt: skip


def _with_outliers(table: pl.DataFrame) -> pl.DataFrame:
    kind = ["rank", "layer_kind"]
    usual = pl.col("p50_ns").median().over(kind)
    spread = (pl.col("p50_ns") - pl.col("usual")).abs().median().over(kind)
    away = pl.col("p50_ns") - pl.col("usual")
    enough = pl.col("layer_kind").is_not_null() & (pl.len().over(kind) >= _LEAST_LAYERS)
    table = table.with_columns(usual.alias("usual")).with_columns(spread.alias("spread"), enough.alias("enough"))
    # Layers that agree to the nanosecond leave no spread to measure by: the share alone decides then.
    z = pl.when(pl.col("enough") & (pl.col("spread") > 0)).then(0.6745 * away / pl.col("spread"))
    far = (z.abs() > _OUTLIER_Z).fill_null(True) & (away.abs() > _OUTLIER_SHARE * pl.col("usual"))
    return table.with_columns(
        pl.when(pl.col("layer_kind").is_not_null() & (pl.col("usual") > 0))
        .then(pl.col("p50_ns") / pl.col("usual"))
        .alias("vs_kind"),
        z.alias("robust_z"),
        (pl.col("enough") & far).alias("outlier"),
    )


def layer_rows(summary: pl.DataFrame) -> pl.DataFrame:
    """Rows for a terminal or a report: one a layer, the median over its ranks of layer_summary's columns.

    ``ranks``: how many ranks ran it; ``outlier_ranks``: on how many it stands out.
    """
    return (
        summary.group_by("layer")
        .agg(
            pl.col("stage").min(),
            pl.col("layer_kind").drop_nulls().mode(maintain_order=True).first(),
            pl.len().cast(pl.Int64).alias("ranks"),
            pl.col("forwards").min(),
            *[pl.col(name).median() for name in ("p50_ns", "p95_ns", *_MEDIANS, "window_share", "vs_kind")],
            pl.col("outlier").sum().cast(pl.Int64).alias("outlier_ranks"),
        )
        .sort("layer")
    )


def outlier_sentences(rows: pl.DataFrame) -> list[str]:
    """The layers of layer_rows that stand out on most of their ranks, in words, farthest first."""
    named = rows.filter(pl.col("outlier_ranks") * 2 > pl.col("ranks")).sort(
        (pl.col("vs_kind") - 1).abs(), descending=True
    )
    return [
        f"layer {layer} ({kind}) takes {ratio:.2f} times the median of its kind ({p50 / 1e6:.3f} ms a forward)"
        for layer, kind, ratio, p50 in named.select("layer", "layer_kind", "vs_kind", "p50_ns").iter_rows()
    ]
