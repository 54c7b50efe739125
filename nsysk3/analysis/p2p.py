"""Pair the sends and receives of pipeline boundaries over ranks, and split them into waiting and transfer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import polars as pl
from numpy.typing import NDArray

from nsysk3.analysis.clocks import Clocks, Observations
from nsysk3.analysis.collectives import matched_ends, observe_ends
from nsysk3.analysis.message_order import ACTIVATION_BYTES, LONG_NS, SCATTER_NS, in_order
from nsysk3.analysis.sequences import estimate_shift, nearest

Ints = NDArray[np.int64]

# A message this small is a result (sampled tokens).
RESULT_BYTES = 64 * 1024


def sides(comm: pl.DataFrame, ranks: pl.DataFrame, stages: int = 0, *, whole: bool = True) -> pl.DataFrame:
    """Send and receive halves of P2P kernels, each with the channel it belongs to.

    Columns: ``event``, ``rank``, ``report``, ``start``, ``end``, ``dur``, ``send`` (bool), ``src``, ``dst`` (ranks),
    ``bytes``, ``channel_source``.  The peer is the payload's peer rank in its communicator; where there is no payload
    it is inferred by whose kernels end together.  A half whose peer stays unknown has a null ``src`` or ``dst``.
    ``stages``: how many there are, seen or not; 0 where nobody says.  ``whole``: no rank is missing, as far as anybody
    knows; with one missing nobody is taken for a neighbour whose stage is not known.
    """
    halves = _halves(comm.filter(pl.col("role") == "p2p"))
    if halves.is_empty():
        return halves.with_columns(
            pl.lit(None, pl.Int32).alias("src"), pl.lit(None, pl.Int32).alias("dst"),
            pl.lit(None, pl.String).alias("channel_source"),
        )  # fmt: skip
    peers = pl.concat([_payload_peers(halves, ranks), _inferred_peers(halves, _places(comm, ranks), stages, whole)])
    # A channel named by a payload wins over one that was inferred.
    peers = peers.unique(["rank", "comm", "stream", "send", "peer"], keep="first", maintain_order=True)
    joined = halves.join(peers, on=["rank", "comm", "stream", "send", "peer"], how="left", nulls_equal=True)
    joined = joined.with_columns(
        pl.when(pl.col("send").is_null()).then(pl.lit("order")).otherwise("channel_source").alias("channel_source"),
        pl.coalesce("send", pl.col("rank") < pl.col("other"), pl.lit(False)).alias("send"),
    )
    src = pl.when("send").then("rank").otherwise("other")
    dst = pl.when("send").then("other").otherwise("rank")
    return joined.with_columns(src.alias("src"), dst.alias("dst"))


def _halves(kernels: pl.DataFrame) -> pl.DataFrame:
    common = ["event", "rank", "report", "stream", "start", "end", "dur", "comm", "peer"]
    sends = kernels.filter(pl.col("n_sends") > 0).select(
        *common, pl.lit(True).alias("send"), pl.col("send_bytes").alias("bytes")
    )
    recvs = kernels.filter(pl.col("n_recvs") > 0).select(
        *common, pl.lit(False).alias("send"), pl.col("recv_bytes").alias("bytes")
    )
    # A kernel without its call goes the way of those on its stream, when these all go one way.
    gives, takes = ((pl.col(name) > 0).max().over("rank", "stream") for name in ("n_sends", "n_recvs"))
    unknown = kernels.with_columns(pl.when(gives != takes).then(gives).alias("send"))
    unknown = unknown.filter(pl.col("n_sends").is_null()).select(*common, "send", pl.lit(None, pl.Int64).alias("bytes"))
    return pl.concat([sends, recvs, unknown]).sort("rank", "end", "event")


def _payload_peers(halves: pl.DataFrame, ranks: pl.DataFrame) -> pl.DataFrame:
    """Peer rank numbers of communicators as ranks of the run.

    Members are in stage order where stages are known, else in rank order: NCCL numbers them as the group was listed.
    A communicator with a member missing from the run names nobody: the numbering slips.
    """
    world = ranks.select("rank", pl.coalesce("pp_rank", "world_rank").alias("place"), "world_rank")
    members = halves.filter(pl.col("comm").is_not_null()).select("comm", "rank").unique().join(world, on="rank")
    members = members.sort("comm", "place", "world_rank").with_columns(
        pl.int_range(pl.len()).over("comm").cast(pl.Int64).alias("peer")
    )
    wanted = halves.filter(pl.col("comm").is_not_null() & pl.col("peer").is_not_null() & ~_short(halves))
    found = (
        wanted.select("rank", "comm", "stream", "send", "peer")
        .unique()
        .join(members.select("comm", "peer", pl.col("rank").alias("other")), on=["comm", "peer"])
        .filter(pl.col("other") != pl.col("rank"))
    )
    return found.with_columns(pl.lit("payload").alias("channel_source"))


def _short(halves: pl.DataFrame) -> pl.Expr:
    """Is a half of a communicator that has peers with higher numbers than there are members?"""
    sizes = halves.group_by("comm").agg(pl.col("rank").n_unique().alias("members"), pl.col("peer").max())
    short = sizes.filter(pl.col("comm").is_not_null() & (pl.col("peer") >= pl.col("members")))["comm"]
    return pl.col("comm").is_in(short.implode()).fill_null(False)


def _places(comm: pl.DataFrame, ranks: pl.DataFrame) -> dict[int, tuple[object, int | None]]:
    """Rank to its stage (as good as any: what it reduces with, where no source names stages) and its TP rank."""
    reduced = comm.filter((pl.col("role") == "allreduce") & pl.col("group").is_not_null())
    group = dict(reduced.select("rank", "group").unique("rank", keep="first").iter_rows())
    known = ranks["pp_rank"].null_count() == 0
    return {
        rank: (stage if known else group.get(rank, f"rank {rank}"), tp)
        for rank, stage, tp in ranks.select("rank", "pp_rank", "tp_rank").iter_rows()
    }


def _inferred_peers(
    halves: pl.DataFrame, places: Mapping[int, tuple[object, int | None]], stages: int, whole: bool
) -> pl.DataFrame:
    """For each (rank, stream, direction) without a payload peer, the opposite one whose kernels end with its own.

    All ranks of two stages hand over at once: a peer is never of the own stage, and it has the same TP rank.  Where the
    number of stages is known, what one sends the next one receives, and the first one what the last sends: with a stage
    missing from the run, those around it keep to one beat too.
    """
    unnamed = halves.filter(pl.col("comm").is_null() | pl.col("peer").is_null())
    keys: list[tuple[int, int | None, int, bool | None, int | None, int]] = []
    ends: list[Ints] = []
    groups = unnamed.group_by("rank", "comm", "stream", "send", "peer", "report", maintain_order=True)
    for key, rows in groups:
        keys.append(key)
        ends.append(rows["end"].to_numpy())
    scored: list[tuple[float, int, int]] = []
    for i, one in enumerate(keys):
        for j, other in enumerate(keys):
            opposite = (one[3] is True and other[3] is False) or (one[3] is None and other[3] is None and i < j)
            (stage, tp), (other_stage, other_tp) = places[one[0]], places[other[0]]
            alike = tp == other_tp or tp is None or other_tp is None
            steps = _steps(stage, other_stage, stages)
            near = whole if steps is None else steps == 1 or (one[3] is None and steps == stages - 1)
            if opposite and stage != other_stage and alike and near:
                score = _ends_together(ends[i], ends[j], one[5] == other[5])
                if score > 0:
                    scored.append((score + (tp == other_tp), i, j))
    taken: set[int] = set()
    links = []
    for _, i, j in sorted(scored, key=lambda item: (-item[0], item[1], item[2])):
        if i not in taken and j not in taken:
            taken |= {i, j}
            links += [(*keys[i][:5], keys[j][0]), (*keys[j][:5], keys[i][0])]
    schema = {
        "rank": pl.Int32, "comm": pl.Int64, "stream": pl.Int64, "send": pl.Boolean, "peer": pl.Int64, "other": pl.Int32,
    }  # fmt: skip
    frame = pl.DataFrame(links, schema=schema, orient="row")
    return frame.with_columns(pl.lit("inferred").alias("channel_source"))


def _steps(stage: object, other: object, stages: int) -> int | None:
    """How many stages on the other one is, None where that is not known."""
    return (other - stage) % stages if stages and isinstance(stage, int) and isinstance(other, int) else None


def _ends_together(a: Ints, b: Ints, one_clock: bool) -> float:
    """Share of the shorter sequence whose ends coincide with the other's; 0 when that is less than half."""
    delta = 0
    if not one_clock:
        shift = estimate_shift(a, b)
        if shift is None:
            return 0.0
        delta = shift.delta_ns
    met = float((nearest(a + delta, b, SCATTER_NS) >= 0).sum()) / min(len(a), len(b))
    return met if met >= 0.5 else 0.0


