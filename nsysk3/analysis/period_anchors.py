"""Where layers and forwards repeat in a sequence of kernel names."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_MIN_ANCHORS = 4
# A lag is a period when names repeat at it this well, compared with the best lag.  Layers repeat less well than
# forwards, since every forward has a beginning and an end; the halves of a layer repeat far less well than layers.
_LAYER_AS_GOOD = 0.6
_FORWARD_AS_GOOD = 0.9
_MIN_MATCH = 0.5
# A name that recurs at the period this often needs no neighbours to tell it from others.
_STEADY = 0.8
# Names in more gaps than this are part of layers, whatever they do.
_RARE = 0.5
_RUNS_AGREE = 0.5
# In this share of the gaps of a phase, a name belongs to the phase.
_USUAL = 0.8
_DRAWS = 8


class Lane(NamedTuple):
    """Kernels of one rank in launch order.

    ``symbol``: the name, all norms alike.  ``attention``: 0, or which kind of attention the kernel is part of.
    ``separator``: lies between the attention of two layers (norm, reduction, expert).  ``once``: runs once in a
    forward (embedding, sampling, pipeline send or receive).  ``residual`` and ``norm``: what can open a layer.
    """

    symbol: Ints
    attention: Ints
    separator: Bools
    once: Bools
    residual: Bools
    norm: Bools


class Anchors(NamedTuple):
    """One position a layer: ``at`` in the lane, the ``kind`` of layer, and the number of its ``forward``."""

    at: Ints
    kind: Ints
    forward: Ints


def find_anchors(lane: Lane) -> Anchors | None:
    """Anchors of all layers, None where the sequence shows no forwards of several layers.

    The start of each layer's attention is its anchor where the names show attention; otherwise a run of names that
    recurs with the shortest period.  n log n.
    """
    at, kind = _attention_starts(lane)
    if len(at) < _MIN_ANCHORS:
        at = _recurring(lane.symbol)
        kind = np.zeros(len(at), np.int64)
    if len(at) < _MIN_ANCHORS:
        return None
    breaks = _breaks_by_role(lane, at)
    if breaks is None:
        breaks = _breaks_by_period(_names_in_gaps(lane, at))
    if breaks is None:
        return None
    return Anchors(at, kind, np.concatenate(([0], np.cumsum(breaks))))


def usual_layers(forward: Ints) -> int:
    """The number of layers that most forwards have, leaving out the first and last, which the capture may cut."""
    lengths = np.bincount(forward)
    inner = lengths[1:-1] if len(lengths) > 2 else lengths
    values, counts = np.unique(inner, return_counts=True)
    return int(values[::-1][np.argmax(counts[::-1])])


def _attention_starts(lane: Lane) -> tuple[Ints, Ints]:
    """First attention kernel after each separator."""
    at = np.flatnonzero(lane.attention)
    parted = np.cumsum(lane.separator)[at]
    first = np.concatenate(([True], parted[1:] > parted[:-1])) if len(at) else np.empty(0, bool)
    return at[first], lane.attention[at[first]]


def _recurring(symbol: Ints) -> Ints:
    """Positions of the name, or run of two or three names, that recurs most steadily at the shortest period."""
    period = shortest_period(_match_rate(symbol), 3, _LAYER_AS_GOOD)
    if period is None:
        return np.empty(0, np.int64)
    names = np.unique(symbol, return_inverse=True)[1]
    best, positions, grams = 0, np.empty(0, np.int64), np.zeros(len(names), np.int64)
    for length in (1, 2, 3):
        wider = grams[: len(names) - length + 1] * (names.max() + 1) + names[length - 1 :]
        grams = np.unique(wider, return_inverse=True)[1]
        order = np.argsort(grams, kind="stable")
        same = grams[order][1:] == grams[order][:-1]
        steady = same & (np.abs(np.diff(order) - period) * 4 <= period)
        score = np.bincount(grams[order][:-1], weights=np.where(steady, 1, np.where(same, -1, 0)))
        if score.max() > best:
            best = int(score.max())
            # Of equally steady ones, the one that comes first.
            chosen = grams[np.isin(grams, np.flatnonzero(score == best))][0]
            positions = np.flatnonzero(grams == chosen)
        if best * period >= _STEADY * len(symbol):
            break
    return positions


def _match_rate(symbol: Ints) -> NDArray[np.float64]:
    """By lag, the share of positions whose name recurs there, estimated with random phases a name and FFTs.

    Names times names would be quadratic; a draw's error is 1 / sqrt(n), and the draws are fixed.
    """
    count = len(symbol)
    names = np.unique(symbol, return_inverse=True)[1]
    size = 1 << (2 * count - 1).bit_length()
    total = np.zeros(count)
    random = np.random.default_rng(0)
    for _ in range(_DRAWS):
        phase = np.exp(2j * np.pi * random.random(names.max() + 1))[names]
        spectrum = np.fft.fft(phase, size)
        total += np.fft.ifft(spectrum * spectrum.conj()).real[:count]
    return total / _DRAWS / np.arange(count, 0, -1)


def shortest_period(rate: NDArray[np.float64], least: int, as_good: float) -> int | None:
    """The first lag from ``least`` to half the length with ``as_good`` times the best rate, None if no rate is good."""
    usable = rate[least : len(rate) // 2 + 1]
    if not len(usable) or usable.max() < _MIN_MATCH:
        return None
    return least + int(np.argmax(usable >= as_good * usable.max()))


def _names_in_gaps(lane: Lane, at: Ints) -> NDArray[np.float64]:
    """Gap x name: 1 where the name occurs between an anchor and the next; names in all gaps or in one are left out."""
    names = np.unique(lane.symbol, return_inverse=True)[1]
    present = np.zeros((len(at) - 1, names.max() + 1))
    inside = slice(at[0], at[-1])
    gap = np.searchsorted(at, np.arange(at[0], at[-1]), side="right") - 1
    present[gap, names[inside]] = 1
    share = present.sum(axis=0)
    return present[:, (share > 1) & (share < len(present))]


def _breaks_by_role(lane: Lane, at: Ints) -> Bools | None:
    """Gaps with a kernel that runs once in a forward, if most runs between them are equally long."""
    gap = np.searchsorted(at, np.flatnonzero(lane.once), side="right") - 1
    name = lane.symbol[lane.once]
    inside = (gap >= 0) & (gap < len(at) - 1)
    pairs = np.unique(np.stack([name[inside], gap[inside]]), axis=1)
    names, gaps_with = np.unique(pairs[0], return_counts=True)
    rare = np.isin(pairs[0], names[gaps_with <= _RARE * (len(at) - 1)])
    breaks = np.zeros(len(at) - 1, bool)
    breaks[pairs[1][rare]] = True
    if not breaks.any():
        return None
    forward = np.concatenate(([0], np.cumsum(breaks)))
    lengths = np.bincount(forward)
    usual = usual_layers(forward)
    agree = (lengths == usual).sum() >= max(_RUNS_AGREE * len(lengths), 2)
    return breaks if agree and usual > 1 else None


def _breaks_by_period(present: NDArray[np.float64]) -> Bools | None:
    """Gaps with names of their own, where the names that come and go do so every L gaps.

    A layer lost or added by noise shifts what comes after it, so the names decide where the breaks are, not the count.
    """
    gaps = len(present)
    votes = np.zeros(gaps + 1)
    for column in present.T:
        rate = _correlation(column)
        if period := shortest_period(rate, 2, _FORWARD_AS_GOOD):
            # A name seen twice is as good a witness as any that it recurs, but not of the period of all.
            votes[period] += np.sqrt(rate[period] * column.sum())
    if not votes.any():
        return None
    layers = int(np.argmax(votes))
    phase = np.arange(gaps) % layers
    share = np.stack([present[phase == each].mean(axis=0) for each in range(layers)])
    own = (share > _USUAL) & ((share > 1 - _USUAL).sum(axis=0) == 1)
    best = int(np.argmax(own.sum(axis=1)))
    if not own[best].any():
        return None
    breaks: Bools = present[:, own[best]].mean(axis=1) > 1 / 2
    return breaks


def _correlation(present: NDArray[np.float64]) -> NDArray[np.float64]:
    """By lag, how well where a name occurs predicts where it occurs again."""
    centred = present - present.mean()
    power = np.abs(np.fft.rfft(centred, 2 * len(present))) ** 2
    found: NDArray[np.float64] = np.fft.irfft(power)[: len(present)] / np.arange(len(present), 0, -1)
    return found / float((centred**2).mean())
