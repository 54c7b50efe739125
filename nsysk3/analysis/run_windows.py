"""The window of every rank of a run, and what was asked for against what could be had."""

from __future__ import annotations

import polars as pl

from nsysk3.analysis.forward_windows import prefill_windows, steady_windows
from nsysk3.analysis.windows import WindowSpec, explicit_windows
from nsysk3.errors import InputError
from nsysk3.result.model import WindowInfo


def run_windows(
    spec: WindowSpec, captures: pl.DataFrame, forwards: pl.DataFrame, ranks: pl.DataFrame, marked: pl.DataFrame
) -> tuple[pl.DataFrame, WindowInfo]:
    """``rank``, ``start``, ``end`` (UTC ns) of every rank, and what became of what was asked for.

    ``captures``: capture_windows of all ranks; ``marked``: their ranges of kind window.  Raises InputError when no GPU
    works in the window asked for.
    """
    if spec.start_ns is not None:
        found = explicit_windows(captures, spec)
        if (found["end"] <= found["start"]).all():
            length = (captures["end"].max() - captures["start"].min()) / 1e9  # type: ignore[operator]
            raise InputError(f"--window {spec.text}: no GPU work in it; the run's work lasts {length:.3f} s")
        return found, WindowInfo(asked=spec.text, used=spec.text)
    if spec.text == "capture":
        return captures, WindowInfo(asked="capture", used="capture")
    found = (
        prefill_windows(forwards, captures, ranks, marked)
        if spec.text == "prefill"
        else steady_windows(forwards, captures)
    )
    missing = found.filter(pl.col("reason").is_not_null())
    if missing.is_empty():
        return found.drop("reason"), WindowInfo(asked=spec.text, used=spec.text)
    # One window object for all numbers of a table: ranks are not mixed.
    reason = f"{missing.height} of {found.height} ranks: {missing['reason'][0]}"
    return captures, WindowInfo(asked=spec.text, used="capture", reason=reason)
