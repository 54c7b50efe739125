"""Windows: how they are written, and that none is longer than was asked."""

from __future__ import annotations

import polars as pl
import pytest
from conftest import FIXTURES
from hypothesis import given
from hypothesis import strategies as st
from time_sets import nanoseconds

import nsysk3
from nsysk3.analysis.windows import capture_windows, explicit_windows, parse_window
from nsysk3.errors import InputError


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("0:1", 0, 10**9),
        ("0.5s:2s", 5 * 10**8, 2 * 10**9),
        ("100ms:1.5s", 10**8, 15 * 10**8),
        (" 1us : 7 ns ", None, None),
        ("7ns:1us", 7, 1000),
        ("-1ms:0.25", -(10**6), 25 * 10**7),
        ("-3:-1", -3 * 10**9, -(10**9)),
    ],
)
def test_windows_are_read_with_their_units(text: str, low: int | None, high: int | None) -> None:
    if low is None:
        with pytest.raises(InputError, match="end must come after"):
            parse_window(text)
        return
    spec = parse_window(text)
    assert (spec.start_ns, spec.end_ns) == (low, high)


@pytest.mark.parametrize(
    "text", ["", ":", "1:", ":2", "1", "a:b", "1:1", "2:1", ".:1", "1.2.3:4", "1h:2h", "nan:1", "1e3:1e4", "Capture",
             "99999999999999999999s:999999999999999999999s"]
)  # fmt: skip
def test_other_windows_are_one_line(text: str) -> None:
    with pytest.raises(InputError) as error:
        nsysk3.analyze(FIXTURES / "h200" / "graph.sqlite", window=text)
    assert f"--window {text!r}" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["0:99999999999", "-99999999999999999999:99999999999999999999"])
def test_a_window_far_beyond_the_trace_is_all_of_it(text: str) -> None:
    trace = FIXTURES / "h200" / "graph.sqlite"
    assert nsysk3.analyze(trace, window=text).rank_metrics.equals(nsysk3.analyze(trace).rank_metrics)


@given(
    st.lists(st.tuples(st.integers(10**6, 10**6 + 100), st.integers(1, 50)), min_size=1, max_size=5),
    st.integers(-50, 200),
    st.integers(1, 200),
)
def test_a_window_is_never_longer_than_asked_nor_than_the_capture(
    captures: list[tuple[int, int]], low: int, length: int
) -> None:
    events = pl.DataFrame(
        {
            "rank": range(len(captures)),
            "start": [start for start, _ in captures],
            "end": [start + size for start, size in captures],
            "kind": "kernel",
        }
    )
    origin = min(start for start, _ in captures)
    asked = parse_window(f"{low}ns:{low + length}ns")
    found = explicit_windows(capture_windows(events), asked)
    for (start, size), (_, begin, end) in zip(captures, found.iter_rows(), strict=True):
        expected = set(range(start, start + size)) & set(range(origin + low, origin + low + length))
        assert nanoseconds([begin], [end]) == expected
        assert begin <= end
