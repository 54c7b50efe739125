"""``nsysk3 compare``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nsysk3.cli.analyze import PARTIAL
from nsysk3.cli.progress import status
from nsysk3.cli.report import Language
from nsysk3.errors import InputError

if TYPE_CHECKING:
    from nsysk3.compare.model import Comparison
    from nsysk3.result import Result


class Format(StrEnum):
    """What to write."""

    text = "text"
    md = "md"
    html = "html"


def compare(
    base: Annotated[Path, typer.Argument(metavar="BASE", help="A run directory, its results, or traces of one run.")],
    others: Annotated[list[Path], typer.Argument(metavar="OTHER...", help="The runs to hold against it, in order.")],
    label: Annotated[
        list[str] | None,
        typer.Option(help="Name of a run; one for each, base first. Default: its PP degree, else its folder."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
    form: Annotated[Format | None, typer.Option("--format", help="What to write. Default: text.")] = None,
    out: Annotated[Path | None, typer.Option(help="File to write to instead of stdout.")] = None,
    fail_on: Annotated[
        list[str] | None,
        typer.Option(
            metavar="EXPR",
            help="Exit with 1 when the whole interval lies beyond: 'allreduce_total_ns>+10%' (relative change), "
            "'allreduce_p50_ns>+2ms' (absolute change), 'bubble_share>0.3' (the run itself); METRIC/window, "
            "METRIC/forward or METRIC/1k_tokens picks the row. Repeatable.",
        ),
    ] = None,
    window: Annotated[str | None, typer.Option(help="Window of traces that are analysed here, as for analyze.")] = None,
    lang: Annotated[
        Language | None, typer.Option(help="Language of the page. Default: report.lang in nsysk3.toml, else en.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Compare runs: PP1 against PP8, a ladder of PP degrees, or before and after.

    Numbers are per active rank, medians over stable ranks, with a bootstrap 95 % interval and a verdict; first comes
    what differs besides the layout. Exit code 1 when a --fail-on threshold is exceeded.
    """
    from nsysk3.cli.results import only_pages_have, open_result, tell_problems
    from nsysk3.compare import compare as run_comparison
    from nsysk3.compare.gate import FAILED, Gate, check
    from nsysk3.compare.labels import short_names
    from nsysk3.run.files import write_text

    gates = [Gate.parse(text) for text in fail_on or ()]
    if json and form is not None:
        raise InputError(f"--json and --format {form.value}: give one of them")
    only_pages_have(lang, page=form is Format.html)
    if any(not name.strip() for name in label or ()):
        raise InputError("--label: a label is empty; give every run a name, base first")
    with status(quiet) as progress:
        paths = (base, *others)
        results = [open_result(path, window, progress) for path in paths]
        comparison = run_comparison(results[0], results[1:], label, folders=short_names(paths))
    outcomes = check(comparison, gates)
    comparison = comparison.model_copy(update={"gates": outcomes})
    text = comparison.to_json() if json else _rendered(comparison, results, form or Format.text, lang)
    if out:
        write_text(out, text, paths)
        typer.echo(f"comparison written to {out}", err=True)
    else:
        typer.echo(text, nl=False)
    for outcome in outcomes:
        typer.echo(f"gate: {outcome.text}", err=True)
    failed = any(outcome.state == "failed" for outcome in outcomes)
    tell_problems(*results, code=FAILED if failed else PARTIAL)
    if failed:
        raise typer.Exit(FAILED)


def _rendered(comparison: Comparison, results: list[Result], form: Format, lang: Language | None) -> str:
    if form is Format.html:
        from nsysk3.cli.results import page_language
        from nsysk3.report.html import render_comparison as render_html

        return render_html(comparison, results, lang=page_language(lang))
    if form is Format.md:
        from nsysk3.report.markdown import render_comparison

        return render_comparison(comparison)
    from io import StringIO

    from nsysk3.report.compare_terminal import print_comparison
    from nsysk3.report.terminal import console

    text = StringIO()
    print_comparison(comparison, console(text))
    return text.getvalue()
