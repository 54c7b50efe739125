"""What load() says of a URL, which only the analysis reads."""

from __future__ import annotations

import pytest
from conftest import FIXTURES

import nsysk3
from nsysk3.errors import InputError

fsspec = pytest.importorskip("fsspec")


def test_load_says_that_analyze_reads_urls() -> None:
    url = "memory://loaded/tp2.sqlite"
    fsspec.filesystem("memory").pipe_file("/loaded/tp2.sqlite", (FIXTURES / "h200" / "tp2.sqlite").read_bytes())
    with pytest.raises(InputError, match=r"is a URL, which nsysk3\.analyze\(URL\) and `nsysk3 analyze` read") as raised:
        nsysk3.load(url)
    assert str(raised.value).count(url) == 1
    assert nsysk3.analyze(url).rank_metrics.height == 2
