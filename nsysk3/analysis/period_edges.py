"""Where each layer begins and ends around its anchor."""

from __future__ import annotations

import numpy as np

from nsysk3.analysis.period_anchors import Anchors, Bools, Ints, Lane, usual_layers

# No layer known has more kernels on one side of its anchor.
_LONGEST = 512
_GRAM = 3
# Layers compared with the first of their forward: enough to know what is usual.
_SAMPLES = 512
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
    at = anchors.at
    opens, closes = _sides(anchors)
    before = np.concatenate(([0], at[:-1] + 1))
    after = np.concatenate((at[1:], [len(lane.symbol)]))
    shared = _shared_leads(lane, anchors, opens, before)
    told = shared >= 0
    if told.any():
        # As in most layers, and the least of several: what precedes one can by chance be what precedes the first.
        lead = -_mode(-shared[told])
        borders = _opened(lane, at[shared == lead] - lead)
    else:
        lead, borders = 0, _borders_by_ends(lane, anchors, closes, after)
    if not len(borders):
        return None
    start, usual = _starts(lane, anchors, before, borders)
    whole = np.bincount(anchors.forward) == usual_layers(anchors.forward)
    first = opens & whole[anchors.forward] & np.isin(anchors.kind, anchors.kind[told])
    start[first] = _opened(lane, (at - np.minimum(lead, usual))[first])
    start = np.maximum(start, before)
    end = np.where(closes, after, np.append(start[1:], 0))
    return start, np.where(closes, _ends(lane, anchors, end, closes), end)


def _shared_leads(lane: Lane, anchors: Anchors, opens: Bools, before: Ints) -> Ints:
    """For layers inside a forward, how many kernels ahead of the anchor are also ahead of the forward's first anchor.

    -1 for those that cannot be compared: another kind, or the forward that the capture may have cut.
    """
    at, forward = anchors.at, anchors.forward
    first = np.maximum.accumulate(np.where(opens, np.arange(len(at)), 0))
    pair = ~opens & (anchors.kind == anchors.kind[first]) & (forward > 0)
    chosen = np.flatnonzero(pair)
    chosen = (
        chosen[np.unique(np.linspace(0, max(len(chosen) - 1, 0), _SAMPLES).astype(np.int64))] if len(chosen) else chosen
    )
    shared: Ints = np.full(len(at), -1, np.int64)
    limit = np.minimum(at - before, (at - before)[first])[chosen]
    shared[chosen] = _common(lane.symbol, at[first[chosen]] - 1, at[chosen] - 1, limit, -1)
    return shared


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
    """How many symbols agree from each left and right position on, walking by step, up to limit."""
    walk = step * np.arange(min(int(limit.max(initial=0)), _LONGEST))
    a, b = left[:, None] + walk, right[:, None] + walk
    inside = (np.abs(walk) < limit[:, None]) & (np.minimum(a, b) >= 0) & (np.maximum(a, b) < len(symbol))
    a, b = (np.where(inside, each, 0) for each in (a, b))
    agree: Ints = np.logical_and.accumulate((symbol[a] == symbol[b]) & inside, axis=1).sum(axis=1)
    return agree


def _borders_by_ends(lane: Lane, anchors: Anchors, closes: Bools, after: Ints) -> Ints:
    """Positions of borders, by how far the last layer of a forward agrees with one inside it.

    A model's last layer is followed by a norm of the same name as those between layers, which is not its own.
    """
    at = anchors.at
    inner = _same_kind(anchors, closes, last=True)
    ends = closes & (inner >= 0)
    ends[-1] = False
    if not ends.any():
        return np.empty(0, np.int64)
    trailed = _common(lane.symbol, at[ends], at[inner[ends]], (after[inner] - at[inner])[ends], 1)
    length = _mode(trailed)
    borders = at[inner[ends]][trailed == length] + length
    for _ in range(_GRAM):
        borders = borders - lane.norm[borders - 1]
    return _opened(lane, borders)


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


def _starts(lane: Lane, anchors: Anchors, before: Ints, borders: Ints) -> tuple[Ints, Ints]:
    """First kernel of each layer by the names that follow most borders, and how far ahead of the anchor it usually is.

    The same names can occur elsewhere in a layer, so a place that is unusual for the kind is not taken.
    """
    at = anchors.at
    windows = np.lib.stride_tricks.sliding_window_view(lane.symbol, _GRAM)
    grams, counts = np.unique(windows[np.minimum(borders, len(windows) - 1)], axis=0, return_counts=True)
    seen = np.flatnonzero((windows == grams[np.argmax(counts)]).all(axis=1))
    found = seen[np.maximum(np.searchsorted(seen, at, side="right") - 1, 0)]
    good = (found >= before) & (found <= at)
    usual = np.zeros(len(at), np.int64)
    for kind in np.unique(anchors.kind):
        ahead = np.sort((at - found)[good & (anchors.kind == kind)])
        usual[anchors.kind == kind] = ahead[(len(ahead) - 1) // 2] if len(ahead) else 0
    good &= np.abs(at - found - usual) <= np.maximum(usual // 2, _GRAM)
    return np.where(good, found, at - usual), usual


def _ends(lane: Lane, anchors: Anchors, end: Ints, closes: Bools) -> Ints:
    """End of each layer that closes a forward.

    As far as it agrees with an earlier layer of its kind and forward; without one, up to the names that come before a
    border.
    """
    at = anchors.at
    found = _ends_by_names(lane, at, end, closes)
    inner = _same_kind(anchors, closes, last=True)
    like = closes & (inner >= 0)
    if not like.any():
        return found
    room, length = (end - at)[like], end[inner[like]] - at[inner[like]]
    trailed = _common(lane.symbol, at[like], at[inner[like]], np.minimum(length, room), 1)
    # Shorter than usual without being all of the other layer: noise inside.
    patched = np.maximum(trailed, np.minimum(_mode(trailed), room))
    found[like] = at[like] + np.where(trailed == length, trailed, patched)
    return found


def _ends_by_names(lane: Lane, at: Ints, end: Ints, closes: Bools) -> Ints:
    borders = end[~closes]
    if not len(borders):
        return end.copy()
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
