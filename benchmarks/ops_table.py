"""The tables of an ops_bench record."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def write_markdown(folder: Path) -> None:
    """ops.md beside ops.json."""
    source = folder / "ops.json"
    if not source.is_file():
        return
    document = json.loads(source.read_text("utf-8"))
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in document["rows"]:
        groups.setdefault((str(row.get("section")), *sorted(row)), []).append(row)
    lines = ["# nsysk3.ops, measured", "", *(f"- {k}: {v}" for k, v in document["facts"].items()), ""]
    for (section, *_), rows in groups.items():
        columns = [c for c in rows[0] if c != "section"]
        lines += [f"## {section}", "", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        lines += ["| " + " | ".join(str(row.get(c)) for c in columns) + " |" for row in rows] + [""]
    (folder / "ops.md").write_text("\n".join(lines), "utf-8")


if __name__ == "__main__":
    write_markdown(Path(sys.argv[1]))
