"""The document of a comparison: its schema, its metrics, its labels."""

from __future__ import annotations

import numpy as np
import pytest
from compare_results import plain, with_forwards
from conftest import ROOT

from nsysk3.compare import compare
from nsysk3.compare.catalog import METRICS
from nsysk3.compare.model import schema_text
from nsysk3.errors import InputError
from nsysk3.result import Result


def test_rows_do_not_depend_on_the_order_of_tables() -> None:
    run = with_forwards(2, 2, 5 + np.random.default_rng(2).normal(0, 1, (4, 10)))
    mixed = {name: run.tables[name].sample(fraction=1, shuffle=True, seed=5) for name in ("forwards", "collectives")}
    other = with_forwards(1, 4, 6 + np.random.default_rng(3).normal(0, 1, (4, 10)))
    assert compare(run, [other]) == compare(Result(run.document, {**run.tables, **mixed}), [other])


def test_the_written_schema_is_current() -> None:
    # To make it anew: python -c 'from nsysk3.compare.model import *; print(schema_text(), end="")' > docs/...
    assert (ROOT / "docs" / "comparison.schema.json").read_text("utf-8") == schema_text()


def test_metrics_have_one_name_each() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    assert {metric.unit for metric in METRICS} == {"ns", "count", "share"}


@pytest.mark.parametrize(
    ("labels", "said"), [(["a"], "1 labels for 2 runs"), (["a", "a"], "the same label"), (["a", "b", "c"], "3 labels")]
)
def test_labels_must_fit(labels: list[str], said: str) -> None:
    run = plain(None)
    with pytest.raises(InputError, match=said):
        compare(run, [run], labels)


def test_one_run_is_no_comparison() -> None:
    with pytest.raises(InputError, match="at least one other run"):
        compare(plain(None), [])
