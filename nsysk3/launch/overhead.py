"""What the profiler costs: the same load with the capture open, with it closed, and on a server without nsys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nsysk3.launch.load_record import percentile
from nsysk3.launch.window import Window

# Below this a median says nothing.
FEWEST = 3


def overhead(
    profiled: Mapping[str, Any],
    window: Window,
    baseline: Mapping[str, Any] | None,
    plain: Mapping[str, Any] | None = None,
    *,
    ranged: bool = True,
) -> dict[str, Any]:
    """How much slower requests were inside the capture than under the same load outside it.

    In a closed loop the time a request takes is concurrency over throughput, so the ratio of latencies is that of
    throughputs, and needs no whole number of requests in the window.  Compared are medians of requests that were sent
    and answered inside the capture, and of the baseline's without its first and last wave.

    Args:
        profiled: record of the load (``load_record``) that the capture was opened in.
        window: that capture.
        baseline: record of the same load on the same server with the capture closed.
        plain: the same on a server without nsys.
        ranged: nsys collected nothing but the capture.

    Returns:
        ``capture``: the slowdown while collecting, 0.01 for 1 %; ``attached``: of the server under nsys with its
        capture closed, against the plain one.  Null where it cannot be known, with ``reason``; and what it came from.
        ``noise``: half of the middle half of the other load's latencies over their median, as a share: a slowdown
        below it may be chance.
    """
    found: dict[str, Any] = {"capture": None, "attached": None}
    inside = _inside(profiled, window)
    steady = _steady(baseline) if baseline else []
    found |= {"requests_inside": len(inside), "requests_outside": len(steady)}
    if baseline is None:
        found["reason"] = "no load with the capture closed was run (window.overhead is off)"
    elif not ranged:
        found["reason"] = "without a GPU nsys collects the whole run"
    elif len(inside) < FEWEST or len(steady) < FEWEST:
        found["reason"] = (
            f"{len(inside)} requests lay inside the capture and {len(steady)} in the steady part of the other load; "
            f"{FEWEST} of each are needed: more --forwards or --requests"
        )
    else:
        found |= {"latency_inside_s": percentile(inside, 0.5), "latency_outside_s": percentile(steady, 0.5)}
        found["capture"] = found["latency_inside_s"] / found["latency_outside_s"] - 1
        found["noise"] = (percentile(steady, 0.75) - percentile(steady, 0.25)) / 2 / found["latency_outside_s"]
    if baseline and plain:
        under, without = _steady(baseline), _steady(plain)
        if len(under) >= FEWEST and len(without) >= FEWEST:
            found["attached"] = percentile(under, 0.5) / percentile(without, 0.5) - 1
            found["latency_without_nsys_s"] = percentile(without, 0.5)
    return found


def sentence(found: Mapping[str, Any]) -> str:
    """The overhead as one line."""
    if found["capture"] is None:
        text = f"profiler overhead: not measured ({found['reason']})"
    else:
        text = (
            f"profiler overhead: {found['capture']:+.1%} ± {found['noise']:.1%} while collecting (median latency of "
            f"{found['requests_inside']} requests {found['latency_inside_s']:.3f} s, of {found['requests_outside']} "
            "with the capture closed "
            f"{found['latency_outside_s']:.3f} s)"
        )
    if found["attached"] is not None:
        text += f"; {found['attached']:+.1%} for nsys being there at all"
    return text


def _inside(record: Mapping[str, Any], window: Window) -> list[float]:
    """Seconds that requests took which lie within the capture whole."""
    if window.opened_ns is None or window.closed_ns is None or record.get("start_times") is None:
        return []
    opened, closed = ((each - record["began_ns"]) / 1e9 for each in (window.opened_ns, window.closed_ns))
    return [took for sent, took in _good(record) if sent >= opened and sent + took <= closed]


def _steady(record: Mapping[str, Any]) -> list[float]:
    """Seconds that requests took, without the first wave (into an empty pipeline) and the last (which leaves one)."""
    wave = int(record["max_concurrency"])
    good = _good(record)
    return [took for _, took in good[wave : len(good) - wave]]


def _good(record: Mapping[str, Any]) -> Sequence[tuple[float, float]]:
    """When each request that succeeded was sent, and how long it took; in the order of sending."""
    if record.get("start_times") is None:  # of another client
        return []
    rows = zip(record["start_times"], record["latencies"], record["errors"], strict=True)
    return sorted((sent, took) for sent, took, error in rows if not error)
