"""Which send and which receive of one channel are the two sides of a message, though some of either were lost."""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from nsysk3.analysis.sequences import nearest

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

# A message this large is an activation; NCCL buffers small ones, so their ends need not coincide.
ACTIVATION_BYTES = 1024 * 1024
# Without bytes: a hand-over that takes both sides this long moves real data.
LONG_NS = 50_000
# How far apart the two ends of one message lie at most: 85 us between two H200 of one host.
SCATTER_NS = 200_000
_MAX_SKIP = 64


class _Messages:
    """Sends and receives of one channel, each in order, on the common clock."""

    def __init__(self, sends: pl.DataFrame, recvs: pl.DataFrame, doubt: int) -> None:
        self.start, self.sent = sends["s"].to_numpy(), sends["e"].to_numpy()
        self.began, self.got = recvs["s"].to_numpy(), recvs["e"].to_numpy()
        self.doubt = doubt
        self.met = nearest(self.sent, self.got, SCATTER_NS + doubt)
        self.size = sends["bytes"][0]
        # A direction taken from rank order may be the wrong way round.
        self.directed = sends["channel_source"][0] != "order"
        # Large messages end together, unless NCCL's buffers hold even these.
        large = self.size is not None and self.size >= ACTIVATION_BYTES
        self.together = large and 2 * int((self.met >= 0).sum()) >= min(len(self.sent), len(self.got))

    def shifted(self, skip: int) -> tuple[Ints, Ints]:
        """Indices of sends and receives in order, the first ``skip`` sends (or, negative, receives) left out."""
        first, other = max(skip, 0), max(-skip, 0)
        count = np.arange(min(len(self.sent) - first, len(self.got) - other))
        return count + first, count + other

    def causal(self, mine: Ints, theirs: Ints) -> Bools:
        """No receive ends before its send begins."""
        causal: Bools = self.got[theirs] + self.doubt + 1_000 >= self.start[mine]
        return causal

    def agree(self, mine: Ints, theirs: Ints) -> Bools:
        """Whether two kernels can be the two sides of one message.

        They end together; or the message was buffered: a short send is over before its receive, which takes what is
        there at once.  A receive that was not late and yet went on belongs to a later send.
        """
        sent, got = self.sent[mine], self.got[theirs]
        reach = SCATTER_NS + self.doubt
        together: Bools = np.abs(got - sent) <= reach
        if self.directed:
            together &= self.causal(mine, theirs)
        if self.together:
            return together
        early = np.where(sent <= got, sent - self.start[mine], got - self.began[theirs])
        short = early <= (LONG_NS if self.size is None else SCATTER_NS)
        at_once = np.maximum(sent, got) - np.maximum(self.start[mine], self.began[theirs]) <= reach
        buffered = short & at_once
        if self.directed:
            buffered &= self.causal(mine, theirs)
        together |= buffered
        return together


def in_order(sends: pl.DataFrame, recvs: pl.DataFrame, doubt: int) -> tuple[Ints, Ints]:
    """Indices of the sends and receives that belong together: none that the times contradict.

    One message lost on one side makes all later ones slip; a pair that does not agree is therefore no pair.
    """
    channel = _Messages(sends, recvs, doubt)
    low, high = -min(recvs.height - 1, _MAX_SKIP), min(sends.height - 1, _MAX_SKIP)
    mine, theirs = channel.shifted(min(range(low, high + 1), key=lambda skip: _cost(channel, skip)))
    good = channel.agree(mine, theirs)
    if good.all():
        return mine, theirs
    anchored = _around_anchors(channel)
    return anchored if len(anchored[0]) >= good.sum() else (mine[good], theirs[good])


def _cost(channel: _Messages, skip: int) -> tuple[float, float]:
    mine, theirs = channel.shifted(skip)
    broken = float((~channel.causal(mine, theirs)).mean())
    apart = float(np.median(np.abs(channel.got[theirs] - channel.sent[mine])))
    missing = len(channel.sent) + len(channel.got) - 2 * len(mine)
    # An offset must not be bought by leaving most messages out.
    return round(broken, 2), apart * (1 + 4 * missing / (len(mine) + missing))


def _around_anchors(channel: _Messages) -> tuple[Ints, Ints]:
    """Pairs whose ends coincide, and between them, where both sides show as many, those that agree in order."""
    at = channel.met
    anchors = np.flatnonzero(at >= 0)
    mine, theirs = [anchors], [at[anchors]]
    edges = np.concatenate(([-1], anchors, [len(channel.sent)]))
    other = np.concatenate(([-1], at[anchors], [len(channel.got)]))
    equal = (np.diff(edges) == np.diff(other)) & (np.diff(edges) > 1)
    for gap in np.flatnonzero(equal):
        mine.append(np.arange(edges[gap] + 1, edges[gap + 1]))
        theirs.append(np.arange(other[gap] + 1, other[gap + 1]))
    m, t = np.concatenate(mine), np.concatenate(theirs)
    good = channel.agree(m, t)
    order = np.argsort(m[good], kind="stable")
    return m[good][order], t[good][order]