def observe_p2p(halves: pl.DataFrame) -> dict[tuple[int, int], list[Observations]]:
    """Clock differences between reports from their boundaries.

    The two ends of a large message nearly coincide.  A small one is buffered, and tells only that it cannot have been
    received before it was sent: over both directions that bounds the offset from both sides.
    """
    found: dict[tuple[int, int], list[Observations]] = {}
    known = halves.filter(pl.col("src").is_not_null() & pl.col("dst").is_not_null())
    crossing: dict[tuple[int, int], list[pl.DataFrame]] = {}
    for _, part in known.group_by("src", "dst", "bytes", maintain_order=True):
        source, target = (part.filter(pl.col("send") == side)["report"] for side in (True, False))
        if len(source) and len(target) and source[0] != target[0]:
            crossing.setdefault((source[0], target[0]), []).append(part)
    for (a, b), channels in sorted(crossing.items()):
        for seen in _observe_direction(channels):
            if a > b:
                seen = Observations(seen.time_ns + seen.delta_ns, -seen.delta_ns, -seen.high_ns, -seen.low_ns)
            found.setdefault((min(a, b), max(a, b)), []).append(seen)
    return found


def _observe_direction(channels: Sequence[pl.DataFrame]) -> list[Observations]:
    """What the messages from one report to another say, by channel.

    A short window holds two or three messages a channel, too few to tell which belong together, so the offset is first
    looked for in the large ones of all channels at once.
    """
    sides = [tuple(part.filter(pl.col("send") == side).sort("start") for side in (True, False)) for part in channels]
    large = [_is_large(part) for part in channels]
    ends = [tuple(half["end"].to_numpy() for half in both) for both in sides]
    used = [both for both, is_large in zip(ends, large, strict=True) if is_large]
    shift = estimate_shift(_moments([sent for sent, _ in used]), _moments([got for _, got in used]))
    found = []
    for (sends, recvs), (sent, got), is_large in zip(sides, ends, large, strict=True):
        seen = None
        if is_large:
            seen = observe_ends(sent, got) if shift is None else matched_ends(sent, got, shift)
        seen = seen or _causal(sends, recvs)
        if seen is not None:
            found.append(seen)
    return found


