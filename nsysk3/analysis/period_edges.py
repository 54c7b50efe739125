"""Where each layer begins and ends around its anchor."""

from __future__ import annotations

import numpy as np

from nsysk3.analysis.period_anchors import Anchors, Bools, Ints, Lane

# No layer known has more kernels on one side of its anchor.
_LONGEST = 512
_GRAM = 3
# Some layers write the attention-residual bank between the norm and what follows it.
_SKIPPED = 2


def layer_edges(lane: Lane, anchors: Anchors) -> tuple[Ints, Ints] | None:
    """First kernel of each layer and the one after its last, None where the border between layers cannot be told.

    Layers of one forward touch, and no name says where.  The ends of forwards do: the first layer of a forward holds
    what comes after the border and nothing before it, the last layer the other way round.  So the border is where the
    kernels before a layer inside a forward stop being those before a forward's first layer.  The names from there on
    are then looked for in every layer.  The kernels that prepare the opening norm (attention residual) go with it: a
    model's first layer has none, so what it lacks is no evidence.
    """
    at, opens, closes = anchors.at, *_sides(anchors)
    before = np.concatenate(([0], at[:-1] + 1))
    after = np.concatenate((at[1:], [len(lane.symbol)]))
    inner = np.where(opens, _same_kind(anchors, opens, last=False), -1)
    led = _common(lane.symbol, at - 1, np.where(inner >= 0, at[inner] - 1, -1), at - before, -1)
    starts = opens & (inner >= 0) & (anchors.forward > 0)
    border = _border(lane, anchors, led, inner, starts, after)
    if border is None:
        return None
    start, full = _starts(lane, anchors, before, border)
    least = _mode(led[starts]) if starts.any() else 0
    mine = opens & (inner >= 0)
    start[mine] = _opened(lane, (at - np.minimum(np.maximum(led, least), full))[mine])
    start = np.maximum(start, before)
    end = np.where(closes, after, np.append(start[1:], 0))
    return start, np.where(closes, _ends(lane, anchors, start, end, closes), end)


def _sides(anchors: Anchors) -> tuple[Bools, Bools]:
    """Anchors that open and that close a forward."""
    change = anchors.forward[1:] > anchors.forward[:-1]
    return np.concatenate(([True], change)), np.concatenate((change, [True]))


def _same_kind(anchors: Anchors, excluded: Bools, *, last: bool) -> Ints:
    """For each anchor, the first (or last) anchor of its forward and kind that is not excluded, -1 for none."""
    group = anchors.forward * (anchors.kind.max() + 1) + anchors.kind
    found: Ints = np.full(int(group.max()) + 1, -1, np.int64)
    chosen = np.flatnonzero(~excluded)
    # The last assignment to an index wins.
    chosen = chosen if last else chosen[::-1]
    found[group[chosen]] = chosen
    same: Ints = found[group]
    return same


def _common(symbol: Ints, left: Ints, right: Ints, limit: Ints, step: int) -> Ints:
    """How many symbols agree from each left and right position on, walking by step, up to limit; 0 from position -1."""
    wanted = right >= 0
    walk = step * np.arange(min(int(limit[wanted].max(initial=0)), _LONGEST))
    a, b = left[wanted, None] + walk, right[wanted, None] + walk
    inside = (np.abs(walk) < limit[wanted, None]) & (np.minimum(a, b) >= 0) & (np.maximum(a, b) < len(symbol))
    a, b = (np.where(inside, each, 0) for each in (a, b))
    found = np.zeros(len(left), np.int64)
    found[wanted] = np.logical_and.accumulate((symbol[a] == symbol[b]) & inside, axis=1).sum(axis=1)
    return found


def _border(lane: Lane, anchors: Anchors, led: Ints, inner: Ints, starts: Bools, after: Ints) -> int | None:
    """Position of one border inside a forward."""
    at = anchors.at
    if starts.any():
        length = _mode(led[starts])
        example = np.flatnonzero(starts & (led == length))[0]
        return int(_opened(lane, at[inner[example]] - length))
    # No layer is like the one that opens a forward: take what follows the last anchor instead.
    closes = _sides(anchors)[1]
    closes[-1] = False
    inner = _same_kind(anchors, _sides(anchors)[1], last=True)
    ends = closes & (inner >= 0)
    if not ends.any():
        return None
    trailed = _common(lane.symbol, at, np.where(ends, at[inner], -1), after[inner] - at[inner], 1)
    length = _mode(trailed[ends])
    example = np.flatnonzero(ends & (trailed == length))[0]
    # A model's last layer is followed by a norm of the same name as those between layers.
    border = int(at[inner[example]] + length)
    while border > 0 and lane.norm[border - 1]:
        border -= 1
    return int(_opened(lane, np.array(border)))


