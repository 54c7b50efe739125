"""``python -m nsysk3.ops.dispatch_table OPS_JSON [FOLDER]``: a dispatch table from what benchmarks/ops_bench.py wrote.

A path is named only where it was measured faster than NCCL and the one-launch residual, by more than repeats scatter,
in a run whose checks of correctness and whose soak were clean.  Every cell keeps the times that decided it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nsysk3.errors import InputError, NsysK3Error
from nsysk3.ops.dispatch import BASELINE, PULL, PUSH

# A path must be this much faster than the baseline to be taken: repeats scatter by so much.
MARGIN = 0.02
# Errors of the GEMM's forms against float64, worst row; partials are rounded to be sent.
_LINEAR_LIMIT = 8e-3

Case = tuple[int, int]
# What was measured of one case: the path and the time.
Measured = tuple[str, float]


def make_table(document: dict[str, Any]) -> dict[str, Any]:
    """The table's JSON document.  InputError when the benchmark found wrong results, or did not look for them."""
    facts, rows = document["facts"], document["rows"]
    _check_clean(rows)
    operations = {
        "rs_attn_res": _cells(_baseline(rows), _by_case(_reduce_scatters(rows))),
        "linear_rs_attn_res": _cells(_serial(rows), _by_case(_linears(rows))),
        "attn_res_ag": _cells(_gather_baseline(rows), _by_case(_gathers(rows))),
    }
    source = {key: facts[key] for key in ("date", "command", "torch", "cuda", "nccl", "driver") if key in facts}
    filled = {operation: cells for operation, cells in operations.items() if cells}
    return {"device": facts["device"], "world": facts["world"], "source": source, "operations": filled}


def _check_clean(rows: list[dict[str, Any]]) -> None:
    correct = [row for row in rows if row.get("section") == "correct"]
    if not correct or any("failures" not in row for row in correct):
        raise InputError("the benchmark did not finish its checks of correctness")
    wrong = sum(row["failures"] for row in correct)
    wrong += sum(row.get("differ", 1) + (not row.get("healthy")) for row in rows if row.get("section") == "soak")
    if wrong:
        raise InputError(f"the benchmark found {wrong} wrong results: no table is made of it")


def _cells(baseline: dict[Case, float], measured: dict[Case, list[Measured]]) -> list[dict[str, Any]]:
    """One cell for each case that both were measured for."""
    cells = []
    for case in sorted(baseline.keys() & measured.keys()):
        path, best = min(measured[case], key=lambda each: each[1])
        wins = best < baseline[case] * (1 - MARGIN)
        cell = {"tokens": case[0], "rows": case[1], "path": path if wins else BASELINE}
        cells.append({**cell, "us": {BASELINE: baseline[case], **_best_of_each(measured[case])}})
    return cells


def _best_of_each(measured: list[Measured]) -> dict[str, float]:
    best: dict[str, float] = {}
    for path, us in measured:
        best[path] = min(us, best.get(path, us))
    return best


def _by_case(measured: Iterator[tuple[Case, Measured]]) -> dict[Case, list[Measured]]:
    found: dict[Case, list[Measured]] = {}
    for case, each in measured:
        found.setdefault(case, []).append(each)
    return found


def _case(row: dict[str, Any]) -> Case:
    return row["M"], row["nvb"]


def _baseline(rows: list[dict[str, Any]]) -> dict[Case, float]:
    named = [row for row in rows if row.get("section") == "baselines"]
    return {_case(row): row["nccl_k0"] for row in named if isinstance(row.get("nccl_k0"), int | float)}


def _reduce_scatters(rows: list[dict[str, Any]]) -> Iterator[tuple[Case, Measured]]:
    for row in rows:
        if row.get("section") == "k1" and row["path"] in (PULL, PUSH):
            yield _case(row), (row["path"], row["us"])
        elif row.get("section") == "k1_graph":
            timed = {path: row[path] for path in (PULL, PUSH) if isinstance(row.get(path), int | float)}
            yield from ((_case(row), each) for each in timed.items())


def _serial(rows: list[dict[str, Any]]) -> dict[Case, float]:
    """GEMM, then the best reduce-scatter: what the GEMM's own forms must beat."""
    named = [row for row in rows if row.get("section") == "k2" and row.get("what") == "GEMM, then K1"]
    return {_case(row): row["us"] for row in named}


def _linears(rows: list[dict[str, Any]]) -> Iterator[tuple[Case, Measured]]:
    for row in rows:
        named = row.get("section") == "k2" and row.get("what") == "K2"
        if named and row.get("healthy") and float(row["error"]) < _LINEAR_LIMIT:
            yield _case(row), (PUSH, row["us"])


def _gather_baseline(rows: list[dict[str, Any]]) -> dict[Case, float]:
    return {_case(row): row["k0_nccl"] for row in rows if row.get("section") == "k3" and "k0_nccl" in row}


def _gathers(rows: list[dict[str, Any]]) -> Iterator[tuple[Case, Measured]]:
    for row in rows:
        if row.get("section") == "k3" and row.get("same"):
            yield _case(row), (PUSH, row["us"])


def main(arguments: list[str]) -> int:
    """Write the table beside nsysk3's, or to the folder given; print its path."""
    if not arguments:
        print(__doc__.splitlines()[0], file=sys.stderr)
        return 2
    folder = Path(arguments[1]) if len(arguments) > 1 else Path(__file__).with_name("dispatch")
    try:
        table = make_table(json.loads(Path(arguments[0]).read_text("utf-8")))
        table["source"]["record"] = Path(arguments[0]).name
    except (OSError, ValueError, KeyError, NsysK3Error) as error:
        print(f"nsysk3.ops.dispatch_table: {arguments[0]}: {error}", file=sys.stderr)
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"\W+", "-", table["device"]).strip("-").lower()
    path = folder / f"{name}-x{table['world']}.json"
    path.write_text(json.dumps(table, indent=1) + "\n", "utf-8")
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