def _is_large(part: pl.DataFrame) -> bool:
    size, middle = part["bytes"][0], part["dur"].median()
    if size is not None:
        return bool(size >= ACTIVATION_BYTES)
    return isinstance(middle, float) and middle > LONG_NS


def _causal(sends: pl.DataFrame, recvs: pl.DataFrame) -> Observations | None:
    """The most by which the receiver's clock can be ahead; only where both sides show as many messages."""
    if sends.height != recvs.height:
        return None
    none = np.empty(0, np.int64)
    return Observations(none, none, high_ns=float((recvs["end"].to_numpy() - sends["start"].to_numpy()).min()))


def _moments(ends: Sequence[Ints]) -> Ints:
    """Ends of all channels as moments: the ranks of a stage hand over together."""
    every = np.sort(np.concatenate([np.empty(0, np.int64), *ends]))
    first: Ints = every[np.diff(every, prepend=-(2**62)) > SCATTER_NS]
    return first


def match_p2p(halves: pl.DataFrame, clocks: Clocks) -> pl.DataFrame:
    """One row a pair: the columns of p2p.parquet, with ``send_event`` and ``recv_event``.

    Messages of one channel arrive in order.  The offset between the two orders (captures start at different messages)
    is the one at which ends coincide without a receive ending before its send began; where that leaves pairs whose
    times contradict each other (a kernel was lost, or its call), the ends that coincide split the channel, between them
    only equal counts are paired, and what still does not agree stays without a partner.
    """
    report = halves["report"].to_numpy()
    table = halves.with_columns(
        pl.Series("s", clocks.corrected(halves["start"].to_numpy(), report)),
        pl.Series("e", clocks.corrected(halves["end"].to_numpy(), report)),
    )
    known = table.filter(pl.col("src").is_not_null() & pl.col("dst").is_not_null())
    pairs = [_pair_schema()]
    for _, part in known.group_by("src", "dst", "bytes", maintain_order=True):
        sends, recvs = part.filter("send").sort("s"), part.filter(~pl.col("send")).sort("s")
        if sends.is_empty() or recvs.is_empty():
            continue
        doubt = float(clocks.between[sends["report"][0], recvs["report"][0]])
        if not np.isfinite(doubt):
            continue
        mine, theirs = in_order(sends, recvs, int(doubt))
        if len(mine):
            pairs.append(_paired(sends[mine], recvs[theirs], int(doubt)))
    table = pl.concat(pairs)
    return _kinds(table).sort("src_rank", "dst_rank", "send_start_utc_ns", "recv_start_utc_ns")


