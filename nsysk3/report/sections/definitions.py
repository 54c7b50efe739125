"""What every number means, at the end of the page; terms everywhere open their entry here."""

from __future__ import annotations

from nsysk3.report.blocks import Raw, Section
from nsysk3.report.view import View


def definitions(view: View) -> Section:
    """Every term of the catalogue, in its order."""
    entries = [
        {"id": key, "term": view.texts(f"term.{key}"), "text": text}
        for key, text in view.texts.texts["definition"].items()
    ]
    return view.section("definitions", Raw("definitions", {"entries": entries}))
