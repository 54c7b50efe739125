"""Where the traces and the tools of the tests are, and how hypothesis runs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).parent.parent
FIXTURES = ROOT / "fixtures"
REAL_NSYS = Path(
    os.environ.get("NSYSK3_NSYS") or Path("~/.cache/nsys-2024.2.3/target-linux-x64/nsys").expanduser()
).absolute()

# The same examples on every machine: a failure in CI is a failure here.
settings.register_profile(
    "nsysk3", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("nsysk3")


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