def _paired(sends: pl.DataFrame, recvs: pl.DataFrame, doubt: int) -> pl.DataFrame:
    left = sends.select(
        pl.col("event").cast(pl.Int64).alias("send_event"), pl.col("src").alias("src_rank"),
        pl.col("dst").alias("dst_rank"), "bytes", pl.col("s").alias("send_start_utc_ns"),
        pl.col("e").alias("send_end_utc_ns"), pl.col("dur").alias("send_dur"), "channel_source",
    )  # fmt: skip
    right = recvs.select(
        pl.col("event").cast(pl.Int64).alias("recv_event"), pl.col("s").alias("recv_start_utc_ns"),
        pl.col("e").alias("recv_end_utc_ns"), pl.col("dur").alias("recv_dur"),
    )  # fmt: skip
    both = pl.concat([left, right], how="horizontal")
    ahead = pl.col("recv_start_utc_ns") - pl.col("send_start_utc_ns")
    return both.with_columns(
        ahead.clip(0, pl.col("send_dur")).alias("send_wait_ns"),
        (-ahead).clip(0, pl.col("recv_dur")).alias("recv_wait_ns"),
        pl.lit(doubt, pl.Int64).alias("uncertainty_ns"),
    ).select(
        "send_event", "recv_event", "src_rank", "dst_rank", "bytes",
        pl.int_range(pl.len(), dtype=pl.Int64).alias("seq"),
        "send_start_utc_ns", "send_end_utc_ns", "recv_start_utc_ns", "recv_end_utc_ns",
        "send_wait_ns", (pl.col("send_dur") - pl.col("send_wait_ns")).alias("send_transfer_ns"),
        "recv_wait_ns", (pl.col("recv_dur") - pl.col("recv_wait_ns")).alias("recv_transfer_ns"),
        "uncertainty_ns",
        pl.when(pl.col("channel_source") == "payload").then(pl.lit("high"))
        .when(pl.col("channel_source") == "order").then(pl.lit("low")).otherwise(pl.lit("medium")).alias("confidence"),
    )  # fmt: skip