def _opened(lane: Lane, position: Ints) -> Ints:
    """Positions moved ahead of the attention-residual kernels, and their norm, that end there or a few kernels earlier.

    Attention residual prepares the input of what follows it, so it never ends a layer.  Norms alone do not move a
    position: some models norm a layer's output.
    """
    count = len(lane.norm)
    member = lane.norm | lane.residual
    first = np.concatenate(([0], np.maximum.accumulate(np.where(member, 0, np.arange(1, count + 1)))))
    residuals = np.concatenate(([0], np.cumsum(lane.residual)))
    moved = np.where(residuals > residuals[first], first, np.arange(count + 1))
    result = position
    for back in range(_SKIPPED, -1, -1):
        earlier = np.maximum(position - back, 0)
        result = np.where(moved[earlier] < earlier, moved[earlier], result)
    return result


def _starts(lane: Lane, anchors: Anchors, before: Ints, border: int) -> tuple[Ints, Ints]:
    """First kernel of each layer by the names that follow the border, and how far ahead of the anchor its kind begins.

    The same names can occur elsewhere in a layer, so a place that is unusual for the kind is not taken.
    """
    at = anchors.at
    gram = lane.symbol[border : border + _GRAM]
    windows = np.lib.stride_tricks.sliding_window_view(lane.symbol, len(gram))
    seen = np.flatnonzero((windows == gram).all(axis=1))
    found = seen[np.maximum(np.searchsorted(seen, at, side="right") - 1, 0)]
    good = (found >= before) & (found <= at)
    usual = np.zeros(len(at), np.int64)
    for kind in np.unique(anchors.kind):
        usual[anchors.kind == kind] = _mode((at - found)[good & (anchors.kind == kind)])
    good &= np.abs(at - found - usual) <= np.maximum(usual // 2, _GRAM)
    return np.where(good, found, at - usual), usual


def _ends(lane: Lane, anchors: Anchors, start: Ints, end: Ints, closes: Bools) -> Ints:
    """End of each layer that closes a forward.

    As far as it agrees with an earlier layer of its kind and forward; without one, up to the names that come before a
    border.
    """
    at = anchors.at
    inner = _same_kind(anchors, closes, last=True)
    length = np.where(inner >= 0, end[inner] - at[inner], 0)
    like = closes & (inner >= 0)
    trailed = _common(lane.symbol, at, np.where(like, at[inner], -1), np.minimum(length, end - at), 1)
    usual = _mode(trailed[like]) if like.any() else 0
    # Shorter than usual without being all of the other layer: noise inside.
    by_layer = at + np.where(trailed == length, trailed, np.maximum(trailed, np.minimum(usual, end - at)))
    return np.where(like, by_layer, _ends_by_names(lane, at, start, end, closes))


def _ends_by_names(lane: Lane, at: Ints, start: Ints, end: Ints, closes: Bools) -> Ints:
    borders = end[~closes]
    if not len(borders):
        return end
    pairs = np.stack([lane.symbol[np.maximum(borders - 2, 0)], lane.symbol[borders - 1]], axis=1)
    names, counts = np.unique(pairs, axis=0, return_counts=True)
    pair = names[np.argmax(counts)]
    seen = np.flatnonzero((lane.symbol[:-1] == pair[0]) & (lane.symbol[1:] == pair[1])) + 2
    first = np.searchsorted(seen, at, side="right")
    usual = _mode((np.searchsorted(seen, end, side="right") - first)[~closes])
    index = first + max(usual, 1) - 1
    ends: Ints = np.minimum(np.append(seen, len(lane.symbol))[np.minimum(index, len(seen))], end)
    return ends


def _mode(values: Ints) -> int:
    """Most frequent value, the largest of several; 0 without any."""
    if not len(values):
        return 0
    found, counts = np.unique(values, return_counts=True)
    return int(found[::-1][np.argmax(counts[::-1])])
