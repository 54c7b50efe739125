"""What ``--cache`` keeps spares reading, and is never taken for anything but what it was made from."""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from command import run
from scale_runs import TWO, assert_same

import nsysk3
from nsysk3.analysis import event_cache, steps


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, that also takes files made just now."""
    monkeypatch.setenv("NSYSK3_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(event_cache, "_SETTLED_S", 0)
    return tmp_path / "cache" / "events"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A trace of one's own."""
    copy = tmp_path / "t.sqlite"
    shutil.copy(TWO / "node0.sqlite", copy)
    copy.chmod(0o644)
    return copy


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The reports that are really read."""
    found: list[str] = []
    really = steps.read_part

    def told(report: Any, *rest: Any) -> Any:
        found.append(report.name)
        return really(report, *rest)

    monkeypatch.setattr(steps, "read_part", told)
    return found


def entries(cache: Path) -> list[Path]:
    return sorted(cache.iterdir()) if cache.exists() else []


def test_the_second_analysis_reads_nothing_and_finds_the_same(cache: Path, reads: list[str]) -> None:
    plain = nsysk3.analyze(TWO)
    assert not cache.exists()
    assert len(reads) == 2
    for _ in range(2):
        assert_same(plain, nsysk3.analyze(TWO, cache=True))
    assert len(reads) == 4
    assert len(entries(cache)) == 2


def shifted(path: Path) -> None:
    """Other numbers in the same bytes: size and time of change as they were."""
    before = path.stat()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("update CUPTI_ACTIVITY_KIND_KERNEL set start = start - 1000")
        connection.commit()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replaced(path: Path) -> None:
    copy = path.with_name("other.sqlite")
    shutil.copy2(path, copy)
    shifted(copy)
    copy.replace(path)


def journalled(path: Path) -> None:
    path.with_name(path.name + "-wal").write_bytes(b"left")


@pytest.mark.parametrize("change", [shifted, replaced, journalled])
def test_a_file_that_changed_is_read_again(cache: Path, trace: Path, change: Callable[[Path], None]) -> None:
    nsysk3.analyze(trace, cache=True)
    change(trace)
    assert_same(nsysk3.analyze(trace), nsysk3.analyze(trace, cache=True))


def test_other_questions_have_other_entries(cache: Path, trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    regex = r"layer(?P<layer>\d+)"
    nsysk3.analyze(trace, cache=True)
    assert_same(nsysk3.analyze(trace, layer_regex=regex), nsysk3.analyze(trace, layer_regex=regex, cache=True))
    assert len(entries(cache)) == 2
    monkeypatch.setattr(event_cache, "__version__", "another")
    nsysk3.analyze(trace, cache=True)
    assert len(entries(cache)) == 3


def test_an_entry_that_is_not_whole_or_not_ours_is_no_entry(cache: Path, trace: Path, reads: list[str]) -> None:
    expected = nsysk3.analyze(trace, cache=True)
    names = sorted(file.name for file in entries(cache)[0].iterdir())
    assert {"index.json", "answer", "events.arrow"} <= set(names)
    for number, name in enumerate(names, 2):
        file = entries(cache)[0] / name
        raw = bytearray(file.read_bytes())
        raw[len(raw) // 2] ^= 1
        file.write_bytes(raw if number % 2 else raw[:-1])
        assert_same(expected, nsysk3.analyze(trace, cache=True))
        assert len(reads) == number
    entries(cache)[0].chmod(0o777)  # anybody could have written it
    assert_same(expected, nsysk3.analyze(trace, cache=True))
    assert len(reads) == number + 1


def test_what_was_used_longest_ago_goes_first(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nsysk3.analyze(TWO / "node0.sqlite", cache=True)
    [first] = entries(cache)
    os.utime(first, (1, 1))
    size = sum(file.stat().st_size for file in first.iterdir())
    monkeypatch.setattr(event_cache, "_MOST_BYTES", round(size * 1.5))
    nsysk3.analyze(TWO / "node1.sqlite", cache=True)
    assert first not in entries(cache)
    assert len(entries(cache)) == 1


def test_a_file_that_changed_just_now_is_not_kept(trace: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_cache, "_SETTLED_S", 2)
    trace.touch()
    nsysk3.analyze(trace, cache=True)
    assert entries(cache) == []
    monkeypatch.setattr(time, "time", lambda: trace.stat().st_ctime + 3)
    nsysk3.analyze(trace, cache=True)
    assert len(entries(cache)) == 1


def test_a_cache_that_cannot_be_written_is_none(cache: Path, trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSYSK3_CACHE", "/proc/nothing")
    ran = run("analyze", trace, "--cache", "--json")
    assert (ran.code, ran.err) == (0, "")


def test_the_settings_can_ask_for_it(cache: Path, trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSYSK3_ANALYZE_CACHE", "true")
    assert run("analyze", trace, "--no-cache", "-q", "--out", trace.parent / "out").code == 0
    assert entries(cache) == []
    assert run("analyze", trace, "-q", "--out", trace.parent / "out").code == 0
    assert len(entries(cache)) == 1


def test_an_export_of_many_files_is_known_by_all_of_them(tmp_path: Path, cache: Path) -> None:
    copy = tmp_path / "t_pqtdir"
    copy.mkdir()
    (copy / "A.parquet").write_bytes(b"1")
    before = event_cache.identity(copy)
    assert before == event_cache.identity(copy)
    (copy / "MORE.parquet").write_bytes(b"2")
    assert event_cache.identity(copy) not in {before, None}
    assert event_cache.identity(tmp_path / "gone.sqlite") is None
