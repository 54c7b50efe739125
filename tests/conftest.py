"""Where the traces and the tools of the tests are, how hypothesis runs, and what many tests begin with."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import typer.main
from hypothesis import HealthCheck, settings

import nsysk3

if TYPE_CHECKING:
    from exports import Export

    from nsysk3.result import Result

ROOT = Path(__file__).parent.parent
FIXTURES = ROOT / "fixtures"
TP2 = FIXTURES / "h200" / "tp2.sqlite"
GRAPH = FIXTURES / "h200" / "graph.sqlite"
PUBLISHED = FIXTURES / "kimi-k3-6000d"
REAL_NSYS = Path(
    os.environ.get("NSYSK3_NSYS") or Path("~/.cache/nsys-2024.2.3/target-linux-x64/nsys").expanduser()
).absolute()

# The same examples on every machine: a failure in CI is a failure here.
settings.register_profile(
    "nsysk3", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("nsysk3")


@pytest.fixture(scope="session", autouse=True)
def one_parser() -> Iterator[None]:
    """The command line's parser, made once in a process: it never changes, and is a tenth of a small analysis."""
    with patch.object(typer.main, "get_command", cache(typer.main.get_command)):
        yield


@pytest.fixture
def nsys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A real nsys, with a cache of its own."""
    if not REAL_NSYS.exists():
        pytest.skip("no real nsys: set NSYSK3_NSYS to one (.ci/run does)")
    monkeypatch.setenv("NSYSK3_NSYS", str(REAL_NSYS))
    monkeypatch.setenv("NSYSK3_CACHE", str(tmp_path / "nsysk3-cache"))
    return REAL_NSYS


@pytest.fixture
def small_reports(tmp_path: Path) -> Path:
    """A directory with copies of the reports that nsys 2024.2.3 can export."""
    folder = tmp_path / "reports"
    folder.mkdir()
    for name in ("tp2-small-2024.2.nsys-rep", "pp2-small-2024.2.nsys-rep"):
        shutil.copy(FIXTURES / "h200" / name, folder / name)
    return folder


@pytest.fixture
def recipe(nsys: Path) -> Path:
    """The wrapper that runs recipes in the Python that NVIDIA's library needs."""
    found = nsys.parent.parent / "nsys-recipe"
    if not found.exists():
        pytest.skip(f"{found} is not there: `get-nsys --recipes` makes it")
    return found


@pytest.fixture
def analyzed(tmp_path: Path) -> Callable[..., Result]:
    """Analyse a synthetic export."""

    def analyzed(export: Export, **options: Any) -> Result:
        path = tmp_path / "case.sqlite"
        path.unlink(missing_ok=True)
        return nsysk3.analyze(export.write(path), **options)

    return analyzed
