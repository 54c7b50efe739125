"""Hold runs against a base: comparability first, then every metric with its interval and verdict."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from nsysk3 import __version__
from nsysk3.compare.apart import forward_sources, with_apart
from nsysk3.compare.catalog import METRICS, Metric
from nsysk3.compare.comparability import comparability
from nsysk3.compare.labels import labels_of
from nsysk3.compare.model import Comparability, Comparison, Delta, Group, Row, RunSide, Scope, Step, Value
from nsysk3.compare.replaced import with_replaced
from nsysk3.compare.samples import WINDOW, RunSamples
from nsysk3.compare.statistics import (
    FEW_SAMPLES,
    MIN_SAMPLES,
    NO_BASE,
    NO_VALUE,
    ONE_RUN,
    ZERO_BASE,
    Floats,
    Samples,
    interval,
    judged,
    ratio_interval,
    replicates,
)
from nsysk3.compare.verdict import notes, row_note, verdict
from nsysk3.errors import InputError
from nsysk3.result import Result

SEED = 20260821
# Groups that say why a number per forward is missing, so that others need not.
_LED = ("headline", "forward")


def compare(
    base: Result,
    others: Result | Sequence[Result],
    labels: Sequence[str] | None = None,
    *,
    folders: Sequence[str] | None = None,
    seed: int = SEED,
) -> Comparison:
    """Hold ``others`` against ``base``, and each against the one before it (a ladder of PP degrees, in that order).

    ``labels`` name the runs, base first; the default are their PP degrees, where those do not tell them apart
    ``folders`` or the manifests' run ids.  Medians are over stable ranks; intervals are bootstrap 95 % intervals, the
    same for the same ``seed``.  Raises InputError for labels that do not fit, and without another run.
    """
    results = [base, *([others] if isinstance(others, Result) else others)]
    if len(results) < 2:
        raise InputError("a comparison needs a base and at least one other run")
    runs = [RunSamples(result) for result in results]
    names = labels_of(results, [run.layout.pp for run in runs], labels, folders)
    groups = _pair_groups(runs)
    pairs = [(0, index) for index in range(1, len(runs))]
    steps = [(index - 1, index) for index in range(1, len(runs))] if len(runs) > 2 else []

    def checked(one: int, two: int) -> Comparability:
        sides = ((names[i], results[i], runs[i].layout) for i in (one, two))
        return comparability(next(sides), next(sides), paired=groups[one] == groups[two])

    rows = [
        row
        for metric in METRICS
        for scope in metric.scopes
        if (row := _row(metric, scope, runs, names, groups, pairs, steps, seed)) is not None
    ]
    sides = [_side(name, run) for name, run in zip(names, runs, strict=True)]
    comparison = Comparison(
        nsysk3_version=__version__,
        base=sides[0],
        others=sides[1:],
        comparability=[checked(*pair) for pair in pairs],
        ladder=[Step(base=names[a], other=names[b], comparability=checked(a, b)) for a, b in steps],
        rows=rows,
        verdict=[],
        notes=notes(sides),
    )
    sources = {name: forward_sources(result) for name, result in zip(names, results, strict=True)}
    comparison = comparison.model_copy(update={"rows": with_apart(comparison, sources)})
    comparison = comparison.model_copy(update={"rows": with_replaced(comparison)})
    return comparison.model_copy(update={"verdict": verdict(comparison)})


def _pair_groups(runs: Sequence[RunSamples]) -> list[int]:
    """Runs of one group have the same layout and the same stable ranks: rank k is the same place in all of them."""
    keys: list[object] = []
    for index, run in enumerate(runs):
        layout = run.layout
        known = layout.pp is not None and layout.tp is not None
        keys.append((layout.pp, layout.tp, run.world_ranks) if known else index)
    return [keys.index(key) for key in keys]


def _row(
    metric: Metric,
    scope: Scope,
    runs: Sequence[RunSamples],
    names: Sequence[str],
    groups: Sequence[int],
    pairs: Sequence[tuple[int, int]],
    steps: Sequence[tuple[int, int]],
    seed: int,
) -> Row | None:
    found = [run.find(metric.name, scope) for run in runs]
    # What no run has for a reason that the first rows give needs no row of its own.
    led = scope == "1k_tokens" or (scope == "forward" and "window" in metric.scopes and metric.group not in _LED)
    if led and not any(found) and not any(run.parted(metric.name, scope) for run in runs):
        return None
    source, chosen = _common(found, runs)
    key = zlib.crc32(f"{metric.name}/{scope}".encode())
    drawn = [
        replicates(samples, rank_seed=(seed, key, 0, groups[i]), forward_seed=(seed, key, 1, i))
        if samples and not metric.shared
        else None
        for i, samples in enumerate(chosen)
    ]
    values = [
        _value(samples, drawn[i], "" if samples else runs[i].reason(metric.name, scope), bool(found[i]))
        for i, samples in enumerate(chosen)
    ]
    if metric.shared:
        values = [each.model_copy(update={"reason": ONE_RUN}) if each.n else each for each in values]

    def delta(one: int, two: int) -> Delta:
        degrees = {runs[one].layout.pp, runs[two].layout.pp}
        # Degrees that nobody knows may differ.
        alike = metric.apart is None or (len(degrees) == 1 and None not in degrees)
        return _delta((names[one], names[two]), (values[one], values[two]), (drawn[one], drawn[two]), alike)

    left = [f"{names[i]}: {why}" for i, each in enumerate(chosen) if each and (why := runs[i].left_out(each))]
    note = "; ".join([*([said] if (said := row_note(metric.name, scope, runs, names)) else []), *left]) or None
    deltas = [delta(*pair) for pair in pairs]
    laddered = [delta(*step) for step in steps]
    apart = not all(each.like_for_like for each in (*deltas, *laddered))
    alike: Group = "comm" if metric.group == "apart" else metric.group
    return Row(
        metric=metric.name, label=metric.label, unit=metric.unit, group="apart" if apart else alike, scope=scope,
        better=metric.better, samples=source, values=values, deltas=deltas, steps=laddered,
        why_apart=metric.apart if apart else None, note=note,
    )  # fmt: skip


def _common(found: Sequence[dict[str, Samples]], runs: Sequence[RunSamples]) -> tuple[str, list[Samples | None]]:
    """Samples of all runs taken from the same thing: the best that all have that have any, first of every rank."""
    having = [(run, each) for run, each in zip(runs, found, strict=True) if each]
    shared = [source for source in (having[0][1] if having else ()) if all(source in each for _, each in having)]
    if not shared:
        return WINDOW, [None for _ in found]
    whole = (source for source in shared if not any(run.left_out(each[source]) for run, each in having))
    source = next(whole, shared[0])
    return source, [each.get(source) for each in found]


def _value(samples: Samples | None, drawn: Floats | None, reason: str, other_kind: bool) -> Value:
    if samples is None or not samples.n:
        why = "the runs give it in different ways" if other_kind else reason
        return Value(value=None, low=None, high=None, ranks=0, forwards=0, n=0, reason=why)
    span = interval(drawn) if drawn is not None else None
    return Value(
        value=samples.median,
        low=span.low if span else None,
        high=span.high if span else None,
        ranks=int(np.count_nonzero(~np.isnan(samples.values).all(axis=1))),
        forwards=samples.values.shape[1] if samples.per_forward else 0,
        n=samples.n,
        reason=_doubt(samples, span is None) if span is None or samples.units < FEW_SAMPLES else None,
    )


def _doubt(samples: Samples, none: bool) -> str:
    unit = "forward" if samples.draws_forwards else "rank"
    number = f"{samples.units} {unit}{'s' if samples.units != 1 else ''}"
    if samples.units < MIN_SAMPLES:
        return f"{number}: an interval needs {MIN_SAMPLES}"
    return NO_VALUE if none else f"only {number}: the interval is rough, probably too narrow"


def _delta(
    labels: tuple[str, str], values: tuple[Value, Value], drawn: tuple[Floats | None, Floats | None], alike: bool
) -> Delta:
    one, two = values
    reasons = dict.fromkeys(f"{label}: {v.reason}" for label, v in zip(labels, values, strict=True) if v.reason)
    empty = dict.fromkeys(("change", "low", "high", "change_share", "low_share", "high_share"))
    made = {"base": labels[0], "other": labels[1], "like_for_like": alike, "reason": "; ".join(reasons) or None}
    if one.value is None or two.value is None:
        return Delta.model_validate({**made, **empty, "verdict": "not known"})
    span = share = None
    if drawn[0] is not None and drawn[1] is not None:
        span = interval(drawn[1] - drawn[0])
        share = ratio_interval(drawn[0], drawn[1]) if one.value > 0 else None
        if span and not share:
            made["reason"] = "; ".join([*reasons, ZERO_BASE if one.value > 0 else NO_BASE])
    return Delta(
        **made,
        change=two.value - one.value,
        low=span.low if span else None,
        high=span.high if span else None,
        change_share=two.value / one.value - 1 if one.value else None,
        low_share=share.low if share else None,
        high_share=share.high if share else None,
        verdict=judged(span),
    )


def _side(label: str, run: RunSamples) -> RunSide:
    document = run.result.document
    forwards, tokens = run.totals()
    gpus = sorted({rank.gpu_name for rank in document.ranks if rank.gpu_name})
    return RunSide(
        label=label,
        layout=run.layout,
        manifest=document.manifest is not None,
        simulated=document.simulated,
        window=document.window.used,
        window_reason=document.window.reason,
        stable_ranks=sum(rank.stable for rank in document.ranks),
        left_out=[f"rank {rank.world_rank}: {rank.reason}" for rank in document.ranks if not rank.stable],
        forwards=forwards,
        tokens=tokens,
        gpu_name=", ".join(gpus) or None,
        clock_uncertainty_ns=max(
            (entry.uncertainty_ns for entry in document.clock.reports if entry.uncertainty_ns is not None), default=None
        ),
    )
