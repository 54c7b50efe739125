"""What makes a run's numbers less than certain: every flag of its result, then the analysis' notes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import polars as pl

from nsysk3.compare.windowed import touching, whole_forwards
from nsysk3.report.blocks import Prose
from nsysk3.report.text import clean, duration, shown
from nsysk3.report.view import View

# Shares below this change no number that is shown.
_LITTLE = 0.01
_NAMED = 4
# Notes a report or run each, of which the flags give the count; the evidence has them all.
_COUNTED = re.compile(
    r".* numbered by host and GPU order, a guess: .*|.*; no wait across it can be told|.*: \d+ GPU rows dropped \(.*"
    r"|up to .* of kernel time is of kernels no rule names .*|.*: CUDA graphs were traced as a whole, so .*",
    re.DOTALL,
)


def limits(view: View, title: str) -> Prose:
    """All that limits the numbers, each with its language; one line saying so where nothing is known to."""
    texts, document = view.texts, view.document
    flags = [(said, texts.lang) for said in (*_of_run(view), *_of_ranks(view), *_of_kernels(view))]
    notes = [*document.notes, *((document.manifest or {}).get("notes") or ())]
    said = [texts.said(clean(note)) for note in dict.fromkeys(map(str, notes)) if not _COUNTED.fullmatch(note)]
    return Prose((*flags, *said) or ((texts("verdict.limit_none"), texts.lang),), title)


def _of_run(view: View) -> Iterator[str]:
    texts, document, window = view.texts, view.document, view.document.window
    manifest: dict[str, Any] = document.manifest or {}
    if document.simulated:
        yield texts("verdict.limit_simulated")
    if document.problems:
        yield texts("verdict.limit_problems", n=len(document.problems))
    if cause := manifest.get("cause"):
        yield texts("verdict.limit_status", status=clean(manifest.get("status")), why=clean(cause["message"]))
    for feature in manifest.get("features") or ():
        if feature["fell_back"]:
            why = clean(feature["reason"] or texts("ui.no_reason"))
            yield texts("verdict.limit_feature", name=clean(feature["name"]), why=why)
    if window.used != window.asked:
        reason = texts.said(clean(window.reason or ""))[0]
        yield texts("ui.window_asked", used=clean(window.used), asked=clean(window.asked), reason=reason)
    if doubt := max((clock.uncertainty_ns or 0 for clock in document.clock.reports), default=0):
        yield texts("verdict.limit_clock", doubt=duration(doubt))
    if alone := sum(clock.reason is not None for clock in document.clock.reports):
        yield texts("verdict.limit_clock_none", n=alone)


def _of_ranks(view: View) -> Iterator[str]:
    texts, ranks = view.texts, view.document.ranks
    stable = [rank for rank in ranks if rank.stable]
    if len(stable) < len(ranks):
        reasons = dict.fromkeys(rank.reason for rank in ranks if rank.reason)
        why = [texts.said(clean(reason))[0] for reason in reasons][:_NAMED]
        more = ["…"] if len(reasons) > len(why) else []
        yield texts(
            "verdict.limit_unstable", n=len(ranks) - len(stable), all=len(ranks), why=texts("ui.list").join(why + more)
        )
    if inferred := sum(rank.rank_source == "inferred" for rank in ranks):
        yield texts("verdict.limit_inferred", n=inferred, all=len(ranks))
    cut, every, on = _cut_forwards(view)
    if cut:
        window = view.document.window
        way = "" if "prefill" in (window.asked, window.used) else texts("verdict.limit_cut_way")
        yield texts("verdict.limit_cut", n=cut, all=every, on=on, ranks=len(ranks)) + way
    covered = min((rank.coverage for rank in stable if rank.coverage is not None), default=1.0)
    if covered < 1 - _LITTLE:
        yield texts("verdict.limit_coverage", share=_percent(covered))


def _cut_forwards(view: View) -> tuple[int, int, int]:
    """Forwards in the windows that are not whole, those that touch the windows at all, and ranks that have such."""
    ranks = view.table("rank_metrics").with_row_index("rank").with_columns(pl.col("rank").cast(pl.Int32))
    every = touching(view.result, ranks)
    cut = every.join(whole_forwards(view.result, ranks), on=["rank", "forward"], how="anti")
    return cut.height, every.height, cut["rank"].n_unique()


def _of_kernels(view: View) -> Iterator[str]:
    texts, document = view.texts, view.document
    unmatched = sum(entry.unmatched for entry in document.matched)
    if unmatched:
        every = unmatched + sum(entry.matched for entry in document.matched)
        yield texts("verdict.limit_unmatched", n=f"{unmatched:,}", all=f"{every:,}")
    shares = {
        "unresolved": (_of_window(rank.exposed_unresolved_ns, rank.window_ns) for rank in document.ranks),
        "opaque": (_of_window(rank.graph_ns, rank.window_ns) for rank in document.ranks),
        "unclassified": (rank.unclassified_share or 0.0 for rank in document.ranks),
    }
    for name, found in shares.items():
        if (most := max(found, default=0.0)) > _LITTLE:
            yield texts(f"verdict.limit_{name}", share=_percent(most))
    by_report: dict[tuple[str | None, str], int] = {}
    for rank in document.ranks:  # each has the number of its whole report
        place = rank.host, rank.report
        by_report[place] = max(by_report.get(place, 0), rank.dropped_rows)
    if dropped := sum(by_report.values()):
        yield texts("verdict.limit_dropped", n=f"{dropped:,}")
    # What was not there to be measured limits nothing.
    missing: dict[str, list[str]] = {}
    for name, why in sorted(document.not_measured.items()):
        if not why.endswith("in the window"):
            missing.setdefault(why, []).append(clean(texts.get(f"col.{name}", name)))
    for why, names in missing.items():
        more = ["…"] if len(names) > _NAMED else []
        listed = texts("ui.list").join(names[:_NAMED] + more)
        yield texts("verdict.limit_not_measured", names=listed, why=texts.said(clean(why))[0])


def _of_window(ns: int | None, window_ns: int) -> float:
    return (ns or 0) / window_ns if window_ns else 0.0


def _percent(share: float) -> str:
    return f"{shown(share, 'share')} %"