def _pair_schema() -> pl.DataFrame:
    times = ("send_start_utc_ns", "send_end_utc_ns", "recv_start_utc_ns", "recv_end_utc_ns")
    splits = ("send_wait_ns", "send_transfer_ns", "recv_wait_ns", "recv_transfer_ns", "uncertainty_ns")
    return pl.DataFrame(
        schema={
            "send_event": pl.Int64, "recv_event": pl.Int64, "src_rank": pl.Int32, "dst_rank": pl.Int32,
            "bytes": pl.Int64, "seq": pl.Int64, **dict.fromkeys((*times, *splits), pl.Int64), "confidence": pl.String,
        }
    )  # fmt: skip


def _kinds(pairs: pl.DataFrame) -> pl.DataFrame:
    """``kind``: activation (hidden states and the residual bank), result (sampled tokens) or other."""
    both = pl.min_horizontal("send_transfer_ns", "recv_transfer_ns")
    kind = (
        pl.when(pl.col("bytes") >= ACTIVATION_BYTES).then(pl.lit("activation"))
        .when(pl.col("bytes") <= RESULT_BYTES).then(pl.lit("result"))
        .when(pl.col("bytes").is_not_null()).then(pl.lit("other"))
        .when(both >= LONG_NS).then(pl.lit("activation"))
        .otherwise(pl.lit("result"))
    )  # fmt: skip
    return pairs.with_columns(kind.alias("kind"))


def waits_of(pairs: pl.DataFrame) -> pl.DataFrame:
    """Per P2P kernel: ``event``, ``wait_ns``, ``wait_state``.

    A send that spins for its receiver waits downstream (back-pressure), a receive that spins for its sender upstream; a
    wait below the clock uncertainty is ``unresolved``.  A kernel that does both waits as long as the longer.
    """
    parts = [_half_wait(pairs, "send", "wait_downstream"), _half_wait(pairs, "recv", "wait_upstream")]
    longest = pl.concat(parts).sort("wait_ns", descending=True)
    return longest.unique("event", keep="first", maintain_order=True).sort("event")


def _half_wait(pairs: pl.DataFrame, half: str, state: str) -> pl.DataFrame:
    wait = pl.col(f"{half}_wait_ns")
    below = (wait > 0) & (wait < pl.col("uncertainty_ns"))
    return pairs.select(
        pl.col(f"{half}_event").alias("event"),
        wait.alias("wait_ns"),
        pl.when(below).then(pl.lit("unresolved")).otherwise(pl.lit(state)).alias("wait_state"),
    )


def unmatched(halves: pl.DataFrame, pairs: pl.DataFrame) -> pl.DataFrame:
    """Halves that found no partner: ``rank``, ``send``, ``count``, ``total_ns``, ``reason``."""
    used: Iterable[pl.Series] = (pairs["send_event"], pairs["recv_event"])
    paired = pl.concat([pl.DataFrame({"event": s}) for s in used]).unique()
    left = halves.with_columns(pl.col("event").cast(pl.Int64)).join(paired, on="event", how="anti")
    reason = (
        pl.when(pl.col("src").is_null() | pl.col("dst").is_null())
        .then(pl.lit("no rank of this run ends its kernels with these: the peer was not captured"))
        .otherwise(pl.lit("its partner lies outside the capture, or was lost"))
    )
    return (
        left.with_columns(reason.alias("reason"))
        .group_by("rank", "send", "reason", maintain_order=True)
        .agg(pl.len().cast(pl.Int64).alias("count"), pl.col("dur").sum().alias("total_ns"))
        .sort("rank", "send", "reason")
    )
