"""A report in a folder of its own, what is there afterwards, and what is said of one that cannot be exported."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from conftest import FIXTURES

from nsysk3.errors import NsysK3Error


def lone_report(folder: Path) -> Path:
    """A report in a folder of its own, so that what an export leaves there can be listed."""
    place = folder / "reports"
    place.mkdir()
    return Path(shutil.copy(FIXTURES / "h200" / "tp2-small-2024.2.nsys-rep", place / "r.nsys-rep"))


def names(folder: Path) -> list[str]:
    """What is in a folder."""
    return sorted(path.name for path in folder.iterdir())


def one_line(error: pytest.ExceptionInfo[NsysK3Error]) -> str:
    """What an error says, which must be one printable line."""
    text = str(error.value)
    assert "\n" not in text
    assert text.isprintable()
    return text
