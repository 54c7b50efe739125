"""What a reader must know first: two sentences with numbers, and what limits them."""

from __future__ import annotations

from nsysk3.report.blocks import Prose, Raw, Section
from nsysk3.report.sections.limits import limits
from nsysk3.report.text import clean, duration, shown
from nsysk3.report.view import View


def verdict(view: View) -> Section:
    """Two sentences, the limits of the numbers, and the analysis' findings in words."""
    # What is about the whole run comes before what is about one stage.
    sentences = sorted(view.document.sentences, key=lambda sentence: sentence.startswith(("stage ", "rank ")))
    said = [view.texts.said(clean(sentence)) for sentence in sentences]
    return view.section(
        "verdict",
        Raw("verdict", {"sentences": verdict_sentences(view), "long": False}),
        limits(view, view.texts("verdict.limits")),
        Prose(tuple(said), view.texts("ev.sentences")) if said else None,
    )


def verdict_sentences(view: View) -> list[str]:
    """At most two sentences from the medians and the pipeline."""
    texts, document = view.texts, view.document
    median = document.summary.get("median") or {}
    if not view.stable:
        reasons = {rank.reason for rank in document.ranks if rank.reason}
        return [texts("verdict.no_stable", reason=texts.said(clean(min(reasons, default="")))[0])]
    window = duration(median.get("window_ns"))
    if median.get("exposed_comm_share") is None:
        reason = document.not_measured.get("exposed_comm_share", texts("ui.no_reason"))
        return [texts("verdict.opaque", window=window, reason=texts.said(clean(reason))[0])]
    return [_communication(view, window), *_second(view)][:2]


def _communication(view: View, window: str) -> str:
    texts, median = view.texts, view.document.summary["median"]
    if not median["comm_ns"]:
        return texts("verdict.no_comm", window=window, compute=duration(median["compute_ns"]))
    exposed = _percent(median["exposed_comm_share"])
    if median.get("exposed_wait_ns") is None:
        reason = view.document.not_measured.get("exposed_wait_ns", texts("ui.no_reason"))
        return texts("verdict.exposed_unsplit", exposed=exposed, window=window, reason=texts.said(clean(reason))[0])
    return texts(
        "verdict.exposed", exposed=exposed, window=window, wait=duration(median["exposed_wait_ns"]),
        transfer=duration(median["exposed_transfer_ns"]),
    )  # fmt: skip


def _second(view: View) -> list[str]:
    """The pipeline where there is one of several stages, else the AllReduces."""
    texts, median = view.texts, view.document.summary["median"]
    rows = [row for row in view.rows("pipeline") if row["bubble_share"] is not None and row["rank"] in view.stable]
    if len({row["stage"] for row in rows}) > 1:
        rows.sort(key=lambda row: (row["bubble_share"], row["rank"]))
        low, high = rows[0], rows[-1]
        return [
            texts(
                "verdict.pipeline", low=_percent(low["bubble_share"]), high=_percent(high["bubble_share"]),
                low_rank=view.rank_name(low["rank"]), high_rank=view.rank_name(high["rank"]),
            )
        ]  # fmt: skip
    if median.get("allreduce_count"):
        return [
            texts(
                "verdict.allreduce", count=shown(median["allreduce_count"], "count"),
                total=duration(median["allreduce_total_ns"]), p50=duration(median["allreduce_p50_ns"]),
                overlap=_percent(median["overlap_ratio"]),
            )
        ]  # fmt: skip
    return []


def _percent(share: float) -> str:
    return f"{shown(share, 'share')} %"
