"""Results as one self-contained HTML page: no request leaves it, and nothing in it runs but its own script."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from nsysk3.compare.model import Comparison
from nsysk3.report.blocks import Figure, Prose, Raw, Section, Table, numeric
from nsysk3.report.catalogue import catalogue
from nsysk3.report.masthead import comparison_facts, facts, headline, strips
from nsysk3.report.sections import compare, compare_runs
from nsysk3.report.sections.budget import budget
from nsysk3.report.sections.collectives import collectives
from nsysk3.report.sections.definitions import definitions
from nsysk3.report.sections.evidence import evidence
from nsysk3.report.sections.kernels import kernels
from nsysk3.report.sections.layers import layers
from nsysk3.report.sections.pipeline import pipeline
from nsysk3.report.sections.summary import summary
from nsysk3.report.sections.timeline import timeline
from nsysk3.report.sections.verdict import verdict
from nsysk3.report.text import clean, origin
from nsysk3.report.view import View
from nsysk3.result import Result

SECTIONS = (
    verdict, summary, budget, pipeline, collectives, layers, kernels, timeline, evidence, definitions,
)  # fmt: skip
# The longest text there is: a comparison's verdict.
_LONGEST = 4000
_SCRIPTS = ("page.js", "tables.js", "figures.js", "timeline.js")


def render_report(result: Result, lang: str = "en") -> str:
    """The page of one run.  Raises InputError for a language there is no catalogue of."""
    view = View(result, catalogue(lang))
    sections = [section(view) for section in SECTIONS]
    document = result.document
    return render_page(
        "report.html.j2", view.texts("ui.title"), lang, sections, headline=headline(view), facts=facts(view),
        strips=strips(view), simulated=document.simulated is not None,
        made_from=view.texts.said(origin(document.simulated or ""))[0],
        version=document.nsysk3_version,
    )  # fmt: skip


def render_comparison(comparison: Comparison, results: Sequence[Result], lang: str = "en") -> str:
    """The page of a comparison; ``results`` are the runs' results, base first."""
    texts = catalogue(lang)
    runs = [(clean(label, 40), View(result, texts)) for label, result in zip(comparison.labels, results, strict=True)]
    sections = [
        compare.verdict(comparison, texts), compare.headline(comparison, texts), compare.comparable(comparison, texts),
        compare_runs.budgets(runs, texts), compare.changes(comparison, texts), compare.apart(comparison, texts),
        compare_runs.pipelines(runs, texts), compare_runs.collectives(runs, texts),
        compare_runs.layers(runs, texts),
        compare_runs.evidence(comparison, runs, texts), definitions(runs[0][1]),
    ]  # fmt: skip
    sides = (comparison.base, *comparison.others)
    made = {side.label: texts.said(origin(side.simulated))[0] for side in sides if side.simulated}
    alike = len(made) == len(sides) and len(set(made.values())) == 1
    return render_page(
        "report.html.j2", texts("ui.title_comparison"), lang, [section for section in sections if section],
        headline=" → ".join(label for label, _ in runs), facts=comparison_facts(comparison, texts),
        strips=[strip for _, view in runs for strip in strips(view)][:8],
        simulated=bool(made), made_from=next(iter(made.values())) if alike else _by_run(made),
        version=comparison.nsysk3_version,
    )  # fmt: skip


def _by_run(made: Mapping[str, str]) -> str:
    return " · ".join(f"{clean(label, 40)}: {said}" if said else clean(label, 40) for label, said in made.items())


def render_page(
    template: str, title: str, lang: str, sections: list[Section], *, made_by: str | None = None, **fields: Any
) -> str:
    """A template with the sections, its styles and scripts inlined and named by hash in its security policy.

    ``made_by``: the last line, where the numbers do not come from a result.
    """
    texts = catalogue(lang)
    style, script = _asset("page.css"), "\n".join(_asset(name) for name in _SCRIPTS)
    labels = {key: value for key, value in texts.texts["ui"].items() if isinstance(value, str)}
    labels |= {f"col_{key}": texts(f"col.{key}") for key in ("layer", "forward", "stream")}
    labels |= {f"role_{key}": value for key, value in texts.texts["role"].items()}
    labels |= {f"state_{key}": value for key, value in texts.texts["state"].items()}
    page = _environment().get_template(template).render(
        t=texts, lang=lang, title=title, sections=sections, style=Markup(style), script=Markup(script),
        patterns=Markup(_asset("patterns.svg")), labels=json_block(labels), policy=_policy(style, script),
        made_by=made_by, **fields,
    )  # fmt: skip
    return page.encode("utf-8", "replace").decode("utf-8")


def json_block(value: object) -> Markup:
    """JSON that can stand inside a script element: nothing in it can end the element."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _policy(style: str, script: str) -> str:
    return (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def _asset(name: str) -> str:
    return files("nsysk3.report").joinpath("assets", name).read_text("utf-8")


def _harmless(value: object) -> object:
    """Whatever a template prints is visible text of bearable length; only our own markup passes as it is."""
    return clean(value, _LONGEST) if isinstance(value, str) and not isinstance(value, Markup) else value


@cache
def _environment() -> Environment:
    environment = Environment(
        finalize=_harmless, loader=PackageLoader("nsysk3.report", "templates"), autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.tests |= {
        "table": lambda block: isinstance(block, Table),
        "figure": lambda block: isinstance(block, Figure),
        "prose": lambda block: isinstance(block, Prose),
        "raw": lambda block: isinstance(block, Raw),
    }
    environment.filters["numeric"] = numeric
    return environment
