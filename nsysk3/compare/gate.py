"""Thresholds for continuous integration: ``exposed_comm_share>+5%`` fails only when the whole interval lies beyond."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

from nsysk3.compare.catalog import BY_NAME, SCOPE_LABELS
from nsysk3.compare.model import Comparison, Delta, Outcome, Row, Scope, Value
from nsysk3.compare.statistics import NO_BASE, NO_VALUE
from nsysk3.errors import InputError

FAILED = 1
_UNITS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}
_SYNTAX = re.compile(
    r"\s*(?P<metric>\w+)\s*(?:/\s*(?P<scope>\w+)\s*)?(?P<side>[<>])\s*(?P<sign>[+-]?)\s*"
    r"(?P<number>\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+)\s*(?P<unit>%|ns|us|ms|s)?\s*"
)


@dataclass(frozen=True)
class Gate:
    """``METRIC[/SCOPE] > or < THRESHOLD``.

    ``of``: ``share`` for a relative change (``>+5%``), ``change`` for an absolute one (``>+2ms``), ``value`` for the
    number of the other run itself (``>0.3``, ``>400ms``; there % means hundredths).
    """

    text: str
    metric: str
    scope: Scope | None
    side: Literal["<", ">"]
    of: Literal["share", "change", "value"]
    threshold: float

    @classmethod
    def parse(cls, text: str) -> Gate:
        """Read an expression.  Raises InputError for one that cannot be understood or names no metric."""
        found = _SYNTAX.fullmatch(text)
        if not found:
            raise InputError(f"--fail-on {text!r}: not METRIC>THRESHOLD, such as 'allreduce_total_ns>+10%'")
        metric, scope, unit = found["metric"], found["scope"], found["unit"]
        if metric not in BY_NAME:
            raise InputError(f"--fail-on {text!r}: no metric {metric!r}; there are {', '.join(BY_NAME)}")
        if scope and scope not in BY_NAME[metric].scopes:
            raise InputError(f"--fail-on {text!r}: {metric} is compared per {', '.join(BY_NAME[metric].scopes)}")
        if unit in _UNITS and BY_NAME[metric].unit != "ns":
            raise InputError(f"--fail-on {text!r}: {metric} is not a time")
        if not unit and BY_NAME[metric].unit == "ns":
            raise InputError(f"--fail-on {text!r}: {metric} is a time: write ns, us, ms or s, or % for a change")
        if unit == "%" and not found["sign"] and BY_NAME[metric].unit != "share":
            raise InputError(f"--fail-on {text!r}: {found['number']}% of what? For a change write +{found['number']}%")
        size = float(found["number"]) * (0.01 if unit == "%" else _UNITS.get(unit, 1.0))
        if not math.isfinite(size):
            raise InputError(f"--fail-on {text!r}: the threshold is not a finite number")
        signed = bool(found["sign"])
        return cls(
            text=text.strip(),
            metric=metric,
            scope=cast("Scope | None", scope),
            side=cast("Literal['<', '>']", found["side"]),
            of="share" if signed and unit == "%" else "change" if signed else "value",
            threshold=-size if found["sign"] == "-" else size,
        )


def check(comparison: Comparison, gates: list[Gate]) -> list[Outcome]:
    """Every gate against every other run.  Undecided, which fails nothing, is a gate without an interval."""
    outcomes = []
    for gate in gates:
        row = comparison.row(gate.metric, gate.scope)
        if row is None:
            outcomes.append(_outcome(gate, gate.text, "undecided", "no such row in this comparison"))
            continue
        outcomes += [_judged(gate, row, d, v) for d, v in zip(row.deltas, row.values[1:], strict=True)]
    return outcomes


def _judged(gate: Gate, row: Row, delta: Delta, value: Value) -> Outcome:
    point, low, high = {
        "share": (delta.change_share, delta.low_share, delta.high_share),
        "change": (delta.change, delta.low, delta.high),
        "value": (value.value, value.low, value.high),
    }[gate.of]
    where = f"{gate.text}: {delta.other} against {delta.base} {SCOPE_LABELS[row.scope]}"
    found = {"base": delta.base, "other": delta.other, "scope": row.scope, "value": point, "low": low, "high": high}
    if delta.doubted:
        return _outcome(gate, where, "undecided", f"not like for like: {row.why_apart}", found=found)
    if point is None or low is None or high is None:
        # A base of 0 leaves no relative change to decide on, whatever else the samples lack.
        none = gate.of == "share" and delta.change is not None and point is None
        why = NO_BASE if none else delta.reason or value.reason or NO_VALUE
        return _outcome(gate, where, "undecided", why, found=found)
    beyond = low > gate.threshold if gate.side == ">" else high < gate.threshold
    middle, *ends = (_number(number, gate, row) for number in (point, low, high))
    numbers = f", {middle} (95 % interval {' to '.join(ends)})"
    apart = None if delta.like_for_like else "not like for like across PP degrees"
    return _outcome(gate, where, "failed" if beyond else "passed", apart, numbers, found=found)


def _outcome(
    gate: Gate,
    where: str,
    state: str,
    reason: str | None,
    numbers: str = "",
    *,
    found: Mapping[str, object] | None = None,
) -> Outcome:
    said = "" if reason is None else f"{';' if numbers else ','} {reason}"
    known = {**dict.fromkeys(("base", "other", "scope", "value", "low", "high")), **(found or {})}
    return Outcome.model_validate(
        {
            "gate": gate.text, "state": state, "reason": reason, "text": f"{where}: {state}{numbers}{said}",
            "metric": gate.metric, "of": gate.of, "side": gate.side, "limit": gate.threshold, **known,
        }
    )  # fmt: skip


def _number(number: float, gate: Gate, row: Row) -> str:
    sign = "+" if gate.of != "value" else ""
    if gate.of == "share":
        return f"{number:+.1%}"
    return f"{number / 1e6:{sign},.3f} ms" if row.unit == "ns" else f"{number:{sign},.4g}"
