"""The head of a page: which run this is, its layout, and its medians as thin strips."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from nsysk3.compare.model import Comparison
from nsysk3.report.catalogue import Catalogue
from nsysk3.report.text import clean
from nsysk3.report.view import View

_NAMES = 4


def headline(view: View) -> str:
    """The run's name: its id, else the reports it was read from."""
    manifest = view.document.manifest or {}
    if manifest.get("run_id"):
        return clean(manifest["run_id"], 80)
    names = [clean(report.name, 60) for report in view.document.reports]
    return ", ".join(names[:_NAMES]) + (f" + {len(names) - _NAMES}" if len(names) > _NAMES else "")


def facts(view: View) -> list[tuple[str, str]]:
    """Label and value of what tells runs apart."""
    texts, document = view.texts, view.document
    manifest: dict[str, Any] = document.manifest or {}
    found = []
    topology = manifest.get("topology")
    if topology:
        layout = f"PP{topology['pp']} / TP{topology['tp']} / EP{topology.get('ep', 1)}"
        found.append((texts("run.topology"), layout))
    model = (manifest.get("server") or {}).get("model_path")
    if model:
        found.append((texts("run.model"), clean(model, 80)))
    if manifest.get("engine"):
        found.append((texts("run.engine"), clean(manifest["engine"], 60)))
    stable = document.summary["stable_ranks"]
    found.append((texts("run.ranks"), texts("ui.ranks", n=len(document.ranks), stable=stable)))
    gpus = sorted({clean(rank.gpu_name, 60) for rank in document.ranks if rank.gpu_name})
    if gpus:
        found.append((texts("run.gpu"), ", ".join(gpus)))
    hosts = sorted({clean(rank.host, 40) for rank in document.ranks if rank.host})
    found.append(
        (texts("run.hosts"), ", ".join(hosts[:_NAMES]) + (f" + {len(hosts) - _NAMES}" if len(hosts) > _NAMES else ""))
    )
    window = document.window
    key = "window" if window.used == window.asked else "window_asked"
    said = {"window": clean(window.used)} if key == "window" else {
        "used": clean(window.used), "asked": clean(window.asked), "reason": texts.said(clean(window.reason or ""))[0]
    }  # fmt: skip
    found.append((texts("run.window"), texts(f"ui.{key}", **said).split(": ", 1)[-1]))
    return found


def strips(view: View) -> list[list[tuple[str, str, str]]]:
    """The medians of the time budget as (class, x, width) of 1200, one list a group of ranks."""
    groups: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for row in view.rows("budget_summary"):
        groups[row["group"]].append((f"b-{row['bucket']}", (row["share"] or 0) * 100))
    made = []
    for parts in groups.values():
        reach, strip = 0.0, []
        for swatch, width in parts:
            strip.append((swatch, f"{reach * 12:.1f}", f"{width * 12:.1f}"))
            reach += width
        made.append(strip)
    return made


def comparison_facts(comparison: Comparison, texts: Catalogue) -> list[tuple[str, str]]:
    """Each run's layout, and the GPUs."""
    sides = (comparison.base, *comparison.others)
    found = [(clean(side.label, 40), clean(side.layout.text, 60)) for side in sides]
    gpus = sorted({clean(side.gpu_name, 60) for side in sides if side.gpu_name})
    return found + ([(texts("run.gpu"), ", ".join(gpus))] if gpus else [])
