"""A sweep's findings, ready to be shown."""

from __future__ import annotations

import json
from dataclasses import asdict

from nsysk3.errors import InputError
from nsysk3.run.words import counted
from nsysk3.sweep.findings import Findings, find
from nsysk3.sweep.merge import Sweep
from nsysk3.sweep.nccl_table import NCCL_CSV, domain_table, read_csv
from nsysk3.sweep.tables import TextTable, verdict

# Files named in a sentence.
SHOWN = 3


def find_in(sweep: Sweep) -> tuple[Findings, list[TextTable]]:
    """The findings, and further tables that lie in the folder.  Raises InputError where no repeat counts."""
    if not sweep.points:
        raise InputError(f"{sweep.folder.path}: no repeat of this sweep counts; its metadata/sweep.json says why")
    rows = read_csv(sweep.folder.path / NCCL_CSV)
    record = sweep.record.model_copy(update={"notes": [*sweep.record.notes, *_unproven(sweep)]})
    return find(sweep.points, record, sweep.repeats), [domain_table(rows)] if rows else []


def _unproven(sweep: Sweep) -> list[str]:
    """Repeats of this folder whose row nobody can check any more; a baseline's copy never has its JSON lines."""
    lost = list(sweep.folder.unproven().values())
    if not lost:
        return []
    shown = "; ".join(lost[:SHOWN]) + (f"; and {len(lost) - SHOWN} more" if len(lost) > SHOWN else "")
    count = counted(len(lost), "row")
    return [f"{count} of results.csv cannot be checked any more: {shown}; nsysk3 sweep --resume measures that again"]


def to_json(sweep: Sweep) -> str:
    """Points and findings as JSON, numbers as they are."""
    findings, _ = find_in(sweep)
    document = {
        "record": sweep.record.model_dump(mode="json", exclude_defaults=True),
        "points": [asdict(point) for point in sweep.points],
        "findings": asdict(findings) | {"verdict": verdict(findings)},
    }
    return json.dumps(document, indent=1) + "\n"
