"""What of the server's optional parts was asked for, is active, or fell back: read from its own log."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nsysk3.run.manifest import Feature

_RANK_MARK = re.compile(r"nsysk3\.rank .*? nsysk3=\S+ (?:sglang|engine)=\S+ markers=(\S*)")
_ABLE = re.compile(r"nsysk3 SP can run \((.*)\)\s*$", re.MULTILINE)
_MARKERS_OFF = re.compile(r"(nsysk3's markers are off in this process.*)$", re.MULTILINE)


@dataclass(frozen=True)
class _Words:
    """Log lines that tell of one switch: that it works, and that something else is used instead."""

    active: re.Pattern[str]
    fell_back: re.Pattern[str]


_SP = {
    "SGLANG_K3_SP_COLLECTIVE": _Words(
        re.compile(r"K3 SP collective enabled \(TP\d+", re.MULTILINE),
        re.compile(
            r"(K3 SP collective requires .*|K3 SP collective has no tuning table for .*|"
            r"K3 (?:fused )?pull RS input is not symmetric; using .*)$",
            re.MULTILINE,
        ),
    ),
    "SGLANG_K3_SP_ATTN_RES": _Words(
        re.compile(r"K3 SP attention-residual carry enabled", re.MULTILINE),
        re.compile(r"(K3 SP collective requires .*|K3 SP collective has no tuning table for .*)$", re.MULTILINE),
    ),
    "NSYSK3_SP": _Words(
        re.compile(r"(?!)"),  # it only says that it can; each call decides
        re.compile(r"(nsysk3 SP fell back: .*|nsysk3 SP is off: .*)$", re.MULTILINE),
    ),
}


def told(features: Iterable[Feature], logs: Sequence[str], *, pp: int) -> list[Feature]:
    """The features with what the logs of all nodes say of them.

    A log tells that a switch took effect, not that its kernels then ran: SGLang declines single calls without a word,
    which only the trace shows.  ``pp``: SGLang announces the carry of bank slices also where a pipeline turns it off.
    """
    text = "\n".join(logs)
    return [_told(feature, text, pp) for feature in features]


def _told(feature: Feature, text: str, pp: int) -> Feature:
    if feature.name == "NSYSK3_MARKERS":
        return _markers(feature, text)
    words = _SP.get(feature.name)
    if words is None:
        return feature
    declined = words.fell_back.search(text)
    if feature.name == "SGLANG_K3_SP_ATTN_RES" and pp > 1 and words.active.search(text):
        reason = "SGLang carries slices of the bank without a pipeline only, though it logs that the carry is enabled"
        return feature.model_copy(update={"active": False, "fell_back": True, "reason": reason})
    if words.active.search(text):
        partly = f"in part: {_line(declined[1])}" if declined else None
        return feature.model_copy(update={"active": True, "fell_back": bool(declined), "reason": partly})
    if declined:
        return feature.model_copy(update={"active": False, "fell_back": True, "reason": _line(declined[1])})
    if feature.name == "NSYSK3_SP" and (able := _ABLE.search(text)):
        reason = f"the server's log says that it can run ({_line(able[1])}); the trace shows which calls it took"
        return feature.model_copy(update={"active": None, "reason": reason})
    return feature.model_copy(update={"active": None, "reason": "the server's log says nothing of it"})


def _markers(feature: Feature, text: str) -> Feature:
    mark = _RANK_MARK.search(text)
    if mark and mark[1]:
        return feature.model_copy(update={"active": True, "fell_back": False, "reason": f"markers: {mark[1]}"})
    if off := _MARKERS_OFF.search(text):
        return feature.model_copy(update={"active": False, "fell_back": True, "reason": _line(off[1])})
    return feature.model_copy(
        update={"active": None, "reason": "the server's log says nothing of it; the trace holds nsysk3.* ranges if so"}
    )


def _line(text: str) -> str:
    return " ".join(text.split())[:400]
