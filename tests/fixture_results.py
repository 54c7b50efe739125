"""What the analysis says of the committed traces, made once in a process; nobody writes to it."""

from __future__ import annotations

from functools import cache

from conftest import FIXTURES

import nsysk3
from nsysk3.result import Result
from nsysk3.trace.load import Run


@cache
def result_of(trace: str) -> Result:
    """The analysis of fixtures/TRACE.sqlite, all options at their defaults."""
    return nsysk3.analyze(FIXTURES / f"{trace}.sqlite")


@cache
def run_of(trace: str) -> Run:
    """fixtures/TRACE.sqlite, loaded."""
    return nsysk3.load(FIXTURES / f"{trace}.sqlite")
