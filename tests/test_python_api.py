"""nsysk3 as a library."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import GRAPH
from exports import two_ranks

import nsysk3
from nsysk3.analysis.analyze import analyze as run_analysis
from nsysk3.errors import InputError
from nsysk3.result import Result


def test_the_light_parts_stay_light() -> None:
    heavy = "polars numpy pandas pyarrow sqlalchemy pydantic plotly jinja2 adbc_driver_sqlite"
    for statement in ("import nsysk3; nsysk3.__version__", "import nsysk3.cli"):
        code = f"{statement}; import sys; print(*[m for m in {heavy.split()} if m in sys.modules])"
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert ran.stdout.strip() == "", statement


def test_the_python_api_has_what_the_readme_names() -> None:
    assert {"load", "analyze", "Run", "Result"} <= set(nsysk3.__all__)
    result = nsysk3.analyze(nsysk3.load(GRAPH))
    assert list(result.rank_metrics.to_pandas()["world_rank"]) == [0, 1]
    assert "rank_metrics" in dir(result)
    with pytest.raises(AttributeError, match=r"no table 'layer_metricks'; this result has .*rank_metrics"):
        result.layer_metricks  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'analyse'"):
        nsysk3.analyse  # noqa: B018


def test_analyses_are_pure(tmp_path: Path) -> None:
    """One loaded run can be analysed again and again, in any order."""
    run = nsysk3.load(two_ranks().write(tmp_path / "r.sqlite"))
    first = run_analysis(run)
    run_analysis(run, window="0:1ms")
    assert run_analysis(run).document == first.document


def test_loading_a_result_that_is_none_is_one_line(tmp_path: Path) -> None:
    saved = nsysk3.analyze(GRAPH).save(tmp_path / "out")
    with pytest.raises(InputError, match="not a readable result"):
        Result.load(tmp_path)
    text = (saved / "result.json").read_text()
    for spoilt in (text[:1000], "[]", "{}", text.replace('"schema_version": 1', '"schema_version": 999')):
        (saved / "result.json").write_text(spoilt)
        with pytest.raises(InputError, match=r"result\.json: .*analyze again") as error:
            Result.load(saved)
        assert "\n" not in str(error.value)
    (saved / "result.json").write_text(text)
    (saved / "budget.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match="analyze again"):
        Result.load(saved)
