"""What inputs are called in errors, whoever reads them, and URLs that name nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from command import run
from scale_runs import TWO

import nsysk3
from nsysk3.errors import InputError
from nsysk3.run.inputs import TraceInput
from nsysk3.run.remote import to_path
from nsysk3.scale.crew import Account, Alone


class Elsewhere(Alone):
    """Told absolute paths, as the workers of a cluster are."""

    def reachable(self, trace: TraceInput) -> TraceInput:
        return replace(trace, path=trace.path.absolute())


def test_problems_name_files_as_they_were_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad").mkdir()
    Path("bad/text.sqlite").write_text("no database")
    Path("bad/node.sqlite").symlink_to(TWO / "node0.sqlite")
    with Elsewhere() as crew:
        [problem] = nsysk3.analyze("bad", crew=crew).document.problems
    assert problem == nsysk3.analyze("bad").document.problems[0]
    assert problem.message.startswith("bad/text.sqlite: not an SQLite file")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("s3://", "s3://: names no place; wanted is s3://HOST/PATH"),
        ("foo://", "foo://: names no place; wanted is foo://HOST/PATH"),
        ("file://", "file://: names no place; wanted is file:///PATH"),
        (
            "simplecache::s3://b/run",
            "simplecache::s3://b/run: chained URLs are not read; give the last one alone, s3://b/run",
        ),
    ],
)
def test_urls_that_cannot_be_read_say_what_is_wanted(given: str, said: str) -> None:
    for each in (given, Path(given)):
        with pytest.raises(InputError, match=f"^{said}$"):
            to_path(each)


def test_schemes_are_of_any_case_also_in_a_path() -> None:
    assert str(to_path(Path("S3://bucket/run"))) == "s3://bucket/run"


def test_memory_is_of_one_process() -> None:
    fsspec = pytest.importorskip("fsspec")
    fsspec.filesystem("memory").pipe("/lonely/a.sqlite", b"1")
    try:
        ran = run("analyze", "memory://lonely", "--workers", "2")
    finally:
        fsspec.filesystem("memory").store.clear()
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert "memory:// is known to one process only" in ran.err


def test_one_is_no_plural() -> None:
    assert str(Account(peaks={"here": 1}, repeated=1)).startswith("1 worker: ")
    assert str(Account(peaks={"here": 1}, repeated=1)).endswith("; 1 step done again")
