"""Results and pages that the report's tests share."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import polars as pl
from conftest import FIXTURES

from nsysk3.analysis.analyze import analyze
from nsysk3.report.html import render_report
from nsysk3.result import Result

TP2 = FIXTURES / "sglang-h200" / "tp2-lw.sqlite"
PP2 = FIXTURES / "sglang-h200" / "pp2-lw.sqlite"
RUN = "<script>alert(1)</script>"
HOSTILE = (
    RUN,
    '"><img src=x onerror=alert(2)>',
    "</script><script>alert(3)</script>",
    "' onmouseover='alert(4)",
    "{{ 7*7 }}{% raw %}",
    "javascript:alert(5)",
    "\u202etxt.exe\u2066\u200b",
    "nul\x00bell\x07esc\x1b[31m",
    "lone \udcff\ud800 surrogate",
    "<!--<script>",
    "]]>&lt;&#0;",
    "=cmd|' /C calc'!A0",
    "https://example.invalid/x.png",
    "名前 " + "x" * 100_000,
)


@cache
def real(path: Path) -> Result:
    """The result of a real trace, analysed once."""
    return analyze(path)


def hostile() -> Result:
    """A real result in which every text that a trace or a manifest could bring is hostile."""
    result = real(PP2)
    tables = {name: _poisoned(table) for name, table in result.tables.items()}
    document = result.document.model_dump()
    for rank in document["ranks"]:
        rank |= {"host": HOSTILE[1], "report": HOSTILE[2], "reason": HOSTILE[3], "gpu_name": HOSTILE[0]}
        rank |= {"rank_source": HOSTILE[4], "gpu_uuid": HOSTILE[6]}
    document["reports"] = [
        {**report, "name": text, "path": text, "host": text, "exporter": text, "diagnostics": [text]}
        for report in document["reports"]
        for text in HOSTILE
    ]
    document |= {"notes": list(HOSTILE), "sentences": list(HOSTILE), "simulated": HOSTILE[2]}
    document["not_measured"] = dict(zip(HOSTILE, HOSTILE, strict=True)) | {"allreduce_p50_ns": HOSTILE[1]}
    document["manifest"] = {"run_id": HOSTILE[2], "server": {text: text for text in HOSTILE}, "engine": HOSTILE[0]}
    document["problems"] = [{"path": text, "message": text} for text in HOSTILE]
    return Result(type(result.document).model_validate(document), tables)


# Columns by which the analysis tells things apart; a trace cannot choose them.
_OURS = frozenset({"bucket", "group", "role", "op", "kind", "state", "wait_state", "confidence", "phase", "source"})


def _poisoned(table: pl.DataFrame) -> pl.DataFrame:
    texts = [name for name, kind in table.schema.items() if kind == pl.String and name not in _OURS]
    valid = [text.encode("utf-8", "replace").decode() for text in HOSTILE]
    made: dict[str, Any] = {
        name: [None if old is None else valid[row % len(valid)] for row, old in enumerate(table[name].to_list())]
        for name in texts
    }
    return table.with_columns(pl.Series(name, values, pl.String) for name, values in made.items())


def page(result: Result, folder: Path, name: str = "page", lang: str = "en") -> Path:
    """The page of a result on disk."""
    file = folder / f"{name}.html"
    file.write_text(render_report(result, lang), "utf-8")
    return file
